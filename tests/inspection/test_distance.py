"""The mean attention distance against loops, on attention that is known by construction."""

import math

import numpy as np
import pytest
import torch
from refusals import refused

from vitkit.inspection.attention import attention_distance

SIZE = (24, 16)  # a grid of 3 x 2 patches of 8 pixels


def uniform(model):
    """All queries are zero, so every token looks at all tokens alike."""
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.qkv.weight[: model.config.width] = 0
            block.attention.qkv.bias[: model.config.width] = 0
    return model


def written(weights: np.ndarray, grid: tuple[int, int], stride: int, lead: int) -> float:
    """One head of one image: sum over keys of weight times distance, averaged over queries."""
    h, w = grid
    total = 0.0
    for q in range(h * w):
        for k in range(h * w):
            distance = math.hypot((q // w - k // w) * stride, (q % w - k % w) * stride)
            total += weights[lead + q, lead + k] * distance
    return total / (h * w)


@pytest.mark.parametrize("head", ["token", "gap", "map"])
def test_uniform_attention_reaches_the_mean_distance(small, head):
    model = uniform(small(head=head))
    lead = int(head == "token")
    result = attention_distance(model, torch.randn(3, 3, *SIZE))
    expected = written(np.full((6 + lead, 6 + lead), 1 / (6 + lead)), (3, 2), 8, lead)
    np.testing.assert_allclose(result, np.full((2, 2), expected), rtol=1e-5)


def test_what_goes_to_the_class_token_is_not_spread_over_the_others(small):
    with_token, without = uniform(small()), uniform(small(head="gap"))
    images = torch.randn(1, 3, *SIZE)
    np.testing.assert_allclose(
        attention_distance(with_token, images), attention_distance(without, images) * 6 / 7, rtol=1e-5
    )


@pytest.mark.parametrize("options", [{}, {"head": "gap"}, {"positions": "relative", "image_size": SIZE}])
def test_any_attention_as_the_loop_says_averaged_over_images_in_any_batches(small, options):
    model = small(**options)
    images = torch.randn(3, 3, *SIZE)
    lead = int(model.class_token is not None)
    layers = [weights.detach().numpy() for weights in model.attention(images)]
    expected = [
        [np.mean([written(image[k], (3, 2), 8, lead) for image in weights]) for k in range(2)]
        for weights in layers
    ]
    for batch in (1, 2, 8):
        np.testing.assert_allclose(attention_distance(model, images, batch=batch), expected, rtol=1e-5)


def test_a_head_that_looks_at_its_left_neighbour_reaches_one_patch(small):
    model = small()
    left = torch.zeros(7, 7)
    left[0, 0] = 1
    for q in range(6):
        left[1 + q, 1 + (q if q % 2 == 0 else q - 1)] = 1  # the left column looks at itself
    model.attention = lambda images: iter([torch.stack([left, torch.eye(7)])[None]] * 2)
    result = attention_distance(model, torch.randn(1, 3, *SIZE))
    np.testing.assert_allclose(result, [[4, 0], [4, 0]])  # half of the patches at 8 pixels


def test_tokens_of_a_hybrid_lie_as_far_apart_as_stem_and_patch_say(small_hybrid):
    model = uniform(small_hybrid(patch=2, head="gap"))
    assert model.config.stride == 16
    result = attention_distance(model, torch.randn(1, 3, 32, 48))
    expected = written(np.full((6, 6), 1 / 6), (2, 3), 16, 0)
    np.testing.assert_allclose(result, np.full((2, 2), expected), rtol=1e-5)


def test_an_axial_layer_reaches_along_rows_and_then_along_columns(small):
    model = small(head="gap", attention="axial")
    with torch.no_grad():
        for block in model.encoder.blocks:
            for part in (block.row, block.column):
                part.attention.qkv.weight.zero_()
                part.attention.qkv.bias.zero_()
    result = attention_distance(model, torch.randn(1, 3, *SIZE))
    rows, columns = 8 / 2, (0 + 8 + 16 + 8 + 0 + 8 + 16 + 8 + 0) / 9
    np.testing.assert_allclose(result[:, 0], [rows, columns] * 2, rtol=1e-5)


def test_the_model_is_left_as_it_was(small):
    model = small(dropout=0.5)
    images = torch.randn(2, 3, *SIZE)
    before = attention_distance(model, images)
    model.train()
    model.encoder.blocks[0].eval()
    np.testing.assert_array_equal(attention_distance(model, images), before)
    assert model.training and model.encoder.blocks[1].training and not model.encoder.blocks[0].training
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_measured_is_said(small, small_resnet):
    model, images = small(), torch.randn(1, 3, *SIZE)
    for wrong, named in (
        (images[0], "(B, 3, H, W)"),
        (images[:0], "at least 1"),
        (images.to(torch.uint8), "torch.uint8"),
        (images[:, :, :4], "nearest that fits"),
    ):
        with refused("model.input", named):
            attention_distance(model, wrong)
    with refused("request.value", "batch", "not 0"):
        attention_distance(model, images, batch=0)
    with refused("inspection.unsupported", "depth 0"):
        attention_distance(small(depth=0), images)
    with refused("inspection.unsupported", "ResNet"):
        attention_distance(small_resnet(), images)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a processor without bfloat16 says so
def test_half_precision_is_near(small):
    model, images = small(), torch.randn(2, 3, *SIZE)
    exact = attention_distance(model, images)
    np.testing.assert_allclose(attention_distance(model.bfloat16(), images), exact, rtol=0.02)
