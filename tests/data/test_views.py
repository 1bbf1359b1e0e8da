"""Views: pixels against Pillow and numpy, boxes against their published distribution, Mixup, refusals."""

import warnings
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from vitkit.data import views
from vitkit.data.views import CROPS, View, apply, fitted, inception_box, mixup, normalise, resize

TRAIN = View(size=(224, 224), crop="inception", flip=True)
SHAPES = [(1, 1), (1, 7), (2, 3), (33, 47), (100, 99), (31, 400)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def photo(height: int, width: int) -> np.ndarray:
    """Smooth and different everywhere, so that a shift of one pixel shows."""
    y, x = np.mgrid[:height, :width]
    waves = 127 + 120 * np.sin(y / 9 + x / 13)
    return np.stack([255 * y / height, 255 * x / width, waves], -1).astype(np.uint8)


def by_pillow(image: np.ndarray, size: tuple[int, int], method: str = "bilinear") -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling[method.upper()])).astype(int)


def pixels(view: torch.Tensor) -> np.ndarray:
    return view.permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(24, 24), (50, 31), (7, 90), (1, 1), (150, 160)])
@pytest.mark.parametrize("shape", [(60, 80), (37, 23), (1, 5000), (1, 1)])
def test_resize_is_pillows_to_one_level(shape, size, method):
    image = noise(*shape)
    if method == "bicubic":
        image = image // 2 + 64  # both clip overshoots between the two axes, and not always in the same order
    result = resize(image, size, method)
    assert result.dtype == np.uint8 and result.shape == (*size, 3)
    assert np.abs(result - by_pillow(image, size, method)).max() <= 1


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(24, 24), (50, 31), (7, 90), (60, 31), (24, 80)])
def test_both_ways_to_resize_give_the_same_bits(size, method, monkeypatch):
    monkeypatch.setattr(views, "AVX", not views.AVX)
    other = resize(noise(60, 80), size, method)
    monkeypatch.undo()
    assert np.array_equal(other, resize(noise(60, 80), size, method))


@pytest.mark.parametrize("box", [(2, 3, 30, 40), (2.25, 3.5, 30.5, 40.125), (5.5, 9.875, 54.5, 70.125)])
def test_a_box_may_begin_and_end_inside_a_pixel(box):
    fine, (top, left, h, w) = photo(480, 640), (int(8 * side) for side in box)
    image = fine.reshape(60, 8, 80, 8, 3).mean(axis=(1, 3)).round().astype(np.uint8)
    exact = by_pillow(fine[top : top + h, left : left + w].copy(), (24, 30))
    assert np.abs(resize(image, (24, 30), box=box) - exact).mean() < 2
    assert np.abs(resize(image, (24, 30), box=(box[0] - 0.5, *box[1:])) - exact).mean() > 4


def test_without_antialiasing_pillow_is_far_away():
    image = torch.from_numpy(noise(60, 80)).permute(2, 0, 1)[None].float()
    plain = torch.nn.functional.interpolate(image, (24, 24), mode="bilinear")[0]
    assert np.abs(pixels(plain) - by_pillow(noise(60, 80), (24, 24))).max() > 20


def test_an_image_of_the_right_size_is_not_touched():
    image = noise(24, 30)
    result = resize(image, (24, 30))
    assert np.array_equal(result, image) and np.shares_memory(result, image)
    assert not np.shares_memory(apply(image, View(size=(24, 30), crop="squash"), rng()).numpy(), image)


@pytest.mark.parametrize("size", [(24, 24), (40, 50)])
def test_any_memory_is_taken_without_a_warning(size):
    image = noise(40, 50)
    read_only = image.copy()
    read_only.flags.writeable = False
    backwards, strided, columns = image[::-1, ::-1], noise(80, 100)[::2, ::2], np.asfortranarray(image)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (read_only, backwards, strided, columns):
            assert np.array_equal(resize(given, size), resize(np.ascontiguousarray(given).copy(), size))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [(32, 32), (16, 24), (1, 1)])
@pytest.mark.parametrize("crop", CROPS)
def test_every_view_of_every_image_has_its_size(crop, size, shape):
    view = View(size=size, crop=crop, flip=True, randaugment=(2, 15))
    image = noise(*shape)
    before = image.copy()
    result = apply(image, view, rng(1))
    assert result.shape == (3, *size) and result.dtype == torch.uint8 and result.is_contiguous()
    assert torch.equal(result, apply(image, view, rng(1)))
    assert np.array_equal(image, before)


