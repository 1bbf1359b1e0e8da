"""Views of images with masks and boxes: geometry against Pillow and properties, batches, and crop "fit"."""

import colorsys
import io
import os
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from refusals import refused

from vitkit.data.augment import change_hsv, photometric
from vitkit.data.batch_cache import keep_batches
from vitkit.data.decode import BadImage
from vitkit.data.decoded_cache import decoded
from vitkit.data.geometry import Geometry, draw_crop
from vitkit.data.loader import BadFiles, evaluation_batches, train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.splits import complete, join, same_classes, subset
from vitkit.data.target_views import DRAWS, BoxView, MaskView
from vitkit.data.targets import IGNORE, Target, Targets, tight_box
from vitkit.data.views import PADDING, View, apply, fitted, resize, transform
from vitkit.inference.predict import describe_view, evaluation_view
from vitkit.models.card import Preprocessing, with_view
from vitkit.models.vit_config import ViTConfig
from vitkit.recipes import recipe
from vitkit.runs.batches import micro_batches, training_batches, training_view
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import Classify
from vitkit.weights.card import Card, from_json, to_json
from vitkit.weights.formats.hf_json import preprocessor_json

FULL = bool(os.environ.get("VITKIT_FULL"))  # then with new random examples each time

STILL = {"flip": False, "photometric": 0.0}
CLASSES = 5


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    waves = 127 + 90 * np.sin(y / 29 + x / 33)
    return np.stack([255 * y / height, 255 * x / width, waves], -1).astype(np.uint8)


