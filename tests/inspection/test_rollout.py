"""Rollout and the maps of single heads against loops, on attention that is known by construction."""

import numpy as np
import pytest
import torch
from refusals import refused

from vitkit.inspection.attention import attention_rollout, head_maps, pool_weights

SIZE = (24, 16)  # a grid of 3 x 2 patches of 8 pixels


def written(layers: list[np.ndarray]) -> np.ndarray:
    """R of one image from its (K, T, T) weights, with a loop over every entry."""
    tokens = layers[0].shape[-1]
    rollout = np.eye(tokens)
    for weights in layers:
        step = np.zeros((tokens, tokens))
        for q in range(tokens):
            for k in range(tokens):
                step[q, k] = sum(head[q, k] for head in weights) / len(weights) + (q == k)
            step[q] /= sum(step[q])
        rollout = np.array([[sum(step[q] * rollout[:, k]) for k in range(tokens)] for q in range(tokens)])
    return rollout


def layers_of(model, images: torch.Tensor, image: int) -> list[np.ndarray]:
    return [weights[image].detach().double().numpy() for weights in model.attention(images)]


def test_uniform_attention_rolls_out_to_a_uniform_map(small):
    model = small()
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.qkv.weight[:32] = 0
            block.attention.qkv.bias[:32] = 0
    result = attention_rollout(model, torch.randn(2, 3, *SIZE))
    # each layer keeps half and spreads half over 7 tokens: 1/2 * 1/7, then 1/2 * that + 1/2 * 1/7
    np.testing.assert_allclose(result, np.full((2, 3, 2), 3 / 28), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"positions": "relative", "image_size": SIZE}, {"depth": 3}])
def test_the_class_tokens_row_without_its_class_column(small, options):
    model, images = small(**options), torch.randn(3, 3, *SIZE)
    for batch in (2, 8):
        result = attention_rollout(model, images, batch=batch)
        for image in range(3):
            expected = written(layers_of(model, images, image))[0, 1:].reshape(3, 2)
            np.testing.assert_allclose(result[image], expected, rtol=1e-4)


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("head", ["gap", "map"])
def test_other_heads_weigh_the_rows_of_the_patches_as_they_read_them(small, head, class_token):
    model, images, lead = (
        small(head=head, class_token=class_token),
        torch.randn(2, 3, *SIZE),
        int(class_token),
    )
    result = attention_rollout(model, images)
    for image in range(2):
        reads = np.full(6, 1 / 6)
        if head == "map":
            z = model.tokens(images)[:, lead:]
            reads = pool_weights(model.pool, z)[image, :, 0].mean(0).detach().numpy()
        rows = written(layers_of(model, images, image))[lead:, lead:]
        expected = sum(weight * row for weight, row in zip(reads, rows, strict=True))
        np.testing.assert_allclose(result[image].ravel(), expected, rtol=1e-4)


def test_one_hot_attention_is_followed_from_the_last_layer_to_the_first(small):
    model = small()
    first, last = torch.eye(7), torch.eye(7)
    last[0], first[3] = torch.eye(7)[3], torch.eye(7)[6]  # the class token reads 3, which has read 6
    model.attention = lambda images: iter([m.expand(1, 2, 7, 7) for m in (first, last)])
    expected = np.zeros(6)
    expected[3 - 1] = expected[6 - 1] = 0.25  # half of it from token 3, of which half was token 6
    np.testing.assert_allclose(attention_rollout(model, torch.randn(1, 3, *SIZE)).ravel(), expected)


def test_axial_layers_roll_out_row_by_row_and_column_by_column(small):
    model, images = small(head="gap", attention="axial"), torch.randn(1, 3, *SIZE)
    layers = layers_of(model, images, 0)
    assert len(layers) == 4
    np.testing.assert_allclose(attention_rollout(model, images).ravel(), written(layers).mean(0), rtol=1e-4)


def test_pooling_weights_are_those_that_the_pooling_uses(small):
    model, images = small(head="map"), torch.randn(2, 3, *SIZE)
    z = model.tokens(images)
    weights = pool_weights(model.pool, z)
    assert weights.shape == (2, 2, 1, 6)
    v = model.pool.key_value(z).unflatten(-1, (2, 2, -1))[:, :, 1].transpose(1, 2)
    y = model.pool.out((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close((y + model.pool.mlp(model.pool.norm(y)))[:, 0], model.pool(z))


def test_maps_of_single_heads_are_the_weights_themselves(small):
    model, images = small(), torch.randn(3, 3, *SIZE)
    layers = [w.detach().numpy() for w in model.attention(images)]
    for layer in (0, 1, -1):
        result = head_maps(model, images, layer=layer, batch=2)
        np.testing.assert_allclose(result, layers[layer][:, :, 0, 1:].reshape(3, 2, 3, 2), rtol=1e-5)
    result = head_maps(model, images, layer=1, query=(2, 0))
    np.testing.assert_allclose(result, layers[1][:, :, 1 + 4, 1:].reshape(3, 2, 3, 2), rtol=1e-5)
    pooled = small(head="gap")
    expected = next(pooled.attention(images)).detach().numpy().mean(2).reshape(3, 2, 3, 2)
    np.testing.assert_allclose(head_maps(pooled, images, layer=0), expected, rtol=1e-5)


def test_hybrids_have_maps_and_what_has_none_says_so(small, small_hybrid, small_resnet):
    assert attention_rollout(small_hybrid(), torch.randn(1, 3, 32, 64)).shape == (1, 4, 8)
    images = torch.randn(1, 3, *SIZE)
    with refused("request.value", "layer 2", "0 to 1"):
        head_maps(small(), images, layer=2)
    with refused("request.value", "(0, 2)", "3 x 2"):
        head_maps(small(), images, layer=0, query=(0, 2))
    with refused("inspection.unsupported", "depth 0"):
        attention_rollout(small(depth=0), images)
    for look in (attention_rollout, lambda m, x: head_maps(m, x, layer=0)):
        with refused("inspection.unsupported", "ResNet"):
            look(small_resnet(), images)
