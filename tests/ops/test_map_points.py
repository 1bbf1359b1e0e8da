"""Values of maps at points: their gradients equal those of grid_sample, for the maps and for the points."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.ops.points import SampleMaps, sample_maps


@pytest.mark.parametrize("height, width", [(5, 7), (1, 3), (4, 4)])
def test_gradients_equal_those_of_grid_sample(height, width):
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 2, height, width, dtype=torch.float64, generator=generator)
    points = torch.rand(3, 40, 2, dtype=torch.float64, generator=generator) * 1.6 - 0.3  # also outside
    toward = torch.randn(3, 2, 40, dtype=torch.float64, generator=generator)
    results = []
    for read in (
        SampleMaps.apply,
        lambda m, p: F.grid_sample(m, 2 * p[:, None] - 1, align_corners=False)[:, :, 0],
    ):
        inputs = [maps.clone().requires_grad_(), points.clone().requires_grad_()]
        values = read(*inputs)
        (values * toward).sum().backward()
        results.append([values.detach(), *(tensor.grad for tensor in inputs)])
    for mine, expected in zip(*results, strict=True):
        assert mine.shape == expected.shape and expected.abs().max() > 0.1
        assert torch.allclose(mine, expected, atol=1e-8)


def test_the_gradient_of_the_maps_does_not_depend_on_the_order_of_the_points():
    maps = torch.randn(1, 1, 2, 2)
    points, toward = torch.rand(1, 500, 2), torch.randn(1, 1, 500)
    gradients = []
    for order in (torch.arange(500), torch.randperm(500)):
        leaf = maps.clone().requires_grad_()
        (SampleMaps.apply(leaf, points[:, order]) * toward[..., order]).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert torch.equal(sample_maps(maps, points), SampleMaps.apply(maps, points))
