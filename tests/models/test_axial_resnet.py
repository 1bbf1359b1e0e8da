"""AxialResNets: the attention against loops, their sizes, files, graphs and training, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused

import vitkit
from vitkit.data.sources.source import digits
from vitkit.inference.graphs import Form, trace
from vitkit.inspection.attention import attention_rollout
from vitkit.metrics.cost import parameters, training_memory
from vitkit.models.axial_resnet import AxialAttention, RowsThenColumns
from vitkit.models.variants import build, configure, skeleton, variant


@pytest.fixture
def axial(small_resnet):
    sizes = {"blocks": (1, 2), "width": 32, "image_size": (32, 48), "attention": "axial"}
    return lambda **options: small_resnet(**(sizes | options))


def by_hand(part: AxialAttention, x: torch.Tensor) -> torch.Tensor:
    """One attention written out: every head, every row, every query, every key."""
    b, channels, h, n = x.shape
    head = channels // part.heads
    projected = torch.einsum("oc,bchw->bohw", part.qkv.weight[:, :, 0, 0], x)
    projected = F.group_norm(projected, 32, part.qkv_norm.weight, part.qkv_norm.bias, part.qkv_norm.eps)
    out = torch.zeros_like(x)
    for image in range(b):
        for k in range(part.heads):
            for row in range(h):
                own = projected[image, 2 * head * k : 2 * head * (k + 1), row]  # (2 Dh, n)
                q, key, v = own[: head // 2], own[head // 2 : head], own[head:]
                for i in range(n):
                    offset = [part.relative[i - j + n - 1] for j in range(n)]
                    logits = torch.stack(
                        [
                            q[:, i] @ key[:, j]
                            + q[:, i] @ offset[j][: head // 2]
                            + key[:, j] @ offset[j][head // 2 : head]
                            for j in range(n)
                        ]
                    )
                    share = logits.exp() / logits.exp().sum()
                    seen = sum(share[j] * (v[:, j] + offset[j][head:]) for j in range(n))
                    out[image, head * k : head * (k + 1), row, i] = seen
    return F.group_norm(out, 32, part.out_norm.weight, part.out_norm.bias, part.out_norm.eps)


def random_part(made: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in made.double().parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return made.requires_grad_(False)


def test_attention_along_rows_equals_loops():
    part = random_part(AxialAttention(32, 4, 5, 32, 1e-5))
    x = torch.randn(2, 32, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(part(x), by_hand(part, x), rtol=1e-12, atol=1e-12)


def test_rows_come_first_then_columns_then_the_stride():
    part = random_part(RowsThenColumns(32, 2, (3, 4), 2, 32, 1e-5))
    x = torch.randn(1, 32, 3, 4, dtype=torch.float64)
    after = by_hand(part.column, by_hand(part.row, x).transpose(2, 3)).transpose(2, 3)
    averages = [[after[0, :, i : i + 2, j : j + 2].mean((1, 2)) for j in (0, 2)] for i in (0, 2)]
    want = torch.stack([torch.stack(line, -1) for line in averages], -2)  # an odd row stands alone
    torch.testing.assert_close(part(x)[0], want, rtol=1e-12, atol=1e-12)


def test_every_3x3_convolution_is_replaced_and_nothing_else():
    plain, axial = skeleton(variant("BiT-R50x1")), skeleton(variant("AxialResNet-50"))
    assert axial.config == configure("BiT-R50x1", attention="axial")
    for one, other in zip(plain.units(), axial.units(), strict=True):
        mine = {n: p.shape for n, p in one.named_parameters() if not n.startswith("conv2.")}
        assert mine == {n: p.shape for n, p in other.named_parameters() if not n.startswith("conv2.")}
    lengths = [unit.conv2.row.relative.shape[0] for unit in axial.units()]
    assert lengths == [2 * n - 1 for n in [56] * 3 + [56] + [28] * 3 + [28] + [14] * 5 + [14] + [7] * 2]
    # of each bottleneck of width D: 9 D^2 weights go; two projections, norms and embeddings come
    change = 0
    for unit, length in zip(axial.units(), lengths, strict=True):
        width = unit.conv2.row.qkv.in_channels
        change += 2 * (2 * width**2 + 6 * width + length * 2 * width // 8) - 9 * width**2
    assert parameters(axial) - parameters(plain) == change
    assert parameters(axial) == 19_373_512


@pytest.mark.parametrize("size", [(32, 48), (61, 47), (7, 5)])
def test_maps_are_those_of_the_convolutions_at_any_size(axial, small_resnet, size):
    model, images = axial(image_size=size), torch.randn(2, 3, *size)
    plain = small_resnet(blocks=(1, 2), width=32, image_size=size)
    assert model(images).shape == (2, 5)
    assert model.tokens(images).shape == plain.tokens(images).shape


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"heads": 5}, ("width 32", "5 heads", "heads=8")),
        ({"heads": 32}, ("32 heads",)),
        ({"heads": 0}, ("0 heads",)),
        ({"attention": "full"}, ("none", "axial", "full")),
        ({"image_size": (0, 32)}, ("0x32",)),
    ],
)
def test_impossible_choices_are_refused(axial, options, values):
    with refused("model.config", *values):
        axial(**options)


def test_another_image_size_is_refused_with_the_remedy(axial):
    model = axial()
    with refused("model.input", "32x48", "48x32"):
        model(torch.zeros(1, 3, 48, 32))
    with refused("model.input", "32x48", "64x64"):
        vitkit.adapt(model, image_size=64)
    with refused("export.unsupported", "--any-size", "AxialResNet", "(32, 48)"):
        trace(model, Form(any_size=True))
    images = torch.randn(2, 3, 32, 48)
    other = vitkit.adapt(model, classes=3, image_size=(32, 48))
    assert torch.equal(other.features(images), model.features(images)) and not other(images).any()


def test_it_comes_back_from_its_own_file_and_no_other_layout_takes_it(axial, tmp_path):
    model, images = axial(heads=4), torch.randn(2, 3, 32, 48)
    vitkit.save(model, tmp_path / "m.safetensors")
    back = vitkit.load(tmp_path / "m.safetensors")
    assert back.config == model.config and torch.equal(back(images), model(images))
    for name, format in (("a.npz", "official"), ("b.pth", "timm")):
        with pytest.raises(vitkit.WeightsError, match="does not support attention='axial'"):
            vitkit.save(model, tmp_path / name, format)
    with pytest.raises(vitkit.WeightsError, match="only ViTs"):
        vitkit.save(model, tmp_path / "hf", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_it_says_that_it_has_no_attention_between_patches(axial):
    with refused("inspection.unsupported", "AxialResNet"):
        axial().attention(torch.zeros(1, 3, 32, 48))
    with refused("inspection.unsupported", "ResNet"):
        attention_rollout(axial(), torch.zeros(1, 3, 32, 48))


def test_a_card_from_before_axial_attention_is_a_plain_resnet(small_resnet):
    from vitkit.weights.card import card_of, from_json, to_json

    model = small_resnet()
    text = to_json(card_of(model, "vitkit"))
    old = text.replace(', "attention": "none"', "").replace(', "heads": 8', "")
    assert len(old) < len(text) and from_json(old).config == model.config


@pytest.mark.slow
def test_an_exported_graph_takes_any_batch_and_agrees(axial):
    model = axial()
    program = trace(model, Form()).module()
    for batch in (1, 3):
        images = torch.randn(batch, 3, 32, 48)
        with torch.no_grad():
            torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-4)


def test_its_memory_is_counted(axial):
    config = axial().config
    need, plain = (
        training_memory(skeleton(c), 4, half=False, slots=2)
        for c in (config, replace(config, attention="none"))
    )
    assert need.activations > plain.activations > 0  # the logits of every line
    again = training_memory(skeleton(config), 4, half=True, slots=2, recompute=True)
    assert again.activations < need.activations


def test_a_few_steps_on_digits_lower_the_loss():
    source = digits()
    pixels = torch.tensor(np.stack([source.fetch(i) for i in range(48)]))
    images = F.interpolate(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1, (32, 32))
    labels = torch.tensor(source.labels[:48]).long()
    model = build("AxialResNet-50", blocks=(1, 1), width=32, image_size=32, classes=10, seed=0).train()
    started = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(14):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(10)) and losses[-1] < 0.7 * losses[0]
    assert all((p != started[name]).any() for name, p in model.named_parameters())
