"""Resizing of position tables: each named convention against the library that it is named after."""

import math

import numpy as np
import pytest
import scipy.ndimage
import torch
from refusals import refused

import vitkit
from vitkit.models.positions import RESIZE, resize_learned, resize_positions

GRIDS = [
    ((14, 14), (24, 24)),
    ((7, 7), (12, 12)),
    ((16, 16), (37, 37)),
    ((24, 24), (14, 14)),
    ((14, 14), (1, 1)),
]
ODD = [((14, 10), (24, 7)), ((3, 5), (5, 3)), ((4, 4), (4, 9))]


def table(grid: tuple[int, int], lead: int = 1, width: int = 6) -> torch.Tensor:
    return torch.randn(1, grid[0] * grid[1] + lead, width)


@pytest.mark.parametrize(("old", "new"), GRIDS + ODD)
def test_official_equals_scipy_zoom_of_order_1(old, new):
    positions = table(old)
    grid = positions[0, 1:].unflatten(0, old).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    resized = vitkit.resize_positions(positions, old, new)
    assert np.abs(resized[0, 1:].unflatten(0, new).numpy() - zoomed).max() < 1e-6
    assert torch.equal(resized[:, :1], positions[:, :1])


@pytest.mark.parametrize(("old", "new"), GRIDS + ODD)
def test_timm_equals_timm(old, new):
    from timm.layers import resample_abs_pos_embed

    positions = table(old)
    theirs = resample_abs_pos_embed(positions, new_size=list(new), old_size=list(old))
    assert torch.allclose(resize_positions(positions, old, new, "timm"), theirs, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [(o, n) for o, n in GRIDS + ODD if o[0] == o[1]])
def test_hf_equals_transformers(old, new):
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTEmbeddings

    config = ViTConfig(hidden_size=6, num_attention_heads=1, image_size=old[0] * 16, patch_size=16)
    embeddings = ViTEmbeddings(config)
    positions = table(old)
    embeddings.position_embeddings.data = positions
    theirs = embeddings.interpolate_pos_encoding(
        torch.zeros(1, new[0] * new[1] + 1, 6), new[0] * 16, new[1] * 16
    )
    assert torch.allclose(resize_positions(positions, old, new, "hf"), theirs, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_torchvision_equals_torchvision(old, new):
    from torchvision.models.vision_transformer import interpolate_embeddings

    positions = table(old)
    state = {"encoder.pos_embedding": positions}
    theirs = interpolate_embeddings(new[0] * 16, 16, state)["encoder.pos_embedding"]
    assert torch.allclose(resize_positions(positions, old, new, "torchvision"), theirs, atol=1e-6)


def cubic(t: float, a: float = -0.75) -> float:
    t = abs(t)
    if t < 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def dinov2_matrix(old: int, new: int) -> torch.Tensor:
    """DINOv2's rule for one axis: bicubic at (i + 1/2) old / (new + 0.1) - 1/2, edges repeated."""
    matrix = torch.zeros(new, old)
    for i in range(new):
        at = (i + 0.5) * old / (new + 0.1) - 0.5
        for k in range(math.floor(at) - 1, math.floor(at) + 3):
            matrix[i, min(max(k, 0), old - 1)] += cubic(at - k)
    return matrix


@pytest.mark.parametrize(("old", "new"), [((14, 14), (24, 24)), ((37, 37), (16, 16)), ((14, 10), (24, 7))])
def test_dinov2_equals_its_rule_written_out(old, new):
    positions = table(old)
    rows, columns = dinov2_matrix(old[0], new[0]), dinov2_matrix(old[1], new[1])
    expected = torch.einsum("ih,jw,hwd->ijd", rows, columns, positions[0, 1:].unflatten(0, old))
    resized = resize_positions(positions, old, new, "dinov2")
    assert torch.allclose(resized[0, 1:].unflatten(0, new), expected, atol=1e-5)


def test_the_conventions_really_differ():
    positions = table((14, 14))
    results = [resize_positions(positions, (14, 14), (24, 24), method) for method in RESIZE]
    for i, a in enumerate(results):
        for b in results[i + 1 :]:
            assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("method", RESIZE)
def test_the_same_grid_returns_the_same_numbers(method):
    positions = table((5, 7))
    assert torch.equal(resize_positions(positions, (5, 7), (5, 7), method), positions)


def test_a_table_without_a_class_entry_keeps_none():
    assert resize_positions(table((4, 4), lead=0), (4, 4), (6, 5)).shape == (1, 30, 6)


def test_halves_are_resized_in_float32_and_come_back():
    assert resize_positions(table((4, 4)).bfloat16(), (4, 4), (6, 5)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        ((torch.zeros(1, 17, 4), (4, 5), (6, 6)), "model.input", ("4x5", "(1, 17, 4)")),
        ((torch.zeros(1, 17, 4), (4, 4), (0, 6)), "request.value", ("(0, 6)",)),
        ((torch.zeros(17, 4), (4, 4), (6, 6)), "model.input", ("(17, 4)",)),
        ((torch.zeros(1, 17, 4), (4, 4), (6, 6), "bicubic"), "request.value", ("bicubic", "official")),
    ],
)
def test_impossible_requests_are_refused(arguments, code, values):
    with refused(code, *values):
        resize_positions(*arguments)


@pytest.mark.parametrize("method", RESIZE)
@pytest.mark.parametrize("new", [(3, 2), (6, 9), (5, 4)])
def test_a_table_that_learns_has_the_numbers_and_gradients_of_the_interpolation(method, new):
    """By a product with a matrix, whose gradient is deterministic on a GPU."""
    table, weights = torch.randn(1, 1 + 5 * 4, 8, requires_grad=True), torch.randn(1, 1 + new[0] * new[1], 8)
    results = []
    for resize in (resize_positions, resize_learned):
        table.grad = None
        made = resize(table, (5, 4), new, method)
        (made * weights).sum().backward()
        results.append((made.detach(), table.grad.clone()))
    for direct, by_matrix in zip(*results, strict=True):
        assert torch.allclose(direct, by_matrix, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # stays exact
        assert torch.equal(resize_learned(table, (5, 4), new, method), made)