def scene(height: int, width: int, seed: int = 0, objects: int = 4) -> tuple[np.ndarray, Target]:
    """An image whose levels are 40 times its class mask, and rectangles with holes as instances."""
    random = rng(seed)
    instances = np.zeros((objects, height, width), bool)
    for number in range(objects):
        top, left = random.integers(height - 2), random.integers(width - 2)
        h, w = random.integers(2, height // 2 + 2), random.integers(2, width // 2 + 2)
        instances[number, top : top + h, left : left + w] = True
        if number % 2:
            instances[number, top : top + h // 3, left : left + w // 3] = False
        instances[number, top : top + h, left : left + w][-1, -1] = True  # also where the hole is all
    labels = random.integers(0, CLASSES, objects)
    mask = np.zeros((height, width), np.uint8)
    for number in range(objects):
        mask[instances[number]] = labels[number]
    boxes = [tight_box(instance) for instance in instances]
    target = Target(
        size=(height, width), boxes=np.array(boxes, np.float32).reshape(-1, 4), labels=labels,
        crowd=np.zeros(objects, bool), areas=instances.sum((1, 2)).astype(np.float32),
        instances=instances, mask=mask,
    )  # fmt: skip
    return np.repeat(40 * mask[..., None], 3, 2), target


def objects_of(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    kept = arrays["classes"] >= 0
    return arrays["boxes"][kept], arrays["classes"][kept]


# ---- geometry ----


@settings(max_examples=60, deadline=None, derandomize=not FULL)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 70), st.integers(1, 70), st.data())
def test_labels_are_those_of_pillows_nearest_pixel(height, width, h, w, data):
    """Except where the centre lies between two pixels, where Pillow's sums are rounded either way."""
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    box = (top, left, height - top, width - left)
    mask = rng(1).integers(0, 256, (height, width), dtype=np.uint8)
    part = Image.fromarray(mask[top:, left:])
    expected = np.asarray(part.resize((w, h), Image.Resampling.NEAREST))
    clear = [(2 * np.arange(new) + 1) * old % (2 * new) > 0 for new, old in zip((h, w), box[2:], strict=True)]
    clear[0] |= h == box[2]
    clear[1] |= w == box[3]
    same = Geometry(box, (h, w)).labels(mask) == expected
    assert same[np.ix_(*clear)].all()


@settings(max_examples=60, deadline=None, derandomize=not FULL)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_a_box_around_a_mask_stays_around_the_transformed_mask(seed, mirrored, upside_down):
    """Within the half pixel of the nearest neighbour at each side, if the object is visible."""
    random = rng(seed)
    _, target = scene(*random.integers(8, 60, 2), seed, objects=1)
    resized = fitted(target.size, (32, 40), random.uniform(0.3, 3.0))
    geometry = draw_crop(target.size, resized, (32, 40), random).flipped(mirrored, upside_down)
    box = geometry.clipped(geometry.boxes(target.boxes))[0]
    h, w = geometry.box[2:]
    whole = np.zeros(target.size, bool)
    x0, y0, x1, y1 = target.boxes[0].astype(int)
    whole[y0:y1, x0:x1] = True  # of a full mask, the part of a box is the box of the part
    around = tight_box(geometry.labels(whole))
    if around is not None:
        assert np.abs(around - box).max() <= 0.5 + 1e-6
        if geometry.size[0] % h == 0 and geometry.size[1] % w == 0:
            assert np.array_equal(around, box)
    else:
        assert (box[2:] - box[:2]).min() <= 1


def test_at_whole_scales_boxes_are_those_of_the_mask_exactly():
    for seed in range(20):
        _, target = scene(24, 30, seed)
        geometry = Geometry((6, 3, 12, 20), (36, 60), mirrored=bool(seed % 2), upside_down=bool(seed % 3))
        for number, box in enumerate(geometry.clipped(geometry.boxes(target.boxes))):
            full = np.zeros(target.size, bool)
            x0, y0, x1, y1 = target.boxes[number].astype(int)
            full[y0:y1, x0:x1] = True
            around = tight_box(geometry.labels(full))
            assert around is None or np.array_equal(around, box)


def test_two_flips_are_none():
    pixels, target = scene(20, 26)
    whole = Geometry((0, 0, 20, 26), (20, 26))
    for flips in ((True, False), (False, True), (True, True)):
        flip = whole.flipped(*flips)
        assert np.array_equal(flip.labels(flip.labels(target.mask)), target.mask)
        assert np.array_equal(flip.image(flip.image(pixels, "bilinear"), "bilinear"), pixels)
        assert np.array_equal(flip.boxes(flip.boxes(target.boxes)), target.boxes)
        assert not np.array_equal(flip.labels(target.mask), target.mask)


# ---- views ----


def check_agreement(view: MaskView, seeds: range) -> None:
    for seed in seeds:
        pixels, target = scene(24, 32, seed)
        image, arrays = view(pixels, target, rng(seed))
        inside = arrays["mask"] != IGNORE
        assert np.array_equal(image[..., 0][inside], 40 * arrays["mask"][inside])


@pytest.mark.parametrize("flips", [(True, False), (False, True), (True, True), (False, False)])
def test_image_and_mask_are_flipped_by_the_same_draw(flips):
    view = MaskView(size=(24, 32), scale=(1, 1), photometric=0, flip=flips[0], vertical_flip=flips[1])
    check_agreement(view, range(20))


def test_flips_by_other_draws_would_be_seen(monkeypatch):
    labels, others = Geometry.labels, rng(9)
    monkeypatch.setattr(
        Geometry, "labels", lambda self, mask: labels(self.flipped(others.random() < 0.5, False), mask)
    )
    with pytest.raises(AssertionError):
        check_agreement(MaskView(size=(24, 32), scale=(1, 1), photometric=0), range(20))


def test_half_of_the_views_are_flipped():
    pixels, target = scene(24, 32)
    view = MaskView(size=(24, 32), scale=(1, 1), photometric=0)
    random = rng()
    flipped = [np.array_equal(view(pixels, target, random)[0], pixels[:, ::-1]) for _ in range(200)]
    assert 0.4 < np.mean(flipped) < 0.6


VIEWS = [
    MaskView(size=(32, 40), vertical_flip=True),
    MaskView(size=(40, 17), scale=(0.1, 2.0), most_common=1.0),
    BoxView(size=(32, 40), most=6, vertical_flip=True),
    BoxView(size=(32, 40), most=6, scale=(0.1, 3.0), segments=True),
]


@settings(max_examples=80, deadline=None, derandomize=not FULL)
@given(st.integers(0, 10**6), st.integers(0, len(VIEWS) - 1))
def test_views_are_pure_functions_with_valid_results(seed, number):
    view = VIEWS[number]
    pixels, target = scene(*rng(seed).integers(4, 90, 2), seed, objects=seed % 6)
    before = pixels.copy()
    image, arrays = view(pixels, target, rng(seed))
    again, others = view(pixels, target, rng(seed))
    assert np.array_equal(image, again) and arrays.keys() == view.empty().keys()
    assert np.array_equal(pixels, before) and image.shape == (*view.size, 3) and image.dtype == np.uint8
    for name, blank in view.empty().items():
        assert np.array_equal(arrays[name], others[name])
        assert arrays[name].shape == blank.shape and arrays[name].dtype == blank.dtype
    if isinstance(view, MaskView):
        covered = np.nonzero(arrays["mask"] != IGNORE)
        h, w = (int(side.max()) + 1 for side in covered)
        assert h == view.size[0] or w == view.size[1] or view.scale[0] < 1
        assert (image[h:] == PADDING).all() and (image[:, w:] == PADDING).all()
        assert (arrays["mask"][:h, :w] != IGNORE).all()  # and none of the padding has a class
        assert (arrays["mask"][h:] == IGNORE).all() and (arrays["mask"][:, w:] == IGNORE).all()
    else:
        boxes, classes = objects_of(arrays)
        assert (arrays["classes"][len(classes) :] == -1).all() and (
            arrays["boxes"][len(classes) :] == -1
        ).all()
        assert (boxes >= 0).all() and (boxes <= [view.size[1], view.size[0]] * 2).all()
        assert (boxes[:, 2:] - boxes[:, :2] >= 1 - 1e-5).all()  # of float32
        if view.segments:
            assert set(np.unique(arrays["segments"])) - {-1} == set(range(len(classes)))


@settings(max_examples=40, deadline=None, derandomize=not FULL)
@given(st.integers(0, 10**6), st.floats(0.5, 1.0))
def test_a_crop_that_contains_all_keeps_all(seed, scale):
    pixels, target = scene(*rng(seed).integers(20, 60, 2), seed)
    view = BoxView(size=(60, 60), most=4, scale=(scale, scale), photometric=0)
    boxes, classes = objects_of(view(pixels, target, rng(seed))[1])
    h, w = fitted(target.size, view.size, scale)
    sides = (target.boxes[:, 2:] - target.boxes[:, :2]) * [w / target.size[1], h / target.size[0]]
    kept = (sides >= 1).all(1)  # a box of less than a pixel is no object
    assert kept.any() and np.array_equal(classes, target.labels[kept])
    assert np.allclose(boxes[:, 2:] - boxes[:, :2], sides[kept], atol=1e-4)


def boxed(*boxes, crowd=(), size=(40, 100), **fields) -> Target:
    boxes = np.array(boxes, np.float32)
    sides = boxes[:, 2:] - boxes[:, :2]
    marks = np.isin(np.arange(len(boxes)), crowd)
    return Target(
        size=size, boxes=boxes, labels=np.arange(len(boxes)), crowd=marks, areas=sides.prod(1), **fields
    )


def seen(target: Target, geometry: Geometry, **options) -> tuple[list, list]:
    view = BoxView(size=geometry.size, most=len(target.labels), **options)
    boxes, classes = objects_of(view.arrays(target, geometry))
    return boxes.tolist(), classes.tolist()


LEFT = Geometry((0, 0, 40, 50), (40, 50))


def test_boxes_are_clipped_and_left_out_below_the_visible_share():
    target = boxed((42, 5, 82, 15), (42, 5, 83, 15), (50, 0, 60, 10), (10.25, 3, 20, 8), (2, 2, 2.9, 9))
    assert seen(target, LEFT) == ([[42, 5, 50, 15], [10.25, 3, 20, 8]], [0, 3])
    assert seen(target, LEFT, visible=0.19)[1] == [0, 1, 3] and seen(target, LEFT, visible=0.21)[1] == [3]
    larger = seen(target, Geometry((0, 0, 40, 50), (80, 100)))[0]
    assert larger == [[84, 10, 100, 30], [20.5, 6, 40, 16], [4, 4, pytest.approx(5.8), 18]]


def test_crowds_are_left_out():
    target = boxed((0, 0, 10, 10), (5, 5, 20, 20), crowd=[0])
    assert seen(target, LEFT) == ([[5, 5, 20, 20]], [1])


def test_what_a_crop_leaves_of_an_object_is_the_box_around_its_mask():
    corner = np.zeros((1, 40, 100), bool)
    corner[0, 10:30, 45:90] = True
    corner[0, 10:25, 45:60] = False  # what the crop shows is at the bottom
    whole = boxed((45, 10, 90, 30), instances=corner)
    assert seen(whole, LEFT, visible=0.0) == ([[45, 25, 50, 30]], [0])
    assert seen(replace(whole, instances=None), LEFT, visible=0.0) == ([[45, 10, 50, 30]], [0])
    assert seen(whole, LEFT, visible=25 / corner.sum() + 1e-6) == ([], [])
    everything = Geometry((0, 0, 40, 100), (40, 100))
    loose = replace(whole, boxes=np.array([[44.5, 9.5, 90.5, 30.5]], np.float32))
    assert seen(loose, everything) == ([[44.5, 9.5, 90.5, 30.5]], [0])  # as it was annotated


def test_small_objects_are_on_top_and_hidden_ones_left_out():
    masks = np.zeros((3, 40, 100), bool)
    masks[0, 5:10, 5:10] = masks[1, :20, :20] = masks[2, 5:10, 5:10] = True
    target = boxed((5, 5, 10, 10), (0, 0, 20, 20), (5, 5, 10, 10), instances=masks)
    target = replace(target, areas=np.array([25, 400, 26], np.float32))
    arrays = BoxView(size=(40, 50), most=3, segments=True).arrays(target, LEFT)
    assert arrays["classes"].tolist() == [0, 1, -1]
    assert set(np.unique(arrays["segments"])) == {-1, 0, 1}
    assert (arrays["segments"][5:10, 5:10] == 0).all() and (arrays["segments"] == 1).sum() == 375


def test_crops_of_one_class_are_drawn_again_up_to_a_limit(monkeypatch):
    mask = np.zeros((40, 200), np.uint8)
    mask[:, 190:] = 1
    target, pixels = Target(size=mask.shape, mask=mask), np.zeros((*mask.shape, 3), np.uint8)
    counts = []
    useful = MaskView.useful
    monkeypatch.setattr(MaskView, "useful", lambda *given: counts.append(useful(*given)) or counts[-1])

    def share(most_common: float) -> float:
        view = MaskView(size=(40, 40), scale=(5, 5), photometric=0, most_common=most_common)
        masks = [view(pixels, target, rng(seed))[1]["mask"] for seed in range(100)]
        return float(np.mean([(m == 1).any() for m in masks]))

    assert share(0.9) > share(1.0) + 0.2
    counts.clear()
    mask[:] = 1
    MaskView(size=(40, 40), scale=(5, 5))(pixels, target, rng())
    assert counts == [False] * DRAWS
    half = replace(target, mask=np.where(np.arange(200) % 4 < 3, 0, 1).astype(np.uint8)[None].repeat(40, 0))
    view, whole = MaskView(size=(40, 200)), Geometry((0, 0, 40, 200), (40, 200))
    assert not useful(view, half, whole) and useful(replace(view, most_common=0.76), half, whole)
    half.mask[:, 0::4] = IGNORE  # two thirds of what is labelled
    assert useful(view, half, whole)


def test_without_jitter_the_view_is_the_fit():
    pixels = smooth(37, 90)
    target = Target(size=(37, 90), mask=np.zeros((37, 90), np.uint8))
    image, arrays = MaskView(size=(48, 64), scale=(1, 1), **STILL)(pixels, target, rng())
    assert np.array_equal(image, transform(pixels, View(size=(48, 64), crop="fit"), rng()))
    h, w = fitted((37, 90), (48, 64))
    assert (h, w) == (26, 64) and ((arrays["mask"] == 0).sum(), arrays["mask"][:h, :w].max()) == (h * w, 0)


def test_annotations_that_do_not_fit_make_an_image_unusable():
    pixels, target = scene(20, 30)
    for wrong, reason, view in (
        (replace(target, size=(30, 20)), "other-size", VIEWS[0]),
        (replace(target, mask=None), "no-mask", VIEWS[0]),
        (replace(target, instances=None), "no-instances", VIEWS[3]),
    ):
        with pytest.raises(BadImage) as caught:
            replace(view, scale=(1, 1))(pixels, wrong, rng())
        assert caught.value.reason == reason


def test_wrong_settings_are_refused():
    for options in ({"size": (0, 4)}, {"scale": (0, 1)}, {"scale": (2, 1)}, {"photometric": -1}):
        with refused("request.value", *options.values()):
            MaskView(**{"size": (8, 8)} | options)
    with refused("request.unknown", "nearest"):
        MaskView(size=(8, 8), interpolation="nearest")
    with refused("request.value", 40000):
        BoxView(size=(8, 8), most=40000)
    with refused("request.value", 4, 2):
        view = BoxView(size=(40, 40), most=2, scale=(1, 1))
        view(*scene(40, 40, objects=4), rng())


# ---- colours ----


def test_hsv_is_that_of_the_standard_library():
    pixels = rng().integers(0, 256, (9, 9, 3), dtype=np.uint8)
    pixels[0, :3] = [[0, 0, 0], [255, 255, 255], [9, 9, 9]]
    for factor, turn in ((1.0, 0.0), (1.5, 0.0), (0.5, 0.1), (1.3, -0.1)):
        result = change_hsv(pixels, factor, turn)
        for pixel, changed in zip(pixels.reshape(-1, 3), result.reshape(-1, 3), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel / 255)
            expected = colorsys.hsv_to_rgb((hue + turn) % 1, min(1, factor * saturation), value)
            assert np.abs(255 * np.array(expected) - changed).max() <= 0.51
    large = smooth(200, 200)
    assert np.array_equal(change_hsv(large, 1.2, 0.05)[50:60], change_hsv(large[50:60], 1.2, 0.05))


def test_photometric_distortion_without_strength_is_nothing_and_else_changes_most():
    pixels = smooth(24, 30)
    assert photometric(pixels, 0.0, rng()) is pixels
    images = [photometric(pixels, 1.0, rng(seed)) for seed in range(300)]
    same = np.mean([np.array_equal(image, pixels) for image in images])
    assert 0.02 < same < 0.13  # 1/16: each of the four has a chance of 1/2
    weak = [np.abs(photometric(pixels, 0.1, rng(seed)).astype(int) - pixels).mean() for seed in range(50)]
    strong = [np.abs(photometric(pixels, 1.0, rng(seed)).astype(int) - pixels).mean() for seed in range(50)]
    assert np.mean(weak) < np.mean(strong) / 4


# ---- batches ----


def image_of(index: int) -> np.ndarray:
    return scene(20 + index % 5, 31, index, objects=index % 4)[0]


def fetch(index: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image_of(index)).save(out, "PNG" if index % 2 else "JPEG")
    return out.getvalue()


def read(index: int) -> Target:
    if index == 7:
        raise BadImage("damaged", "a mask that is not there")
    return scene(20 + index % 5, 31, index, objects=index % 4)[1]


def source(count: int = 25) -> Source:
    kinds = frozenset({"mask", "boxes", "instances"})
    names = tuple("abcde")
    labels = np.zeros(count, np.int64)
    keys = [f"{i}.png" for i in range(count)]
    return Source("scenes", names, keys, labels, fetch, targets=Targets(read, kinds, most=3))


BOXES = BoxView(size=(24, 32), most=3, segments=True)


def take(n: int, view=BOXES, data: Source | None = None, **options) -> list[dict[str, torch.Tensor]]:
    data = data or source()
    plain, bad = View(size=(24, 32), crop="fit"), BadFiles(allowed=1.0)
    batches = train_batches(data, plain, Order(len(data), 8, 3), target_view=view, bad=bad, **options)
    return list(islice(batches, n))


def equal(a, b) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("view", [BOXES, MaskView(size=(24, 32))])
def test_batches_do_not_depend_on_workers_processes_or_restarts(view):
    batches = take(4, view)
    assert equal(take(4, view, workers=2), batches)
    assert equal(take(2, view, start=2), batches[2:])
    part = take(4, view, places=range(2, 5))
    for mine, whole in zip(part, batches, strict=True):
        rows = [whole["place"].tolist().index(place) for place in mine["place"].tolist()]
        assert all(torch.equal(mine[name], whole[name][rows]) for name in whole)


def test_a_batch_has_for_each_place_what_the_view_makes_of_it():
    order, missing = Order(25, 8, 3), 0
    for step, batch in enumerate(take(4)):
        assert batch["boxes"].dtype == torch.float32 and batch["segments"].dtype == torch.int16
        missing += 8 - len(batch["image"])
        for row, (index, place) in enumerate(
            zip(batch["index"].tolist(), batch["place"].tolist(), strict=True)
        ):
            content = np.asarray(Image.open(io.BytesIO(fetch(index))).convert("RGB"))
            image, arrays = BOXES(content, read(index), order.rng(step, place))
            assert torch.equal(batch["image"][row], torch.tensor(image.transpose(2, 0, 1).copy()))
            assert all(np.array_equal(batch[name][row], array) for name, array in arrays.items())
    assert missing == 1  # of image 7, whose mask is damaged


def test_a_batch_without_usable_images_has_empty_targets():
    (batch,) = take(1, data=source().take(np.full(8, 7)))
    assert batch["image"].shape == (0, 3, 24, 32)
    assert batch["boxes"].shape == (0, 3, 4) and batch["segments"].shape == (0, 24, 32)


def test_micro_batches_have_all_arrays():
    batch = take(1)[0]
    pieces = micro_batches(batch, batch["place"].tolist(), range(8), 3)
    assert len(pieces) == 3
    for name in batch:
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), batch[name])


