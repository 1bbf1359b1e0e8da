"""Several views of an image: pure functions of (seed, step, place), of their size and of the right image."""

import colorsys
import io
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vitkit.data.augment import Distortion, distort, turn_hue
from vitkit.data.loader import BadFiles, train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source, from_rows
from vitkit.data.views import View, resized_box

FIRST = View(size=(24, 20), crop="resized", area=0.4, flip=True, distortion=Distortion(blur=1.0))
SECOND = View(size=(24, 20), crop="resized", area=0.4, flip=True, distortion=Distortion(solarize=0.2))
SMALL = View(size=(10, 12), crop="resized", area=0.05, largest=0.4, flip=True, distortion=Distortion())
MORE = (("second", (SECOND,)), ("local", (SMALL,) * 3))


def encoded(number: int, kind: str, plain: bool) -> bytes:
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 255, (40 + number % 5, 51, 3), dtype=np.uint8)
    if plain:
        pixels[:] = 9 * number
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **({"quality": 100} if kind == "JPEG" else {}))
    return out.getvalue()


def source(bad: tuple[int, ...] = (), plain: bool = False, count: int = 25) -> Source:
    kinds = ("JPEG", "PNG", "WEBP")
    files = {f"{i}": b"broken" if i in bad else encoded(i, kinds[i % 3], plain) for i in range(count)}
    return from_rows("test", [(name, f"class {int(name) % 4}") for name in files], files.__getitem__)


def take(n: int, *, data: Source | None = None, seed: int = 3, **options) -> list[dict[str, torch.Tensor]]:
    data = data or source()
    options = {"more": MORE} | options
    return list(islice(train_batches(data, FIRST, Order(len(data), 8, seed=seed), **options), n))


def equal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def straight():
    return take(4)


def test_views_have_their_names_sizes_and_type(straight):
    batch = straight[0]
    assert batch["image"].shape == (8, 3, 24, 20)
    assert batch["second"].shape == (8, 1, 3, 24, 20) and batch["local"].shape == (8, 3, 3, 10, 12)
    assert {batch[name].dtype for name in ("image", "second", "local")} == {torch.uint8}


@pytest.mark.parametrize("workers", [1, 2])
def test_views_do_not_depend_on_workers(straight, workers):
    assert equal(take(4, workers=workers), straight)


def test_views_do_not_depend_on_processes(straight):
    for places in (range(3), range(3, 8), [6, 1]):
        part = take(4, places=places)
        for mine, whole in zip(part, straight, strict=True):
            for name in ("image", "second", "local", "index"):
                assert torch.equal(mine[name], whole[name][list(places)])


def test_views_do_not_depend_on_where_a_run_was_resumed(straight):
    assert equal(take(2, start=2), straight[2:])


def test_further_views_leave_the_first_as_it_is(straight):
    for with_more, alone in zip(straight, take(4, more=()), strict=True):
        assert torch.equal(with_more["image"], alone["image"]) and "local" not in alone
    fewer = take(1, more=(("second", (SECOND,)), ("local", (SMALL,) * 2)))[0]
    assert torch.equal(fewer["local"], straight[0]["local"][:, :2])


def test_views_differ_between_views_places_steps_and_seeds(straight):
    """An epoch has 25 images: step 4 and later have them again."""
    again = take(8)
    crops = {}
    for step, batch in enumerate(again):
        for place, index in enumerate(batch["index"].tolist()):
            views = [batch["image"][place], batch["second"][place, 0]]
            crops.setdefault(index, []).extend((step, view.numpy().tobytes()) for view in views)
            small = [view.numpy().tobytes() for view in batch["local"][place]]
            assert len({*small}) == 3 and views[0].numpy().tobytes() != views[1].numpy().tobytes()
    repeated = [pixels for seen in crops.values() if len(seen) > 2 for _, pixels in seen]
    assert len(repeated) > 40 and len(set(repeated)) == len(repeated)
    other = take(1, seed=4)[0]
    assert not torch.equal(other["local"], straight[0]["local"])
    same_image = from_rows("one", [(f"{i}", "a") for i in range(25)], lambda name: encoded(0, "PNG", False))
    places = take(1, data=same_image)[0]["local"].flatten(0, 1)
    assert len({view.numpy().tobytes() for view in places}) == 24


def test_each_view_has_a_random_generator_of_its_own():
    order = Order(100, 8, seed=1)
    draws = {
        (step, place, view): order.rng(step, place, view).random()
        for step in range(3)
        for place in range(-9, 8)
        for view in range(11)
    }
    assert len(set(draws.values())) == len(draws)
    assert order.rng(2, 5, 0).random() == order.rng(2, 5).random() == next(order.rngs([(2, 5)])).random()
    assert Order(100, 8, seed=2).rng(0, 0, 1).random() != draws[0, 0, 1]
    assert Order(7, 3, seed=1).rng(2, 5, 3).random() == draws[2, 5, 3]  # of nothing but seed, step and place


