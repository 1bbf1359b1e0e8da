"""Attention times gradient against derivatives measured by finite differences, weight by weight."""

import numpy as np
import pytest
import torch
from refusals import refused
from torch import Tensor

from vitkit.inspection.attention import class_map, written_head, written_layer

SIZE = (16, 24)  # a grid of 2 x 3 patches of 8 pixels
KINDS = [
    {},
    {"head": "gap"},
    {"head": "gap", "class_token": True, "final_norm": "pooled"},
    {"head": "map"},
    {"positions": "2d", "injection": "every", "layer_scale": True, "representation": 8},
    {"positions": "relative", "image_size": SIZE, "qkv_bias": False},
]


def logit(model, image: Tensor, target: int, nudges: dict[int, Tensor]) -> Tensor:
    """The logit of one image, with something added to the attention weights of some layers.

    Layer -1 is the attention pooling.
    """
    patches, grid = model.patches(image)
    z, lead = model.embed(patches, grid), int(model.class_token is not None)
    for layer, block in enumerate(model.encoder.blocks):
        z = model.inject(grid)(z, layer)
        x = block.norm1(z)
        weights = block.attention.weights(x) + nudges.get(layer, 0)
        mixed = block.attention.out((weights @ block.attention.project(x)[2]).transpose(1, 2).flatten(2))
        z = z + (mixed if block.scale1 is None else mixed * block.scale1)
        y = block.mlp(block.norm2(z))
        z = z + (y if block.scale2 is None else y * block.scale2)
    z = model.encoder.norm(z)
    if model.pool is not None and -1 in nudges:
        pool, heads = model.pool, model.pool.heads
        k, v = model.pool.key_value(z[:, lead:]).unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        q = pool.query(pool.probe).unflatten(-1, (heads, -1)).transpose(1, 2)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) + nudges[-1]
        y = pool.out((weights @ v).transpose(1, 2).flatten(2))
        return model.head((y + pool.mlp(pool.norm(y)))[:, 0])[0, target]
    return written_head(model, z)[0][0, target]


def slopes(model, image: Tensor, target: int, layer: int, shape: torch.Size) -> Tensor:
    """dy / dA of a layer, one weight after the other, by central differences."""
    result, step = torch.zeros(shape, dtype=torch.float64), 1e-5
    for place in np.ndindex(*shape):
        nudge = torch.zeros(shape, dtype=torch.float64)
        nudge[place] = step
        up, down = (logit(model, image, target, {layer: sign * nudge}) for sign in (1, -1))
        result[place] = (up - down) / (2 * step)
    return result


@torch.no_grad()
def written(model, image: Tensor, target: int) -> Tensor:
    """The definition in the docstring, with R as a whole matrix."""
    lead = int(model.class_token is not None)
    product = None
    for layer, weights in enumerate(model.attention(image)):
        c = (weights * slopes(model, image, target, layer, weights.shape)).clamp(min=0).mean(1)[0]
        step = torch.eye(len(c), dtype=c.dtype) + c
        product = step if product is None else step @ product
    if model.config.head == "token":
        return product[0, 1:]
    if model.config.head == "gap":
        return product[lead:, lead:].mean(0) - 1 / (len(product) - lead)
    weights = written_head(model, model.tokens(image))[1]
    c = (weights * slopes(model, image, target, -1, weights.shape)).clamp(min=0).mean(1)[0, 0]
    return c @ product[lead:, lead:]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.slow
def test_the_map_is_the_definition_with_measured_derivatives(small, options):
    model = small(**({"width": 16, "hidden": 16} | options)).double()
    with torch.no_grad():
        model.head.weight.add_(torch.randn_like(model.head.weight))  # so that gradients are large
    images = torch.randn(2, 3, *SIZE, dtype=torch.float64)
    result = class_map(model, images, target=[1, 4])
    assert result.shape == (2, 2, 3) and result.min() >= 0 and result.max() > 0
    for image, target in enumerate((1, 4)):
        expected = written(model, images[image : image + 1], target).numpy()
        np.testing.assert_allclose(result[image].ravel(), expected, rtol=1e-4, atol=1e-6 * expected.max())


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_layers_and_heads_written_out_equal_the_models_own(small, options):
    model, images = small(**options).double(), torch.randn(2, 3, *SIZE, dtype=torch.float64)
    torch.testing.assert_close(written_head(model, model.tokens(images))[0], model(images))
    z = torch.randn(2, model.config.tokens, 32, dtype=torch.float64)
    for block in model.encoder.blocks:
        out, weights = written_layer(block, z)
        torch.testing.assert_close(out, block(z))
        torch.testing.assert_close(weights, next(block.weights(z)))


def test_gradients_of_all_layers_at_once_give_the_same_map(small):
    model, images = small(depth=3), torch.randn(2, 3, *SIZE)
    patches, grid = model.patches(images)
    z, kept = model.embed(patches, grid), []
    for block in model.encoder.blocks:
        z, weights = written_layer(block, z)
        kept.append(weights)
    y = written_head(model, model.encoder.norm(z))[0][:, 2].sum()
    product = torch.eye(7)
    for weights, slope in zip(kept, torch.autograd.grad(y, kept), strict=True):
        product = product + (weights * slope).clamp(min=0).mean(1) @ product
    expected = product[:, 0, 1:].detach().numpy().reshape(2, 2, 3)
    for batch in (1, 8):
        np.testing.assert_allclose(class_map(model, images, target=2, batch=batch), expected, rtol=1e-3)


def test_a_class_that_no_patch_moves_has_an_empty_map(small):
    model = small()
    with torch.no_grad():
        model.head.weight[3] = 0
    assert (class_map(model, torch.randn(1, 3, *SIZE), target=3) == 0).all()


def test_it_leaves_the_model_as_it_was_and_works_where_gradients_are_off(small, small_hybrid):
    model, images = small(dropout=0.5).requires_grad_(False), torch.randn(1, 3, *SIZE)
    expected = class_map(model, images, target=0)
    model.train().requires_grad_(True)
    with torch.inference_mode():
        np.testing.assert_array_equal(class_map(model, images.clone(), target=0), expected)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert class_map(small_hybrid(), torch.randn(2, 3, 32, 64), target=1).shape == (2, 4, 8)


def test_what_has_no_class_map_says_so(small, small_resnet):
    images = torch.randn(2, 3, *SIZE)
    with refused("inspection.unsupported", "axial"):
        class_map(small(head="gap", attention="axial"), images, target=0)
    with refused("inspection.unsupported", "head"):
        class_map(small(classes=0), images, target=0)
    with refused("inspection.unsupported", "ResNet"):
        class_map(small_resnet(), images, target=0)
    for wrong, named in ((5, "0 to 4"), (-1, "0 to 4"), ([1], "2 images"), ([0.0, 1.0], "[0.0, 1.0]")):
        with refused("request.value", named, wrong):
            class_map(small(), images, target=wrong)