def test_training_batches_are_made_by_the_view_of_the_task(monkeypatch):
    """The view of the task gets the recipe's, and its arrays are in the micro-batches of every process."""
    given = []
    monkeypatch.setattr(Classify, "target_view", lambda task, *words: given.append(words) or BOXES)
    plan, data = replace(recipe("scratch"), batch=8, micro_batch=3, mixup=0.0, seed=3), source()
    batches = training_batches(
        plan, data, Order(25, 8, 3), Preprocessing(), Runtime(), start=1, stop=2, workers=0,
        bad=BadFiles(allowed=1.0), waited=lambda seconds: None,
    )  # fmt: skip
    ((*pieces,),) = batches
    assert given == [(training_view(plan), data)] and len(pieces) == 3
    whole = take(1, start=1)[0]
    assert all(torch.equal(torch.cat([piece[name] for piece in pieces]), whole[name]) for name in whole)


def test_batches_with_targets_are_not_cached(tmp_path):
    keep_batches(tmp_path)
    try:
        first = take(2)
        assert not list(tmp_path.rglob("*")) and equal(take(2), first)
    finally:
        keep_batches(None)


def test_decoded_pixels_keep_their_targets(tmp_path):
    data = source()
    kept = decoded(data, tmp_path, 0)
    assert kept.fetch(3).shape == image_of(3).shape and equal(take(2, data=kept), take(2))


