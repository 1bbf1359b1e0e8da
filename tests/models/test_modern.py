"""Registers, SwiGLU, RoPE, distillation and the other choices of later ViTs."""

import math

import pytest
import torch
import torch.nn.functional as F
from refusals import refused

import vitkit
from vitkit.metrics.cost import parameters
from vitkit.models.mlp import SwiGlu, swiglu_width
from vitkit.models.positions import resize_patch, sincos2d
from vitkit.models.rope import Rope, rotate
from vitkit.models.variants import skeleton, variant
from vitkit.training.optimizer import TOP, layer_of


def rope(kind: str = "dinov3", head: int = 8, **training) -> Rope:
    module = Rope(kind, head, **training).eval()
    module.reset_parameters()
    return module


def test_dinov3_rotates_by_the_published_numbers():
    sin, cos, _ = rope()((2, 3))
    assert sin[0, :4].tolist() == pytest.approx([8.7e-8, -0.309017, 0.866025, -0.406737], abs=1e-6)
    assert cos[5, :4].tolist() == pytest.approx([-1.0, 0.951057, -0.5, 0.913545], abs=1e-6)
    assert torch.equal(sin[:, :4], sin[:, 4:])
    assert rope(head=64).periods[1] == pytest.approx(1.333521, abs=1e-6)


def test_a_rotation_keeps_lengths_and_leaves_tokens_before_the_patches_alone():
    q = torch.randn(2, 3, 2 + 6, 8)
    for kind in ("dinov3", "eva02"):
        turned = rotate(q, rope(kind)((2, 3)))
        assert torch.equal(turned[:, :, :2], q[:, :, :2])
        torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
        assert not torch.allclose(turned[:, :, 2:], q[:, :, 2:])


def test_eva02_scores_depend_on_the_offset_alone():
    """On its own 16 x 16 grid a step is a step everywhere; neighbours 2j and 2j + 1 turn together."""
    turn = rope("eva02")((16, 16))
    q, k = (rotate(torch.randn(8).expand(1, 1, 256, 8), turn)[0, 0].view(16, 16, 8) for _ in range(2))
    scores = [q[i, i + 1] @ k[i + 2, i] for i in range(10)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(10))


def test_training_moves_coordinates_within_its_ranges():
    module = rope(shift=0.1, jitter=1.2, rescale=2.0).train()
    fixed = rope().coordinates((4, 4))
    shares = torch.stack([module.coordinates((4, 4)) for _ in range(200)])
    scale = (shares[:, -1] - shares[:, 0]) / (fixed[-1] - fixed[0])  # (200, 2)
    assert 1 / 2.4 <= scale.min() < 0.6 and 1.7 < scale.max() <= 2.4
    together = rope(rescale=2.0).train()
    y, x = together.coordinates((4, 4))[0]
    assert y == x  # one number for both axes
    assert torch.equal(rope(shift=0.5).coordinates((4, 4)), fixed)  # evaluation


def test_periods_stay_float32_and_are_part_of_the_model(small):
    model = small(rope="dinov3", positions="none")
    assert "encoder.rope.periods" in model.state_dict()
    before = model.encoder.rope.periods.clone()
    half = model.bfloat16()
    assert half.encoder.rope.periods.dtype == torch.float32 and torch.equal(half.encoder.rope.periods, before)
    assert half.project.weight.dtype == torch.bfloat16


def test_rope_lets_any_size_through_and_knows_places(small):
    model = small(rope="dinov3", positions="none", registers=2)
    images = torch.randn(1, 3, 40, 24)
    assert model.tokens(images).shape == (1, 15 + 3, 32)
    turned = small(positions="none", registers=2)
    turned.load_state_dict({n: t for n, t in model.state_dict().items() if "rope" not in n})
    assert not torch.allclose(turned(images), model(images))


def test_the_last_layer_of_a_class_token_alone_gives_the_same(small):
    for options in (
        {"rope": "dinov3", "key_bias": False},
        {"registers": 3},
        {"distilled": True},
        {"qk_norm": True},
    ):
        model = small(**options)
        images = torch.randn(2, 3, 32, 32)
        whole = model.forward_head(model.pooled(model.tokens(images)))
        torch.testing.assert_close(model(images), whole, atol=1e-5, rtol=1e-5)


def test_registers_have_no_position_and_stand_after_the_class_token(small):
    model = small(registers=3)
    z = model.embed(*model.patches(torch.randn(1, 3, 32, 32)))
    assert torch.equal(z[:, 1:4], model.registers)
    assert torch.equal(z[:, :1], model.class_token + model.positions.table[:, :1])
    assert model.config.tokens == 20 and model.config.prefix == 4