def test_views_of_an_unusable_image_are_left_out_and_the_others_stay_with_their_image():
    still = View(size=(8, 8), crop="resized", area=0.4)
    more = (("second", (still,)), ("local", (View(size=(4, 4), crop="resized", area=0.05, largest=0.4),) * 2))
    data = source(bad=(3, 4, 11), plain=True)
    bad = BadFiles(allowed=1.0)
    batches = list(islice(train_batches(data, still, Order(25, 8, seed=3), more=more, bad=bad), 3))
    assert sum(len(batch["image"]) for batch in batches) < 24 and len(bad.reasons) == 3
    for batch in batches:
        assert len(batch["image"]) == len(batch["second"]) == len(batch["local"]) == len(batch["index"])
        for name in ("image", "second", "local"):
            level = batch[name].flatten(1).float()
            assert (level - 9.0 * batch["index"][:, None]).abs().max() <= 2, name  # JPEG rounds


def test_a_batch_without_usable_images_has_no_views():
    data = source(bad=tuple(range(25)))
    batch = next(train_batches(data, FIRST, Order(25, 8), more=MORE, bad=BadFiles(allowed=1.0)))
    assert batch["local"].shape == (0, 3, 3, 10, 12) and batch["second"].shape == (0, 1, 3, 24, 20)


@pytest.mark.parametrize(("area", "largest"), [(0.05, 0.4), (0.4, 1.0), (0.3, 0.3)])
def test_crops_have_an_area_within_their_bounds_and_reach_both(area, largest):
    rng, height, width = np.random.default_rng(0), 400, 300
    shares = []
    for _ in range(2000):
        top, left, h, w = resized_box(height, width, rng, area, largest)
        assert 0 <= top <= height - h and 0 <= left <= width - w
        assert 3 / 4 - 0.02 <= w / h <= 4 / 3 + 0.02
        shares.append(h * w / (height * width))
    assert area - 0.005 <= min(shares) and max(shares) <= largest + 0.005
    if area < largest:
        reach = largest if largest < 1 else 0.95  # the whole of a 4:3 image has but one crop
        assert min(shares) < area + 0.02 and max(shares) > reach - 0.05


PHOTO = np.random.default_rng(0).integers(0, 256, (16, 18, 3), dtype=np.uint8)
NOTHING = {"jitter_probability": 0.0, "grayscale": 0.0, "blur": 0.0, "solarize": 0.0}


def test_each_distortion_does_what_its_name_says():
    def made(**changes) -> np.ndarray:
        return distort(PHOTO, Distortion(**(NOTHING | changes)), np.random.default_rng(1))

    assert np.array_equal(made(), PHOTO)
    assert np.array_equal(made(solarize=1.0), np.where(PHOTO < 128, PHOTO, 255 - PHOTO))
    assert np.array_equal(made(solarize=1.0), np.asarray(ImageOps.solarize(Image.fromarray(PHOTO))))
    grey = made(grayscale=1.0)
    assert (grey == grey[..., :1]).all() and abs(int(grey[3, 4, 0]) - PHOTO[3, 4] @ [0.299, 0.587, 0.114]) < 1
    blurred = made(blur=1.0)
    assert (
        np.abs(np.diff(blurred.astype(int), axis=0)).mean()
        < np.abs(np.diff(PHOTO.astype(int), axis=0)).mean()
    )
    unchanged = made(jitter_probability=1.0, jitter=(0.0, 0.0, 0.0, 0.0)).astype(int)
    assert np.abs(unchanged - PHOTO).max() < 10  # levels, of rounding to HSV and back
    assert not np.array_equal(made(jitter_probability=1.0), PHOTO)


@pytest.mark.parametrize("name", ["jitter_probability", "grayscale", "blur", "solarize"])
def test_a_distortion_is_applied_as_often_as_its_probability_says(name):
    distortion, rng = Distortion(**(NOTHING | {name: 0.3})), np.random.default_rng(2)
    changed = [not np.array_equal(distort(PHOTO, distortion, rng), PHOTO) for _ in range(1000)]
    assert abs(np.mean(changed) - 0.3) < 0.05


def test_hues_turn_on_the_circle():
    red = Image.fromarray(np.full((2, 2, 3), (200, 0, 0), np.uint8))
    for share in (0.1, 1 / 3, -0.4):
        pixel = np.asarray(turn_hue(red, share))[0, 0] / 255
        assert (colorsys.rgb_to_hsv(*pixel)[0] - share + 0.5) % 1 - 0.5 == pytest.approx(0, abs=0.01)
    assert np.array_equal(np.asarray(turn_hue(red, 0.0)), np.asarray(red))