@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (3, 4000)])
@pytest.mark.parametrize("crop", CROPS)
def test_a_line_of_pixels_is_seen_without_a_gigabyte(crop, shape):
    image = np.full((*shape, 3), 200, np.uint8)
    image[: shape[0] // 4, : shape[1] // 4] = 0 if crop == "centre" else 200  # far from the centre
    h, w = fitted(shape, (224, 224)) if crop == "fit" else (224, 224)
    assert (apply(image, View(size=(224, 224), crop=crop), rng())[:, :h, :w] == 200).all()


@pytest.mark.parametrize("crop", ["inception", "random", "squash-random"])
def test_random_crops_differ_between_generators_and_agree_for_one(crop):
    image, view = photo(70, 90), View(size=(32, 32), crop=crop)
    results = {apply(image, view, rng(seed)).numpy().tobytes() for seed in range(20)}
    assert len(results) > 12
    assert results == {apply(image, view, rng(seed)).numpy().tobytes() for seed in range(20)}


@pytest.mark.parametrize("crop", ["centre", "squash"])
def test_evaluation_views_draw_nothing(crop):
    generator = rng()
    before = generator.bit_generator.state
    first = apply(photo(70, 90), View(size=(32, 32), crop=crop), generator)
    assert generator.bit_generator.state == before
    assert torch.equal(first, apply(photo(70, 90), View(size=(32, 32), crop=crop), rng(9)))


def test_centre_is_the_middle_of_the_resized_image():
    image = photo(75, 101)
    result = pixels(apply(image, View(size=(32, 32), crop="centre", resize=40), rng()))
    whole = by_pillow(image, (40, round(101 * 40 / 75)))  # 40 x 54
    assert np.abs(result - whole[4:36, 11:43]).max() <= 1
    assert np.abs(result - whole[4:36, 14:46]).max() > 1


def test_random_crops_reach_every_corner_of_the_resized_image():
    image = photo(64, 80)  # the shorter side is `resize` already
    for crop, width in (("random", 80), ("squash-random", 64)):
        view, found = View(size=(60, 60), crop=crop, resize=64), set()
        whole = resize(image, (64, width))
        for seed in range(600):
            result = pixels(apply(image, view, rng(seed)))
            found.add((result[0, 0, 0], result[0, 0, 1]))
        assert (whole[0, 0, 0], whole[0, 0, 1]) in found
        assert (whole[4, width - 60, 0], whole[4, width - 60, 1]) in found


def test_half_of_the_images_are_flipped_and_flips_are_exact():
    image, view = photo(40, 40), View(size=(32, 32), crop="squash", flip=True)
    straight = apply(image, View(size=(32, 32), crop="squash"), rng())
    generator = rng()
    flipped = [torch.equal(apply(image, view, generator), straight.flip(2)) for _ in range(300)]
    assert 0.4 < np.mean(flipped) < 0.6
    assert any(torch.equal(apply(image, view, rng(seed)), straight) for seed in range(5))


def test_randaugment_follows_crop_and_flip():
    image = photo(300, 260)
    plain = [apply(image, TRAIN, rng(seed)) for seed in range(8)]
    augmented = [apply(image, replace(TRAIN, randaugment=(2, 10)), rng(seed)) for seed in range(8)]
    assert sum(torch.equal(a, b) for a, b in zip(plain, augmented, strict=True)) < 3
    none = [apply(image, replace(TRAIN, randaugment=(0, 10)), rng(seed)) for seed in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(plain, none, strict=True))


@pytest.mark.parametrize(("height", "width"), [(375, 500), (400, 400), (640, 300)])
def test_inception_boxes_lie_inside_with_published_areas_and_aspects(height, width):
    generator = rng()
    boxes = np.array([inception_box(height, width, generator) for _ in range(2000)])
    top, left, h, w = boxes.T
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + h <= height).all() and (left + w <= width).all()
    area = h * w / (height * width)
    assert area.min() >= 0.05 and area.max() <= 1
    assert area.min() < 0.06 and area.max() > (0.9 if height < 600 else 0.55)
    assert (np.abs(w - np.clip(w, 0.75 * h, 1.33 * h)) <= 0.5).all()
    assert (w / h).min() < 0.77 and (w / h).max() > 1.31
    assert top.max() > 0.5 * height and left.max() > 0.5 * width


def test_inception_draws_heights_not_areas_uniformly():
    generator = rng()
    areas = np.array([np.prod(inception_box(400, 400, generator)[2:]) / 160000 for _ in range(2000)])
    root, aspect = np.sqrt(0.05), np.sqrt(np.linspace(0.75, 1.33, 1001))
    expected = np.mean((0.5 - root) / (np.minimum(aspect, 1 / aspect) - root))  # of areas below a quarter
    assert abs(np.mean(areas < 0.25) - expected) < 0.035
    assert expected > 0.2 / 0.95 + 0.15, "areas drawn uniformly would be told apart"


def test_inception_takes_all_of_an_image_that_no_box_fits():
    assert inception_box(1, 5000, rng()) == (0, 0, 1, 5000)
    assert inception_box(1, 1, rng()) == (0, 0, 1, 1)


def test_a_seed_means_the_same_box_everywhere():
    boxes = [inception_box(375, 500, rng(seed)) for seed in range(3)]
    assert boxes == [(37, 72, 237, 265), (64, 6, 307, 321), (72, 158, 131, 118)]