def test_a_class_token_without_a_position(small):
    model = small(class_position=False)
    assert model.positions.table.shape == (1, 16, 32)
    z = model.embed(*model.patches(torch.randn(1, 3, 32, 32)))
    assert torch.equal(z[:, :1], model.class_token)
    assert vitkit.adapt(model, image_size=48).positions.table.shape == (1, 36, 32)


def test_a_distilled_model_answers_with_the_mean_of_two_heads(small):
    model = small(distilled=True)
    images = torch.randn(2, 3, 32, 32)
    z = model.tokens(images)
    expected = (model.head(z[:, 0]) + model.distillation_head(z[:, 1])) / 2
    torch.testing.assert_close(model(images), expected)
    adapted = vitkit.adapt(model, classes=3)
    assert (adapted.distillation_head.weight == 0).all() and adapted(images).shape == (2, 3)


def test_swiglu_is_gate_times_value():
    mlp, z = SwiGlu(8, 6), torch.randn(3, 8)
    gate, value = (
        F.linear(z, mlp.up.weight[:6], mlp.up.bias[:6]),
        F.linear(z, mlp.up.weight[6:], mlp.up.bias[6:]),
    )
    torch.testing.assert_close(mlp(z), mlp.down(gate * gate.sigmoid() * value))
    assert [swiglu_width(1536), swiglu_width(384, 6), swiglu_width(4096, 3, 64)] == [4096, 1536, 8192]


def test_quick_gelu_and_its_shape(small):
    mlp = small(gelu="quick").encoder.blocks[0].mlp
    z = torch.randn(2, 3, 32)
    hidden = mlp.up(z)
    torch.testing.assert_close(mlp(z), mlp.down(hidden * torch.sigmoid(1.702 * hidden)))


def test_keys_without_a_bias_ignore_it_and_give_it_no_gradient(small):
    model = small(key_bias=False)
    images = torch.randn(1, 3, 32, 32)
    before = model(images)
    bias = model.encoder.blocks[0].attention.qkv.bias
    bias.data[32:64] += 1
    assert torch.equal(model(images), before)
    model(images).sum().backward()
    assert (bias.grad[32:64] == 0).all() and (bias.grad[64:] != 0).any()


def test_norms_before_the_blocks_and_of_queries_and_keys(small):
    model = small(input_norm=True, qk_norm=True)
    z = model.embed(*model.patches(torch.randn(1, 3, 32, 32)))
    centred = (z - model.input_norm.bias) / model.input_norm.weight
    assert centred.mean(-1).abs().max() < 1e-5
    attention = model.encoder.blocks[0].attention
    q, k, _ = attention.project(z)
    plain = (k - attention.key_norm.bias) / attention.key_norm.weight
    assert plain.mean(-1).abs().max() < 1e-4 and q.shape == (1, 2, 17, 16)


def test_stochastic_depth_may_be_uniform_and_rescaled(small):
    model = small(depth=3, stochastic_depth=0.5, stochastic_depth_uniform=True, stochastic_depth_rescale=True)
    assert [block.drop_path for block in model.encoder.blocks] == [0.5, 0.5, 0.5]
    kept = model.encoder.blocks[0].train().keep(torch.ones(1000, 2, 2))
    assert set(kept.unique().tolist()) == {0.0, 2.0}


def test_mae_has_another_table_than_big_vision():
    row = sincos2d((2, 2), 16, kind="sincos2d-mae")[0, 1]
    expected = [0.8415, 0.0998, 0.01, 0.001, 0.5403, 0.995, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert row.tolist() == pytest.approx(expected, abs=1e-4)
    assert not torch.allclose(sincos2d((2, 2), 16)[0, 1], row)


def test_patches_are_resized_by_the_pseudo_inverse():
    larger = resize_patch(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 4)[0, 0]
    assert larger[0].tolist() == pytest.approx([0.025, 0.125, 0.325, 0.425], abs=1e-6)
    assert larger[3].tolist() == pytest.approx([0.825, 0.925, 1.125, 1.225], abs=1e-6)
    smaller = resize_patch(torch.arange(16.0).view(1, 1, 4, 4), 2).flatten()
    assert smaller.tolist() == pytest.approx([10, 18, 42, 50], abs=1e-4)


def test_a_model_with_larger_patches_sees_enlarged_images_as_before(small):
    model = small()
    images = torch.randn(2, 3, 32, 32)
    new = vitkit.adapt(model, patch=12, image_size=48)
    blocks = F.unfold(images, 8, stride=8).mT.reshape(-1, 3, 8, 8)
    grown = F.interpolate(blocks, size=(12, 12), mode="bilinear", align_corners=False)
    bigger = F.fold(grown.reshape(2, 16, -1).mT, (48, 48), 12, stride=12)
    torch.testing.assert_close(new(bigger), model(images), atol=1e-5, rtol=1e-4)
    with refused("model.unsupported", "patch"):
        vitkit.adapt(vitkit.build("BiT-R50x1", blocks=(1,)), patch=8)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("DINOv2-S/14", 22_056_576), ("DINOv2-reg-B/14", 86_583_552), ("DINOv2-g/14", 1_136_480_768),
        ("DINOv3-S+/16", 28_697_472), ("DINOv3-H+/16", 840_633_600), ("SigLIP-So400m/14", 427_680_704),
        ("DINOv3-7B/16", 6_716_043_264 - 2 * 4096),  # the file has a norm for local crops, too
    ],
)  # fmt: skip
def test_named_models_have_the_published_number_of_parameters(name, count):
    assert parameters(skeleton(variant(name))) == count