def test_a_source_without_targets_is_refused():
    with refused("data.layout"):
        take(1, data=replace(source(), targets=None))


def test_parts_and_unions_keep_their_targets():
    data = source()
    part = subset(data, count=10)
    assert np.array_equal(part.targets.read(4).boxes, read(int(part.keys[4][:-4])).boxes)
    splits = complete({"all": data})
    assert {name: split.targets.most for name, split in splits.items()} == {"train": 3, "val": 3, "test": 3}
    key = int(splits["test"].keys[1][:-4])
    assert np.array_equal(splits["test"].targets.read(1).mask, read(key).mask)
    other = replace(data, classes=("e", "d", "b"), labels=np.zeros(25, np.int64))
    renamed = same_classes(replace(other, targets=Targets(three, data.targets.kinds, 9)), data.classes)
    assert renamed.targets.read(0).labels.tolist() == [4, 3, 1]
    assert renamed.targets.read(0).mask.tolist() == [[4, 3, 1, IGNORE]]
    both = join(data, replace(other, targets=Targets(three, frozenset({"mask"}), 9)))
    assert both.targets.most == 9 and both.targets.kinds == {"mask"}
    assert np.array_equal(both.targets.read(5).boxes, read(5).boxes)
    assert both.targets.read(25 + 3).labels.tolist() == [4, 3, 1]
    assert join(data, replace(data, targets=None)).targets is None


