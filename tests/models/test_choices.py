"""Choices, resolutions, masks, dropout and starting values: what a user may rely on, and what is refused."""

import math

import pytest
import torch
from refusals import refused
from torch import nn

from vitkit.models.encoder import Block
from vitkit.models.variants import build, fresh, variant
from vitkit.models.vit import ViTConfig


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"heads": 5}, ("5 heads",)),
        ({"head": "cls"}, ("token, gap, map", "cls")),
        ({"positions": "rope"}, ("none, 1d, 2d, relative, sincos2d, sincos2d-mae", "rope")),
        ({"class_token": False}, ("class_token=False", "head='gap' or 'map'")),
        ({"positions": "none", "injection": "every"}, ("none", "injection='stem'")),
        ({"positions": "relative", "injection": "shared"}, ("relative", "injection='stem'")),
        ({"positions": "sincos2d", "injection": "every"}, ("sincos2d", "injection='shared'")),
        ({"positions": "sincos2d", "width": 30, "heads": 2}, ("divisible by 4", 30)),
        ({"positions": "2d", "width": 33, "heads": 3}, ("2d", 33)),
        ({"attention": "axial"}, ("axial", "head='gap' or 'map'")),
        ({"final_norm": "pooled"}, ("final_norm='pooled'", "head='gap'")),
        ({"dropout": 1.0}, ("dropout", "[0, 1)", 1.0)),
        ({"depth": -1}, ("depth", -1)),
        ({"width": 0}, ("width", "at least 1")),
        ({"patch": (16, 8)}, ("patch", "(16, 8)")),
        ({"patch": [16, 8]}, ("patch", "[16, 8]")),
        ({"patch": "16x8"}, ("patch", "16x8")),
        ({"patch": 16.0}, ("patch", 16.0)),
        ({"depth": 2.5}, ("depth", 2.5)),
        ({"registers": -1}, ("registers", -1)),
        ({"registers": 2, "injection": "shared"}, ("registers", "injection='stem'")),
        ({"registers": 2, "positions": "relative"}, ("relative", "registers=0")),
        ({"class_position": False, "injection": "every"}, ("class_position=False", "injection='stem'")),
        ({"registers": 2, "attention": "axial", "head": "gap"}, ("axial", "registers=0")),
        ({"rope": "xpos"}, ("none, dinov3, eva02", "xpos")),
        ({"rope": "dinov3", "width": 36, "heads": 6}, ("divisible by 4", 6)),
        ({"rope": "eva02", "positions": "relative"}, ("relative", "positions='none'")),
        ({"rope": "dinov3", "attention": "axial", "head": "gap"}, ("RoPE", "rope='none'")),
        ({"rope_rescale": 0.5}, ("rope_rescale", 0.5)),
        ({"rope_shift": float("nan")}, ("rope_shift", "nan")),
        ({"rope_shift": 0.1}, ("rope_shift=0.1", "rope='dinov3'", "rope_shift=0")),
        ({"rope_jitter": 1.5}, ("rope_jitter=1.5", "rope='dinov3'", "rope_jitter=1")),
        ({"rope_rescale": 2.0}, ("rope_rescale=2.0", "rope='dinov3'", "rope_rescale=1")),
        ({"mlp": "glu"}, ("gelu, swiglu", "glu")),
        ({"mlp_norm": True}, ("mlp_norm", "mlp='swiglu'")),
        ({"gelu": "relu"}, ("tanh, erf, quick", "relu")),
        ({"key_bias": False, "qkv_bias": False}, ("key_bias=False", "qkv_bias=True")),
        ({"distilled": True, "head": "gap"}, ("distilled", "head='token'")),
        ({"representation_kind": "linear"}, ("linear", "representation")),
    ],
)
def test_impossible_choices_are_refused_with_the_remedy(small, options, values):
    with refused("model.config", *values):
        small(**options)


@pytest.mark.parametrize(("size", "side"), [(7, "height 7"), ((32, 3), "width 3")])
def test_a_configured_size_below_one_patch_is_refused_with_the_nearest_that_fits(small, size, side):
    with refused("model.input", side, "8 pixels", "fits: 8"):
        small(image_size=size)


