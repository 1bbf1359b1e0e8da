"""The models against the paper's equations, written out with loops in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.models.positions import sincos2d
from vitkit.ops.fused import patchify

IMAGE = (24, 16)  # not square: rows and columns must not be confused


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    for i, row in enumerate(x):
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        out[i] = (row - mean) / math.sqrt(variance + eps) * weight + bias
    return out


def gelu(x: Tensor, kind: str) -> Tensor:
    if kind == "erf":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attend(z: Tensor, p: dict[str, Tensor], heads: int) -> Tensor:
    """Eq. 5-8 with a loop over heads, queries and keys; relative logits where there is a table."""
    n, d = z.shape
    width = d // heads
    bias = p.get("attention.qkv.bias", torch.zeros(3 * d, dtype=z.dtype))
    q, k, v = (z @ p["attention.qkv.weight"].T + bias).split(d, dim=1)  # Eq. 5
    mixed = torch.zeros_like(z)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(n):
            logits = torch.stack([q[i, part] @ k[j, part] for j in range(n)]) / math.sqrt(width)
            if "attention.relative" in p:
                table = p["attention.relative"]
                extra = [q[i, part] @ table[i - j + n - 1, part] for j in range(n)]
                logits = logits + torch.stack(extra) / math.sqrt(width)
            weights = logits.exp() / logits.exp().sum()  # Eq. 6
            mixed[i, part] = sum(weights[j] * v[j, part] for j in range(n))  # Eq. 7
    return mixed @ p["attention.out.weight"].T + p["attention.out.bias"]  # Eq. 8


def block(z: Tensor, p: dict[str, Tensor], config) -> Tensor:
    """Eq. 2-3."""
    z = z + attend(layer_norm(z, p["norm1.weight"], p["norm1.bias"], config.norm_eps), p, config.heads)
    y = layer_norm(z, p["norm2.weight"], p["norm2.bias"], config.norm_eps)
    hidden = gelu(y @ p["mlp.up.weight"].T + p["mlp.up.bias"], config.gelu)
    return z + hidden @ p["mlp.down.weight"].T + p["mlp.down.bias"]


def under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def patches(image: Tensor, state: dict[str, Tensor], p: int) -> Tensor:
    """x_p E: each patch flattened and projected, in raster order."""
    rows = []
    for top in range(0, image.shape[1], p):
        for left in range(0, image.shape[2], p):
            flat = image[:, top : top + p, left : left + p].flatten()
            rows.append(state["project.weight"].flatten(1) @ flat + state["project.bias"])
    return torch.stack(rows)


def positions(state: dict[str, Tensor], config, layer: int) -> Tensor | float:
    h, w = config.grid
    layer = layer if config.injection == "every" else 0
    if config.positions == "1d":
        return state["positions.table"][layer]
    if config.positions == "2d":
        x, y = state["positions.x"][layer], state["positions.y"][layer]
        rows = [torch.cat([x[j], y[i]]) for i in range(h) for j in range(w)]
        first = [state["positions.first"][layer, 0]] if config.class_token else []
        return torch.stack(first + rows)
    if config.positions == "sincos2d":
        return written_sincos(config)
    return 0.0


def written_sincos(config) -> Tensor:
    (h, w), quarter = config.grid, config.width // 4
    rate = [10_000 ** -(i / (quarter - 1)) for i in range(quarter)]
    rows = [[0.0] * config.width] * int(config.class_token)
    for i in range(h):
        for j in range(w):
            x, y = [j * r for r in rate], [i * r for r in rate]
            rows.append([f(a) for axis in (x, y) for f in (math.sin, math.cos) for a in axis])
    return torch.tensor(rows, dtype=torch.float64)


def written_out(model, image: Tensor) -> Tensor:
    """The logits of one image, from Eq. 1 to the head."""
    config, state = model.config, model.state_dict()
    z = patches(image, state, config.patch)
    if config.class_token:
        z = torch.cat([state["class_token"][0], z])
    z = z + positions(state, config, 0)  # Eq. 1
    for layer in range(config.depth):
        if layer and config.injection != "stem":
            z = z + positions(state, config, layer)
        z = layer_of(z, under(state, f"encoder.blocks.{layer}."), config)
    if config.final_norm == "tokens":
        z = layer_norm(z, state["encoder.norm.weight"], state["encoder.norm.bias"], config.norm_eps)
    y = pooled(z, state, config)  # Eq. 4
    if config.representation:
        y = torch.tanh(state["representation.weight"] @ y + state["representation.bias"])
    return state["head.weight"] @ y + state["head.bias"]


def layer_of(z: Tensor, p: dict[str, Tensor], config) -> Tensor:
    if config.attention == "full":
        return block(z, p, config)
    h, w = config.grid
    z = z.unflatten(0, (h, w)).clone()
    for i in range(h):  # App. D.6: rows, then columns
        z[i] = block(z[i], under(p, "row."), config)
    for j in range(w):
        z[:, j] = block(z[:, j], under(p, "column."), config)
    return z.flatten(0, 1)


def pooled(z: Tensor, state: dict[str, Tensor], config) -> Tensor:
    if config.head == "token":
        return z[0]
    if config.head == "token+gap":
        return torch.cat([z[0], z[1:].mean(0)])
    if config.head == "gap":
        y = z[int(config.class_token) :].mean(0)
        if config.final_norm == "pooled":
            y = layer_norm(y[None], state["pool_norm.weight"], state["pool_norm.bias"], config.norm_eps)[0]
        return y
    p, width = under(state, "pool."), config.width // config.heads
    q = p["probe"][0, 0] @ p["query.weight"].T + p["query.bias"]
    k, v = (z[int(config.class_token) :] @ p["key_value.weight"].T + p["key_value.bias"]).split(
        config.width, dim=1
    )
    mixed = torch.zeros_like(q)
    for head in range(config.heads):
        part = slice(head * width, (head + 1) * width)
        weights = torch.softmax(k[:, part] @ q[part] / math.sqrt(width), 0)
        mixed[part] = weights @ v[:, part]
    y = mixed @ p["out.weight"].T + p["out.bias"]
    normed = layer_norm(y[None], p["norm.weight"], p["norm.bias"], config.norm_eps)[0]
    hidden = gelu(normed @ p["mlp.up.weight"].T + p["mlp.up.bias"], config.gelu)
    return y + hidden @ p["mlp.down.weight"].T + p["mlp.down.bias"]


CHOICES = [
    {},
    {"gelu": "erf"},
    {"qkv_bias": False},
    {"representation": 12},
    {"head": "gap"},
    {"head": "gap", "class_token": True, "final_norm": "pooled"},
    {"head": "token+gap"},
    {"head": "map"},
    {"head": "map", "class_token": True},
    {"positions": "none"},
    {"positions": "2d"},
    {"positions": "2d", "head": "gap"},
    {"positions": "relative"},
    {"positions": "sincos2d"},
    {"positions": "sincos2d", "injection": "shared"},
    {"injection": "every"},
    {"injection": "shared"},
    {"positions": "2d", "injection": "every"},
    {"positions": "2d", "injection": "shared"},
    {"attention": "axial", "head": "gap"},
    {"attention": "axial", "head": "gap", "positions": "relative"},
    {"attention": "axial", "head": "map", "positions": "2d", "injection": "every"},
]


@pytest.mark.parametrize("options", CHOICES, ids=lambda o: "-".join(map(str, o.values())) or "default")
def test_forward_equals_the_written_out_equations(small, options):
    model = small(image_size=IMAGE, **options).double()
    images = torch.randn(2, 3, *IMAGE, dtype=torch.float64)
    expected = torch.stack([written_out(model, image) for image in images])
    assert (model(images) - expected).abs().max() < 1e-10
    assert expected.abs().max() > 0.1  # a difference would show


def test_attention_yields_the_weights_of_eq_6_layer_by_layer(small):
    model = small(image_size=IMAGE).double()
    images = torch.randn(2, 3, *IMAGE, dtype=torch.float64)
    z = model.embed(*model.patches(images))
    for block_, weights in zip(model.encoder.blocks, model.attention(images), strict=True):
        assert weights.shape == (2, 2, 7, 7)
        assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))
        _, _, v = block_.attention.project(block_.norm1(z))
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        assert torch.allclose(block_.attention.out(mixed), block_.attention(block_.norm1(z)), atol=1e-12)
        z = block_(z)


def test_axial_attention_is_spread_over_rows_then_columns(small):
    model = small(image_size=IMAGE, attention="axial", head="gap").double()
    weights = list(model.attention(torch.randn(1, 3, *IMAGE, dtype=torch.float64)))
    assert len(weights) == 2 * model.config.depth
    row = torch.arange(6) // 2  # the grid is 3x2
    column = torch.arange(6) % 2
    for a, axis in zip(weights, (row, column) * 2, strict=True):
        same = axis[:, None] == axis[None, :]
        assert (a[..., ~same] == 0).all() and (a[..., same] > 0).all()
        assert torch.allclose(a.sum(-1), torch.ones(6, dtype=torch.float64))


def test_states_end_in_the_encoders_output(small):
    model = small(injection="every")
    images = torch.randn(2, 3, 32, 32)
    patches_, grid = model.patches(images)
    states = list(model.encoder.states(model.embed(patches_, grid), grid, model.inject(grid)))
    assert len(states) == model.config.depth + 1
    assert torch.equal(states[-1], model.tokens(images))


def test_sincos2d_equals_the_formula(small):
    config = small(positions="sincos2d", image_size=IMAGE).config
    assert torch.allclose(sincos2d(config.grid, config.width)[0], written_sincos(config)[1:], atol=1e-12)


@pytest.mark.parametrize("eps_in", ["std", "variance"])
def test_standardised_convolution_equals_the_formula(small_hybrid, eps_in):
    from dataclasses import replace

    config = small_hybrid().config.stem
    from vitkit.models.resnet import StdConv

    conv = StdConv(replace(config, std_eps=1e-3, std_eps_in=eps_in), 4, 8, 3).double()
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    expected = torch.zeros(1, 8, 6, 6, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, [1] * 4)
    for o, kernel in enumerate(conv.weight):
        mean, variance = kernel.mean(), kernel.var(correction=0)
        scale = variance.sqrt() + 1e-3 if eps_in == "std" else (variance + 1e-3).sqrt()
        for i in range(6):
            for j in range(6):
                expected[0, o, i, j] = (padded[0, :, i : i + 3, j : j + 3] * (kernel - mean) / scale).sum()
    assert torch.allclose(conv(x), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "kernel", "before", "after"), [(224, 7, 2, 3), (112, 3, 0, 1), (7, 3, 1, 1)]
)
def test_same_padding_puts_the_odd_pixel_after(size, kernel, before, after):
    from vitkit.models.resnet import pad_same

    padded = pad_same(torch.ones(1, 1, size, size), kernel, 2, 0.0)[0, 0, size // 2]
    assert padded.shape[0] == size + before + after
    assert padded[:before].sum() == 0 and padded[before] == 1 and padded[-after - 1] == 1


def test_patches_by_a_product_are_those_by_a_convolution():
    """On a GPU they are cut out and multiplied; the same sums in another order."""
    conv = torch.nn.Conv2d(3, 10, 4, stride=4).double()
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    result = F.linear(patchify(images, 4), conv.weight.flatten(1), conv.bias)
    assert torch.allclose(result, conv(images).flatten(2).mT, rtol=0, atol=1e-12)