def three(index: int) -> Target:
    target = boxed((0, 0, 1, 1), (0, 0, 1, 1), (0, 0, 1, 1), size=(1, 4))
    return replace(target, mask=np.array([[0, 1, 2, IGNORE]], np.uint8))


# ---- crop "fit" ----


@settings(max_examples=100, deadline=None, derandomize=not FULL)
@given(*[st.integers(1, 5000)] * 2, *[st.integers(1, 800)] * 2)
def test_a_fitted_image_touches_a_side_and_keeps_its_aspect(height, width, h, w):
    new = fitted((height, width), (h, w))
    assert 1 <= new[0] <= h and 1 <= new[1] <= w and (new[0] == h or new[1] == w)
    ratio = min(h / height, w / width)
    assert all(
        abs(side - max(1, ratio * old)) <= 0.5 + 1e-9 for side, old in zip(new, (height, width), strict=True)
    )


@pytest.mark.parametrize("shape", [(60, 80), (37, 23), (300, 200), (11, 90)])
def test_the_view_fit_is_the_resized_image_and_padding(shape):
    pixels, size = smooth(*shape), (48, 64)
    view = apply(pixels, View(size=size, crop="fit"), rng()).permute(1, 2, 0).numpy()
    h, w = fitted(shape, size)
    assert np.array_equal(view[:h, :w], resize(pixels, (h, w)))
    assert (view[h:] == PADDING).all() and (view[:, w:] == PADDING).all()
    flipped = [transform(pixels, View(size=size, crop="fit", flip=True), rng(seed)) for seed in range(8)]
    assert all((image[h:] == PADDING).all() and (image[:, w:] == PADDING).all() for image in flipped)
    assert len({image.tobytes() for image in flipped}) == 2


