"""Augmentations of current recipes: the published definitions, pure functions of (seed, step, place)."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from scipy.stats import ks_2samp

from vitkit.data.augment import color_jitter, cutmix, erase, three_augment
from vitkit.data.order import BalancedOrder, Order
from vitkit.data.sources.source import digits
from vitkit.data.views import View, apply, resized_box
from vitkit.recipes import recipe
from vitkit.recipes.recipe import override
from vitkit.runs.batches import mix_batch, training_order, training_view


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(height: int = 48, width: int = 64) -> np.ndarray:
    return rng(7).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("area", [0.08, 0.3])
def test_resized_boxes_are_drawn_as_torchvision_draws_them(area):
    transforms = pytest.importorskip("torchvision.transforms")
    torch.manual_seed(0)
    blank = Image.new("RGB", (300, 200))
    peer = [transforms.RandomResizedCrop.get_params(blank, (area, 1.0), (3 / 4, 4 / 3)) for _ in range(3000)]
    generator = rng()
    ours = [resized_box(200, 300, generator, area) for _ in range(3000)]
    for column in range(4):
        assert ks_2samp([b[column] for b in ours], [b[column] for b in peer]).pvalue > 0.001
    assert all(t >= 0 and x >= 0 and t + h <= 200 and x + w <= 300 for t, x, h, w in ours)
    assert min(h * w for _, _, h, w in ours) >= area * 60_000 * 0.98  # whole pixels


def test_an_image_that_no_resized_box_fits_is_cropped_centrally():
    assert resized_box(10, 1000, rng(), 0.9) == (0, 493, 10, 13)


@pytest.mark.parametrize(
    "options", [{"three_augment": True}, {"color_jitter": 0.4}, {"erasing": 1.0}, {"area": 0.3}]
)
def test_views_are_pure_functions_of_the_generator(options):
    view = View(size=(32, 32), crop="resized", flip=True, **options)
    content = picture()
    before = content.copy()
    first, again, other = (apply(content, view, rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert np.array_equal(content, before) and first.shape == (3, 32, 32)


def test_erasing_replaces_one_rectangle_of_the_published_area():
    image = np.zeros((100, 80, 3), np.uint8)
    shares = []
    for seed in range(200):
        changed = (erase(image, rng(seed)) != 0).any(2)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        h, w = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
        shares.append(h * w / 8000)
        assert changed.sum() > 0.9 * h * w  # noise is rarely black
    assert min(shares) > 0.015 and max(shares) < 0.345 and 0.13 < np.mean(shares) < 0.21


def test_three_augment_makes_one_of_its_three_images():
    image = picture()
    kinds = set()
    for seed in range(60):
        result = three_augment(image, rng(seed))
        if (result[..., :1] == result).all():
            kinds.add("gray")
        elif np.array_equal(result, np.where(image < 128, image, 255 - image)):
            kinds.add("solarized")
        else:
            assert result.astype(float).std() < image.astype(float).std()
            kinds.add("blurred")
    assert kinds == {"gray", "solarized", "blurred"}


def test_colour_jitter_of_no_strength_changes_nothing():
    image = picture()
    assert np.array_equal(color_jitter(image, 0.0, rng()), image)
    assert not np.array_equal(color_jitter(image, 0.4, rng()), image)


def test_cutmix_weights_labels_by_the_area_that_it_cut():
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 20, 30).contiguous()
    targets = torch.eye(4)
    partner = torch.tensor([3, 0, 1, 2])
    for seed in range(30):
        mixed, labels = cutmix(images, targets, 1.0, rng(seed), partner)
        for row in range(4):
            own = (mixed[row] == row).float().mean()
            assert torch.allclose(labels[row, row], own, atol=1e-6)
            assert torch.allclose(labels[row, partner[row]], 1 - own, atol=1e-6)
            cut = (mixed[row, 0] == partner[row]).nonzero()
            if len(cut):  # one rectangle
                assert math.prod((cut.amax(0) - cut.amin(0) + 1).tolist()) == len(cut)


def test_mixup_and_cutmix_together_take_turns():
    r = override(recipe("finetune"), ["mixup=0.8", "cutmix=1", "batch=4", "image_size=16"])
    images = rng().normal(size=(4, 3, 16, 16)).astype(np.float32)
    batch = {
        "image": torch.from_numpy(images), "label": torch.eye(4), "place": torch.arange(4),
        "index": torch.arange(4),
    }  # fmt: skip
    kinds = []
    for step in range(40):
        mixed = mix_batch(dict(batch), [0, 1, 2, 3], r, Order(4, 4).rng(step, -1), range(4))
        kinds.append(bool(torch.isin(mixed["image"], batch["image"]).all()))  # CutMix makes no new values
    assert 8 < sum(kinds) < 32


def test_a_balanced_order_shows_every_class_equally_often():
    labels = np.array([0] * 50 + [2] * 5 + [3] * 2)  # no image of class 1
    order = BalancedOrder(57, 6, 3, labels=labels)
    stream = [order.sample(step, place) for step in range(100) for place in range(6)]
    assert np.bincount(labels[stream], minlength=4).tolist() == [200, 0, 200, 200]
    large = [i for i in stream if labels[i] == 0]
    assert sorted(large[:50]) == sorted(large[50:100]) == list(range(50))  # each once before any again
    again = order.samples([(step, place) for step in range(100) for place in range(6)])
    assert again.tolist() == stream


def test_a_recipe_decides_order_and_view():
    r = override(recipe("finetune"), ["sampling=balanced", "batch=8"])
    train = digits()
    assert isinstance(training_order(r, train), BalancedOrder)
    view = training_view(
        override(r, ["crop=resized", "crop_area=0.3", "interpolation=bicubic", "erasing=0.25"])
    )
    assert (view.crop, view.area, view.interpolation, view.erasing) == ("resized", 0.3, "bicubic", 0.25)


def test_impossible_views_are_refused():
    for options in ({"area": 0.0}, {"erasing": 1.5}, {"color_jitter": -1.0}):
        with refused("request.value"):
            View(size=(8, 8), crop="resized", **options)
