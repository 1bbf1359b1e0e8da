"""Token merging against its definition (Bolya et al., ICLR 2023) in plain loops, and where it is refused."""

import math

import pytest
import torch
from refusals import refused

import vitkit
from vitkit.metrics.cost import flops, forward_flops
from vitkit.models.adapt import adapt
from vitkit.models.variants import configure, fresh, skeleton

SIZES = {"width": 32, "depth": 3, "heads": 2, "hidden": 48, "image_size": 24, "classes": 5}


def made(name: str = "ViT-Ti/4", seed: int = 0, **options):
    model = fresh(configure(name, **(SIZES | options)), seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def images(model, count: int = 2) -> torch.Tensor:
    shape = (count, model.config.channels, *model.config.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def by_loops(model, image: torch.Tensor, count: int) -> torch.Tensor:
    """The logits of one image by the definition: one token, one pair and one head at a time."""
    c, heads = model.config, model.config.heads
    patches, grid = model.patches(image[None])
    tokens = list(model.embed(patches, grid)[0])
    sizes = [1] * len(tokens)
    for block in model.encoder.blocks:
        keys, mixed = attend(block, torch.stack(tokens), sizes, heads)
        scale1 = 1 if block.scale1 is None else block.scale1
        tokens = [token + scale1 * m for token, m in zip(tokens, mixed, strict=True)]
        tokens, sizes = merge_by_loops(tokens, sizes, keys, count, c.prefix)
        scale2 = 1 if block.scale2 is None else block.scale2
        tokens = [token + scale2 * block.mlp(block.norm2(token)) for token in tokens]
    tokens = [model.encoder.norm(token) for token in tokens]
    mean = sum(token * size for token, size in zip(tokens[c.prefix :], sizes[c.prefix :], strict=True))
    mean = mean / sum(sizes[c.prefix :])
    if c.head == "gap":
        mean = mean if model.pool_norm is None else model.pool_norm(mean)
    pooled = {"gap": [mean], "token": tokens[: c.lead], "token+gap": [tokens[0], mean]}[c.head]
    return model.forward_head(torch.cat(pooled)[None])[0]


def attend(block, z, sizes, heads):
    """Keys averaged over the heads, and the output of proportional attention, for tokens (T, D)."""
    q, k, v = block.attention.qkv(block.norm1(z)).chunk(3, -1)
    wide, mixed = z.shape[-1] // heads, []
    for row in range(len(z)):
        parts = []
        for head in range(heads):
            part = slice(head * wide, (head + 1) * wide)
            logits = [
                float(q[row, part] @ k[i, part]) / math.sqrt(wide) + math.log(sizes[i]) for i in range(len(z))
            ]
            weights = torch.tensor(logits).softmax(0)
            parts.append(sum(w * v[i, part] for i, w in enumerate(weights)))
        mixed.append(block.attention.out(torch.cat(parts)))
    keys = [sum(k[i, h * wide : (h + 1) * wide] for h in range(heads)) / heads for i in range(len(z))]
    return keys, mixed


def merge_by_loops(tokens, sizes, keys, count, prefix):
    """Bipartite soft matching: the tokens at even places look for a partner at the odd ones."""
    edges = []
    for a in range(0, len(tokens), 2):
        for b in range(1, len(tokens), 2):
            if a >= prefix and b >= prefix:
                similarity = float(keys[a] @ keys[b] / (keys[a].norm() * keys[b].norm()))
                edges.append((similarity, a, b))
    best = {}
    for similarity, a, b in sorted(edges, reverse=True):
        best.setdefault(a, (similarity, b))
    ranked = sorted(best, key=lambda a: -best[a][0])
    chosen = ranked[: min(count, (len(tokens) - prefix) // 2)]
    groups = {i: [i] for i in range(len(tokens)) if i not in chosen}
    for a in chosen:
        groups[best[a][1]].append(a)
    even = [i for i in range(prefix, len(tokens)) if i % 2 == 0 and i not in chosen]
    if not prefix:
        even = [a for a in ranked if a not in chosen]
    if not chosen:
        return tokens, sizes
    order = [*range(prefix), *even, *(i for i in range(prefix, len(tokens)) if i % 2)]
    new_sizes = [sum(sizes[i] for i in groups[first]) for first in order]
    means = [
        sum(tokens[i] * sizes[i] for i in groups[first]) / size
        for first, size in zip(order, new_sizes, strict=True)
    ]
    return means, new_sizes


@pytest.mark.parametrize("count", [1, 5, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"registers": 4, "layer_scale": True},
        {"distilled": True},
        {"head": "gap", "final_norm": "pooled"},
        {"head": "token+gap", "registers": 3, "mlp": "swiglu"},
    ],
    ids=["class token", "registers", "distilled", "no class token", "token+gap"],
)
def test_merging_equals_the_definition(options, count):
    model = made(**options)
    batch = images(model)
    with torch.no_grad():
        expected = torch.stack([by_loops(model, image, count) for image in batch])
        merged = adapt(model, merge_tokens=count)(batch)
    torch.testing.assert_close(merged, expected, atol=2e-4, rtol=2e-4)
    assert (merged - model(batch)).abs().max() > 1e-3  # merging is not without effect


def test_tokens_that_are_left_and_their_sizes():
    model = adapt(made(registers=2), merge_tokens=7)
    with torch.no_grad():
        z, sizes = model.encode_merged(*model.patches(images(model)))
    assert z.shape == (2, 3 + 36 - 3 * 7, 32) and sizes.shape == (2, 18, 1)
    assert sizes.sum(1).flatten().tolist() == [39.0, 39.0]  # no patch is lost
    assert (sizes[:, :3] == 1).all()
    whole = made()
    z, sizes = adapt(whole, merge_tokens=10**5).encode_merged(*whole.patches(images(whole)))
    assert z.shape[1] == 1 + 5  # 36 patches, halved three times: 18, 9, 5


def test_equal_patches_merge_without_changing_the_answer():
    model = made(positions="none", depth=2)
    image = torch.full((1, 3, 24, 24), 0.3)
    with torch.no_grad():
        torch.testing.assert_close(adapt(model, merge_tokens=9)(image), model(image), atol=1e-5, rtol=1e-5)


def test_the_cost_of_merging_is_counted():
    for options in ({}, {"registers": 4, "head": "gap"}, {"mlp": "swiglu"}):
        config = configure("ViT-Ti/4", **SIZES, **options, merge_tokens=5)
        counted = flops(skeleton(config), (24, 24))
        assert counted == forward_flops(config)
        assert counted < forward_flops(configure("ViT-Ti/4", **SIZES, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"head": "map"},
        {"positions": "relative"},
        {"injection": "every"},
        {"rope": "dinov3"},
        {"attention": "axial", "head": "gap"},
    ],
)
def test_merging_is_refused_where_it_cannot_work(options):
    with refused("model.config", "merge_tokens=3"):
        configure("ViT-Ti/4", **(SIZES | options), merge_tokens=3)


def test_merging_refuses_training_and_tokens_of_patches():
    model = adapt(made(), merge_tokens=3)
    for use in (model.tokens, lambda batch: next(model.attention(batch)), model.train()):
        with refused("model.unsupported", "merge_tokens=3"):
            use(images(model))
    with refused("model.unsupported", "merge_tokens"):
        vitkit.adapt(vitkit.build("BiT-R50x1", classes=3, image_size=64), merge_tokens=3)


def test_a_file_keeps_merge_tokens_and_other_layouts_refuse_it(tmp_path):
    model = adapt(made(), merge_tokens=3)
    vitkit.save(model, tmp_path / "m.safetensors")
    again = vitkit.load(tmp_path / "m.safetensors")
    assert again.config.merge_tokens == 3
    assert torch.equal(again.eval()(images(model)), model.eval()(images(model)))
    with refused("weights.unsupported", "merge_tokens=3"):
        vitkit.save(model, tmp_path / "m.pth", format="timm")