@pytest.mark.parametrize("shape", [(64, 96), (100, 70), (500, 800), (801, 503)])
def test_a_jpeg_is_fitted_as_its_pixels_are(shape):
    """Also where it is decoded at 1/2, 1/4 or 1/8 of its size."""
    out = io.BytesIO()
    Image.fromarray(smooth(*shape)).save(out, "JPEG", quality=100, subsampling=0)
    view = View(size=(48, 64), crop="fit")
    pixels = np.asarray(Image.open(io.BytesIO(out.getvalue())))
    difference = transform(out.getvalue(), view, rng()).astype(int) - transform(pixels, view, rng())
    h, w = fitted(shape, view.size)
    assert not difference[h:].any() and not difference[:, w:].any()
    assert np.abs(difference).max() <= (4 if min(shape) > 64 else 1)  # of rounding twice
    assert np.abs(difference).mean() < 0.5
    drift = np.abs(difference[:h, :w, :2].mean((0, 1)))  # a shift by a pixel of the view is 4 levels or more
    assert drift.max() < 0.2


def test_places_in_the_view_map_back_to_the_image():
    """A mark at the corners of the image is found at the corners of the covered part."""
    shape, size = (90, 300), (48, 64)
    h, w = fitted(shape, size)
    target = boxed((0, 0, 300, 90), (150, 45, 300, 90), size=shape)
    view = BoxView(size=size, most=2, scale=(1, 1), **STILL)
    boxes, _ = objects_of(view(smooth(*shape), target, rng())[1])
    assert np.allclose(boxes / [w, h, w, h] * [300, 90, 300, 90], target.boxes, atol=1e-4)


def test_fit_is_a_preprocessing_of_models():
    preprocessing = with_view(Preprocessing(resize="crop", crop=0.9), (32, 48), "fit")
    assert preprocessing == Preprocessing(resize="fit")
    view = evaluation_view(preprocessing, (32, 48))
    assert (view.size, view.crop) == ((32, 48), "fit")
    assert "fit 32x48" in describe_view(preprocessing, (32, 48))
    card = Card("vitkit", ViTConfig(), preprocessing=preprocessing)
    assert from_json(to_json(card)).preprocessing == preprocessing
    with refused("weights.unsupported", "--view squash"):
        preprocessor_json(ViTConfig(), preprocessing)
    data = source(6)
    (batch,) = evaluation_batches(data, view, 8)
    for image, index in zip(batch["image"], batch["index"], strict=True):
        assert torch.equal(image, apply(data.fetch(int(index)), view, rng()))
