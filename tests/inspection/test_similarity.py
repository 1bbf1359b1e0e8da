"""The similarity of position embeddings against a loop over pairs of patches."""

import math

import numpy as np
import pytest
import torch
from refusals import refused

from vitkit.inspection.embeddings import position_similarity


def written(rows: torch.Tensor, grid: tuple[int, int]) -> np.ndarray:
    h, w = grid
    out = np.zeros((h, w, h, w))
    for a, x in enumerate(rows.tolist()):
        for b, y in enumerate(rows.tolist()):
            dot = sum(p * q for p, q in zip(x, y, strict=True))
            lengths = math.sqrt(sum(p * p for p in x)) * math.sqrt(sum(q * q for q in y))
            out[a // w, a % w, b // w, b % w] = dot / lengths
    return out


@pytest.mark.parametrize("positions", ["1d", "2d", "sincos2d"])
@pytest.mark.parametrize("head", ["token", "gap"])
def test_every_pair_of_patches_as_the_cosine_without_the_class_entry(small, positions, head):
    model = small(positions=positions, head=head, image_size=(24, 16))
    rows = model.positions.at((3, 2)).detach()[0, -6:]
    result = position_similarity(model)
    np.testing.assert_allclose(result, written(rows, (3, 2)), atol=1e-5)
    for i in range(3):
        for j in range(2):
            assert result[i, j, i, j] == pytest.approx(1, abs=1e-5)


def test_other_sizes_resize_the_table_as_the_model_does(small):
    model = small()
    result = position_similarity(model, image_size=(48, 24))
    np.testing.assert_allclose(result, written(model.positions.at((6, 3)).detach()[0, 1:], (6, 3)), atol=1e-5)
    with refused("model.input", "width 7", "fits: 8"):
        position_similarity(model, image_size=(48, 7))


def test_each_layer_has_its_own_table_only_where_positions_enter_every_layer(small):
    model = small(injection="every")
    for layer in (0, 1):
        expected = written(model.positions.table[layer, 1:].detach(), (4, 4))
        np.testing.assert_allclose(position_similarity(model, layer=layer), expected, atol=1e-5)
    with refused("request.value", "layer 2", "0 to 1"):
        position_similarity(model, layer=2)
    with refused("request.value", "layer 1", "layer 0"):
        position_similarity(small(injection="shared"), layer=1)


def test_hybrids_have_it_and_models_without_embeddings_of_places_say_so(small, small_hybrid, small_resnet):
    assert position_similarity(small_hybrid()).shape == (8, 8, 8, 8)
    with refused("inspection.unsupported", "position embeddings"):
        position_similarity(small(positions="none"))
    with refused("inspection.unsupported", "relative"):
        position_similarity(small(positions="relative"))
    with refused("inspection.unsupported", "ResNet"):
        position_similarity(small_resnet())
