"""Permuted and shifted images: pixels go where they should, alike for every model and every size."""

import pytest
import torch
from refusals import refused

from vitkit.inspection.embeddings import shifted, shuffled

IMAGES = torch.arange(2 * 3 * 8 * 12).reshape(2, 3, 8, 12)


def cells_of(image, g):
    h, w = image.shape[1] // g, image.shape[2] // g
    return [image[:, i * h : (i + 1) * h, j * w : (j + 1) * w] for i in range(g) for j in range(g)]


@pytest.mark.parametrize("g", [1, 2, 4])
def test_cells_are_permuted_whole(g):
    result = shuffled(IMAGES, g, [5, 9])
    for image, other in zip(IMAGES, result, strict=True):
        before, after = cells_of(image, g), cells_of(other, g)
        order = [next(i for i, cell in enumerate(before) if torch.equal(cell, one)) for one in after]
        assert sorted(order) == list(range(g * g))
    assert torch.equal(result, IMAGES) == (g == 1)


def test_the_order_depends_on_seed_and_place_alone():
    numbers = torch.arange(16).reshape(1, 1, 4, 4)
    small = shuffled(numbers, 4, [7], seed=3)
    large = shuffled(numbers.repeat_interleave(2, 2).repeat_interleave(2, 3), 4, [7], seed=3)
    assert torch.equal(large[:, :, ::2, ::2], small), "the same cells at another size"
    both = shuffled(torch.cat([numbers, numbers]), 4, [2, 7], seed=3)
    assert torch.equal(both[1:], small) and not torch.equal(both[:1], small)
    assert not torch.equal(shuffled(numbers, 4, [7], seed=4), small)


def test_a_shift_moves_every_pixel_and_repeats_the_edge():
    places = list(range(40))
    images = torch.arange(6 * 6).reshape(1, 1, 6, 6).expand(40, 1, 6, 6)
    result, seen = shifted(images, 2, places), set()
    for image in result[:, 0]:
        ways = {
            "right": torch.cat([images[0, 0, :, :1]] * 2 + [images[0, 0, :, :-2]], 1),
            "left": torch.cat([images[0, 0, :, 2:]] + [images[0, 0, :, -1:]] * 2, 1),
            "down": torch.cat([images[0, 0, :1]] * 2 + [images[0, 0, :-2]], 0),
            "up": torch.cat([images[0, 0, 2:]] + [images[0, 0, -1:]] * 2, 0),
        }
        seen |= {name for name, way in ways.items() if torch.equal(way, image)}
    assert seen == {"right", "left", "down", "up"}
    assert torch.equal(shifted(images, 0, places), images)
    assert torch.equal(shifted(images[:1], 2, [17]), result[17:18])


def test_what_does_not_fit_is_refused():
    with refused("request.value", "8 x 12", "3 x 3"):
        shuffled(IMAGES, 3, [0, 1])
    with refused("request.value", "8 x 12", "by 8"):
        shifted(IMAGES, 8, [0, 1])