def test_inception_crops_before_it_resizes():
    image = noise(90, 120)
    top, left, h, w = inception_box(90, 120, rng(4))
    expected = by_pillow(np.ascontiguousarray(image[top : top + h, left : left + w]), (32, 32))
    assert np.abs(pixels(apply(image, View(size=(32, 32), crop="inception"), rng(4))) - expected).max() <= 1


def test_the_first_resize_follows_the_size_unless_it_is_given():
    assert [View(size=(n, n), crop="centre").resized for n in (224, 384, 512)] == [256, 439, 585]
    assert View(size=(384, 384), crop="centre", resize=448).resized == 448


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ((0, 0, 0), (1, 1, 1)),
    ],
)
def test_normalise_is_exact_for_every_value(mean, std):
    batch = torch.arange(256, dtype=torch.uint8).repeat(2, 3, 1).unflatten(2, (16, 16))
    exact = (batch.double() / 255 - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    result = normalise(batch, mean, std)
    assert result.dtype == torch.float32 and result.shape == batch.shape
    assert (result - exact).abs().max() < 1e-6
    if mean[0] == 0.5:
        assert torch.equal(result, (batch.float() - 127.5) / 127.5)
        assert result.min() == -1 and result.max() == 1


def test_mixup_is_one_share_of_each_with_the_one_before():
    images, targets = torch.randn(4, 3, 5, 5), torch.eye(4)
    for seed in range(20):
        mixed, soft = mixup(images, targets, 0.2, rng(seed))
        drawn = rng(seed).beta(0.2, 0.2)
        share = max(drawn, 1 - drawn)
        for i in range(4):
            torch.testing.assert_close(mixed[i], share * images[i] + (1 - share) * images[i - 1])
            torch.testing.assert_close(soft[i], share * targets[i] + (1 - share) * targets[i - 1])
        torch.testing.assert_close(soft.sum(1), torch.ones(4))
        assert soft.diagonal().min() >= 0.5
    shares = {round(float(mixup(images, targets, 0.5, rng(seed))[1][0, 0]), 6) for seed in range(20)}
    assert len(shares) > 10


def test_mixup_of_nothing_changes_nothing():
    images, targets = torch.randn(3, 3, 2, 2), torch.rand(3, 7)
    same = mixup(images, targets, 0, rng())
    assert same[0] is images and same[1] is targets
    alone = mixup(images[:1], targets[:1], 0.5, rng())
    torch.testing.assert_close(alone, (images[:1], targets[:1]))


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"size": (0, 8)}, "request.value", ((0, 8),)),
        ({"size": (8, 8, 3)}, "request.value", ((8, 8, 3), "(height, width)")),
        ({"size": (8.5, 8)}, "request.value", (8.5,)),
        ({"crop": "center"}, "request.unknown", ("'center'", "inception, resized")),
        ({"resize": 256}, "request.conflict", ("'inception'", "resize=256")),
        ({"crop": "centre", "resize": 7}, "request.value", ("resize=7", 8)),
        ({"interpolation": "area"}, "request.unknown", ("'area'", "bilinear, bicubic")),
        ({"randaugment": (2, -1)}, "request.value", ((2, -1),)),
        ({"randaugment": (2,)}, "request.value", ((2,), "(layers, magnitude)")),
    ],
)
def test_views_that_cannot_be_are_refused(options, code, values):
    with refused(code, *values):
        View(**({"size": (8, 8), "crop": "inception"} | options))


def test_a_png_file_is_seen_as_its_pixels():
    file = BytesIO()
    Image.fromarray(photo(60, 80)).save(file, "PNG")
    for view in (TRAIN, View(size=(32, 32), crop="centre")):
        assert torch.equal(apply(file.getvalue(), view, rng(3)), apply(photo(60, 80), view, rng(3)))


def test_what_is_not_an_image_or_a_batch_is_refused():
    for wrong in (noise(4, 4).astype(np.float32), noise(4, 4)[..., 0], noise(4, 4)[..., :2], noise(4, 4)[:0]):
        with refused("request.value", wrong.dtype, wrong.shape, "(height, width, 3)"):
            apply(wrong, TRAIN, rng())
    with refused("request.unknown", "'lanczos'", "bicubic"):
        resize(noise(4, 4), (2, 2), "lanczos")
    with refused("request.value", "float32", "uint8"):
        normalise(torch.zeros(1, 3, 2, 2), [0.5] * 3, [0.5] * 3)
    with refused("request.value", "[0.5]", "3 channels"):
        normalise(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), [0.5], [0.5])
    images, targets = torch.zeros(2, 3, 2, 2), torch.zeros(2, 5)
    for given, values in (
        ((images, targets, -1.0), (-1.0,)),
        ((images.byte(), targets, 0.2), ("uint8 images",)),
        ((images, targets.long(), 0.2), ("int64 targets",)),
        ((images, targets[:1], 0.2), ("2 images", "1 targets")),
    ):
        with refused("request.value", *values):
            mixup(*given, rng())
