"""Token features as colours: tokens whose components are known by construction."""

import numpy as np
import pytest
import torch
from refusals import refused

from vitkit.inspection.embeddings import feature_colours

SIZE = (24, 16)  # a grid of 3 x 2 patches


@pytest.mark.parametrize("lead", [0, 1])
def test_three_known_directions_become_the_three_channels(small, lead):
    model = small(head="token" if lead else "gap")
    scores = torch.tensor([[-1.0, 1, 0, 0, 0, 0, -1, 1, 0, 0, 0, 0]]).T * torch.tensor([[9.0, 0, 0]])
    scores[2:4, 1], scores[8:10, 1] = torch.tensor([-4.0, 4.0]), torch.tensor([-4.0, 2.0])
    scores[4:6, 2] = torch.tensor([-1.0, 1.0])
    axes = torch.eye(32)[[7, 3, 11]]  # largest entries positive: the signs are settled
    tokens = (scores @ axes).view(2, 6, 32)
    tokens = torch.cat([torch.full((2, lead, 32), 100.0), tokens], 1)  # a class token is not looked at
    model.tokens = lambda images: tokens
    result = feature_colours(model, torch.randn(2, 3, *SIZE))
    low, high = scores.min(0).values, scores.max(0).values
    expected = ((scores - low) / (high - low)).view(2, 3, 2, 3).numpy()
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_colours_fill_0_to_1_over_all_images_in_any_batches(small, small_hybrid):
    model, images = small(), torch.randn(3, 3, *SIZE)
    result = feature_colours(model, images)
    assert result.shape == (3, 3, 2, 3) and result.dtype == np.float32
    np.testing.assert_allclose(result.min((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(result.max((0, 1, 2)), 1, atol=1e-6)
    np.testing.assert_allclose(feature_colours(model, images, batch=1), result, atol=1e-3)
    assert feature_colours(small_hybrid(), torch.randn(1, 3, 32, 64)).shape == (1, 4, 8, 3)
    assert feature_colours(small(head="gap", attention="axial"), images).shape == (3, 3, 2, 3)


def test_directions_in_which_nothing_differs_are_black(small):
    model = small()
    model.tokens = lambda images: torch.full((1, 7, 32), 0.1)
    assert (feature_colours(model, torch.randn(1, 3, *SIZE)) == 0).all()
    assert (feature_colours(small(), torch.randn(1, 3, 8, 8)) == 0).all()  # one patch alone


def test_a_resnet_has_no_tokens(small_resnet):
    with refused("inspection.unsupported", "ResNet"):
        feature_colours(small_resnet(), torch.randn(1, 3, 64, 64))
