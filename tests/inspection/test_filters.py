"""The components of the embedding's filters: known kernels, and the kernel that a hybrid applies."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused

from vitkit.inspection.embeddings import embedding_filters, principal, standardised
from vitkit.models.resnet import pad_same


def test_a_kernel_made_of_two_patterns_yields_those_two_with_their_variances(small):
    model = small()
    patterns = torch.linalg.qr(torch.randn(8 * 8 * 3, 2, dtype=torch.float64))[0].T  # orthonormal
    amounts = torch.zeros(32, 2, dtype=torch.float64)
    amounts[:16, 0] = torch.tensor([3.0, -3.0]).repeat(8)  # two amounts that do not go together
    amounts[16:, 1] = torch.tensor([1.0, -1.0]).repeat(8)
    rows = amounts @ patterns + 5.0  # a mean filter that PCA takes away
    with torch.no_grad():
        model.project.weight.copy_(rows.unflatten(1, (3, 8, 8)))
    result = embedding_filters(model)
    assert result.tiles.shape == (28, 8, 8, 3)
    assert result.variance.shape == (28,)
    np.testing.assert_allclose(result.variance[:3], [0.9, 0.1, 0.0], atol=1e-6)
    for tile, pattern in zip(result.tiles, patterns, strict=False):
        expected = pattern.unflatten(0, (3, 8, 8)).permute(1, 2, 0).numpy()  # a pixel's colours lie together
        assert abs((tile * expected).sum()) == pytest.approx(1, abs=1e-5)


def test_components_are_the_eigenvectors_of_the_covariance_written_as_a_loop():
    rows = np.random.default_rng(0).normal(size=(9, 4)) * [1, 2, 3, 4]
    covariance = np.zeros((4, 4))
    for row in rows:
        covariance += np.outer(row - rows.mean(0), row - rows.mean(0))
    for data, fits in ((rows, 4), (rows[:3], 3)):  # more rows than columns, and fewer
        result = principal(data, 9)
        assert len(result.axes) == fits
        np.testing.assert_allclose(result.axes @ result.axes.T, np.eye(fits), atol=1e-12)
    result = principal(rows, 4)
    for axis, share in zip(result.axes, result.variance, strict=True):
        np.testing.assert_allclose(covariance @ axis, share * np.trace(covariance) * axis, atol=1e-9)
        assert axis[np.abs(axis).argmax()] > 0
    assert result.variance.sum() == pytest.approx(1)
    assert (principal(np.ones((5, 3)), 2).variance == 0).all()


def test_a_hybrid_shows_its_root_as_the_convolution_applies_it(small_hybrid):
    model = small_hybrid()
    kernel = standardised(model.stem.root)
    images = torch.randn(1, 3, 20, 14)
    torch.testing.assert_close(
        F.conv2d(pad_same(images, 7, 2, 0.0), kernel, stride=2), model.stem.root(images)
    )
    result = embedding_filters(model)
    rows = kernel.detach().permute(0, 2, 3, 1).flatten(1).double().numpy()
    assert result.tiles.shape == (28, 7, 7, 3)
    np.testing.assert_allclose(result.tiles.reshape(28, -1), principal(rows, 28).axes, atol=1e-4)


def test_small_kernels_yield_what_they_have_and_resnets_an_error(small, small_resnet):
    assert embedding_filters(small(patch=2)).tiles.shape == (12, 2, 2, 3)
    assert embedding_filters(small(channels=1)).tiles.shape == (28, 8, 8, 1)
    with refused("request.value", "count", "not 0"):
        embedding_filters(small(), count=0)
    with refused("inspection.unsupported", "ResNet"):
        embedding_filters(small_resnet())