@pytest.mark.parametrize("size", [(32, 32), (40, 24), (8, 64), (8, 8), (128, 8)])
@pytest.mark.parametrize("positions", ["none", "1d", "2d", "sincos2d"])
@pytest.mark.parametrize("head", ["token", "gap", "map"])
def test_any_size_that_fits_the_patches_is_taken(small, size, positions, head):
    model = small(positions=positions, head=head)
    images = torch.randn(2, 3, *size)
    n = size[0] * size[1] // 64
    assert model(images).shape == (2, 5)
    assert model.features(images).shape == (2, 32)
    assert model.tokens(images).shape == (2, n + (head == "token"), 32)
    assert next(iter(model.attention(images))).shape[-1] == n + (head == "token")


def test_another_size_in_forward_equals_an_adapted_model(small):
    import vitkit

    model = small()
    images = torch.randn(2, 3, 48, 24)
    assert torch.equal(model(images), vitkit.adapt(model, image_size=(48, 24))(images))


def test_an_image_smaller_than_a_patch_is_refused(small):
    with refused("model.input", "height 7", "8 pixels", "fits: 8"):
        small()(torch.zeros(1, 3, 7, 32))


def test_hybrids_take_any_size_of_a_stride_or_more(small_hybrid):
    model = small_hybrid()
    assert model.config.stride == 8
    assert model(torch.randn(1, 3, 40, 72)).shape == (1, 5)
    with refused("model.input", "width 7", "fits: 8"):
        model(torch.zeros(1, 3, 64, 7))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 4, 32, 32), (1, 32, 32, 3)])
def test_images_of_another_shape_are_refused(small, small_resnet, shape):
    for model in (small(), small_resnet()):
        with refused("model.input", "(B, 3, H, W)", shape):
            model(torch.zeros(shape))


def test_relative_positions_refuse_another_grid(small):
    with refused("model.input", "(4, 4)", "(5, 4)", "(32, 32)"):
        small(positions="relative")(torch.zeros(1, 3, 40, 32))


def test_a_masked_patch_is_replaced_and_its_pixels_do_not_matter(small):
    model = small(mask_token=True)
    images = torch.randn(1, 3, 32, 32)
    changed = images.clone()
    changed[:, :, 8:16, 16:24] = 0  # patch (1, 2): number 6
    mask = torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 6] = True
    assert torch.equal(model(images, mask), model(changed, mask))
    assert not torch.equal(model(images), model(changed))
    assert not torch.equal(model(images, mask), model(images))


def test_masks_that_do_not_fit_are_refused(small):
    images = torch.zeros(1, 3, 32, 32)
    with refused("model.unsupported", "mask_token=True"):
        small()(images, torch.zeros(1, 16, dtype=torch.bool))
    with refused("model.input", "(1, 16)", "(1, 17)"):
        small(mask_token=True)(images, torch.zeros(1, 17, dtype=torch.bool))


def test_a_resnet_says_that_it_has_no_attention(small_resnet):
    with refused("inspection.unsupported", "ResNet"):
        small_resnet().attention(torch.zeros(1, 3, 64, 64))


def test_dropout_stands_after_every_dense_layer_but_qkv_and_after_the_positions(small):
    """With dropout almost 1 each dropped place gives zeros, so what is left tells where it stands."""
    model = small(dropout=0.999999, depth=1).train()
    images = torch.randn(1, 3, 32, 32)
    block = model.encoder.blocks[0]
    z0 = model.embed(*model.patches(images))
    assert (z0 == 0).all()  # after adding positions
    z = torch.randn(1, 17, 32)
    hidden = []
    block.mlp.down.register_forward_pre_hook(lambda _, given: hidden.append(given[0]))
    assert (block.mlp(z) == 0).all()  # after the MLP's last layer
    assert (hidden[0] == 0).all() and (block.mlp.up(z) != 0).any()  # and after its first
    assert (block(z) == z).all()  # after the attention's output and after the MLP
    assert all((part != 0).all() for part in block.attention.project(z))  # not after q, k, v