def test_layer_decay_knows_every_token_and_norm():
    names = (
        "registers",
        "distillation_token",
        "class_token",
        "mask_token",
        "input_norm.weight",
        "project.weight",
    )
    assert [layer_of(name) for name in names] == [0] * 6
    assert layer_of("encoder.blocks.3.attention.query_norm.weight") == 4
    assert layer_of("distillation_head.weight") == TOP and layer_of("encoder.norm.weight") == TOP


def test_registers_are_shown_apart_from_patches(small):
    from vitkit.inspection.attention import attention_rollout, class_map, head_maps, register_maps

    model = small(registers=2, rope="dinov3", head="gap")
    images = torch.rand(2, 3, 32, 24)
    assert head_maps(model, images, layer=-1).shape == (2, 2, 4, 3)
    assert attention_rollout(model, images).shape == (2, 4, 3)
    maps = register_maps(model, images, layer=0)
    assert maps.shape == (2, 2, 4, 3)
    with torch.no_grad():
        weights = next(iter(model.attention(images))).mean(1)[:, :2, 2:]
    torch.testing.assert_close(torch.from_numpy(maps).flatten(2), weights)
    assert class_map(model, images, target=1).shape == (2, 4, 3)
    with refused("inspection.unsupported", "registers"):
        register_maps(small(), images, layer=0)


def test_maps_of_a_head_on_class_token_and_patches_are_between_those_of_both(small):
    from vitkit.inspection.attention import attention_rollout, class_map

    images = torch.rand(2, 3, 32, 24)
    models = {head: small(head=head, class_token=True, registers=1) for head in ("token", "gap", "token+gap")}
    state = {n: t for n, t in models["token"].state_dict().items() if not n.startswith("head.")}
    for model in models.values():
        model.load_state_dict(state, strict=False)
    both = models["token+gap"]
    assert both.features(images).shape == (2, 64) and both.head.in_features == 64
    rollouts = {head: attention_rollout(model, images) for head, model in models.items()}
    mean = (rollouts["token"] + rollouts["gap"]) / 2
    assert abs(rollouts["token+gap"] - mean).max() < 1e-6
    with torch.no_grad():  # a head that reads the class token alone, or the patches alone
        for head, columns in (("token", slice(0, 32)), ("gap", slice(32, 64))):
            both.head.weight.zero_()[:, columns] = models[head].head.weight
            both.head.bias.copy_(models[head].head.bias)
            torch.testing.assert_close(both(images), models[head](images))
    assert class_map(both, images, target=1).shape == (2, 4, 3)


def test_every_new_parameter_learns(small):
    for options in (
        {"registers": 2, "mlp": "swiglu", "mlp_norm": True, "qk_norm": True, "input_norm": True},
        {"distilled": True, "layer_scale": True}, {"representation": 8, "representation_kind": "linear"},
    ):  # fmt: skip
        model = small(**options).train()
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), options
        assert math.isfinite(float(model.registers.grad.norm() if model.registers is not None else 0))


@pytest.mark.parametrize(("old", "new"), [(8, 12), (8, 5), (16, 14)])
def test_timm_resizes_patches_to_the_same_numbers(old, new):
    from timm.layers import resample_patch_embed

    kernel = torch.randn(6, 3, old, old)
    theirs = resample_patch_embed(kernel, [new, new], interpolation="bilinear", antialias=False)
    torch.testing.assert_close(resize_patch(kernel, new), theirs, atol=1e-4, rtol=1e-3)  # timm: float32