def test_dropout_is_off_outside_training(small):
    model = small(dropout=0.5, stochastic_depth=0.5)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), model(images))


def test_stochastic_depth_grows_linearly_and_drops_whole_branches_by_example(small):
    model = small(depth=5, stochastic_depth=0.4)
    rates = [block.drop_path for block in model.encoder.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    block = model.encoder.blocks[-1].train()
    branch = block.keep(torch.ones(4000, 3, 2))
    dropped = (branch == 0).flatten(1)
    assert (dropped.all(1) | ~dropped.any(1)).all()
    assert dropped.all(1).float().mean() == pytest.approx(0.4, abs=0.03)
    assert branch.max() == 1  # as published: no rescaling


def test_axial_blocks_drop_whole_examples_too(small):
    model = small(attention="axial", head="gap", stochastic_depth=0.5, depth=2).train()
    row: Block = model.encoder.blocks[-1].row
    branch = row.keep(torch.ones(64, 4, 4, 32)).flatten(1)
    assert ((branch == 0).all(1) | (branch == 1).all(1)).all()


@torch.no_grad()
def test_fresh_models_start_as_published():
    model = fresh(ViTConfig(width=256, depth=2, heads=4, hidden=1024, representation=256), seed=0)
    model.requires_grad_(False)
    attention, mlp = model.encoder.blocks[0].attention, model.encoder.blocks[0].mlp
    bound = math.sqrt(6 / (256 + 256))  # Xavier on each of q, k, v alone
    for kernel in (*attention.qkv.weight.chunk(3), attention.out.weight):
        assert kernel.abs().max() <= bound and kernel.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    bound = math.sqrt(6 / (256 + 1024))
    for kernel in (mlp.up.weight, mlp.down.weight):
        assert kernel.abs().max() <= bound and kernel.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert mlp.up.bias.std() == pytest.approx(1e-6, rel=0.1) and (attention.qkv.bias == 0).all()
    lecun = math.sqrt(1 / (16 * 16 * 3))
    assert model.project.weight.std() == pytest.approx(lecun, rel=0.02)
    assert model.project.weight.abs().max() <= 2 * lecun / 0.8796
    assert model.representation.weight.std() == pytest.approx(1 / 16, rel=0.03)
    assert model.positions.table.std() == pytest.approx(0.02, rel=0.03)
    for zero in (model.class_token, model.head.weight, model.head.bias, model.project.bias):
        assert (zero == 0).all()
    assert (model.encoder.norm.weight == 1).all() and (model.encoder.norm.bias == 0).all()


def test_the_norm_that_closes_a_stem_unit_starts_at_zero():
    model = build("R26+ViT-S/32", depth=1)
    unit = model.stem.stages[1][1]
    assert (unit.closing_norm.weight == 0).all() and (unit.norm2.weight == 1).all()
    x = torch.rand(1, 512, 4, 4)
    assert torch.equal(unit(x), x)


def test_layers_differ_at_the_start():
    blocks = build("ViT-Ti/16", depth=3, seed=0).encoder.blocks
    for name, parameter in blocks[0].named_parameters():
        if parameter.ndim == 2:
            assert not torch.equal(parameter, blocks[1].get_parameter(name))


def test_every_parameter_is_initialised_and_learns(small, small_hybrid, small_resnet):
    for model in (small(head="map", mask_token=True), small_hybrid(), small_resnet()):
        model.train()
        images = torch.randn(2, 3, *model.config.image_size)
        mask = torch.rand(2, 16) < 0.5
        out = model(images, mask) if getattr(model, "mask_token", None) is not None else model(images)
        out.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_modules_hold_no_device_and_no_buffer(small):
    model = small(positions="sincos2d")
    assert not list(model.buffers())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_a_config_is_a_frozen_value():
    config = variant("ViT-B/16")
    assert config == variant("ViT-B/16") and hash(config) == hash(variant("ViT-B/16"))
    with pytest.raises(AttributeError):
        config.width = 3
