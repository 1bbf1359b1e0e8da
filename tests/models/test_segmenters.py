"""The linear segmenter: maps of every kind of ViT, sizes that patches do not divide, windows, upsampling."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.errors import Error
from vitkit.models.dense.feature_map import (
    BatchNorm,
    ChannelNorm,
    ScaleBlock,
    axis_matrix,
    dense_encoder,
    in_windows,
    initialize_layers,
    patch_map,
    resized_maps,
    upsample,
)
from vitkit.models.dense.linear_segmenter import LinearSegmenterConfig
from vitkit.models.dense.windows import window_starts, windowed
from vitkit.models.variants import fresh, variant
from vitkit.models.vit import ViT, ViTConfig

VIT = {"width": 16, "depth": 2, "heads": 2, "hidden": 32, "patch": 8, "image_size": (32, 48), "classes": 0}
KINDS = {
    "class token": {},
    "registers": {"registers": 3, "class_position": False, "layer_scale": True},
    "rope": {"positions": "none", "rope": "dinov3", "registers": 2},
    "mean": {"head": "gap"},
    "norm after the mean": {"head": "gap", "final_norm": "pooled"},
    "token and mean": {"head": "token+gap"},
    "distilled": {"distilled": True},
    "positions in every layer": {"injection": "every"},
    "swiglu": {"mlp": "swiglu"},
}


def segmenter(vit=None, **options):
    config = LinearSegmenterConfig(vit=ViTConfig(**(VIT | (vit or {}))), classes=5, **options)
    return fresh(config, seed=1).eval()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_features_are_the_normalised_patch_tokens(options):
    model = segmenter(options)
    images = torch.randn(2, 3, 32, 48)
    tokens = model.vit.tokens(images)[:, -24:]
    if model.vit.pool_norm is not None:
        tokens = model.vit.pool_norm(tokens)
    expected = tokens.mT.reshape(2, 16, 4, 6)
    assert torch.equal(patch_map(model.vit, images), expected)
    assert tokens.mean(-1).abs().max() < 1e-5, "normalised"
    assert model(images).shape == (2, 5, 16, 24)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_parameter_learns(options):
    model = segmenter(options, upscale=1).train()
    torch.nn.init.normal_(model.classifier.weight)
    for token in (model.vit.class_token, model.vit.distillation_token):
        if token is not None:
            torch.nn.init.normal_(token)
    model(torch.randn(2, 3, 32, 48)).square().sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert not still


def test_what_only_a_classifier_reads_is_left_out():
    for name in ("SigLIP-B/16", "CLIP-B/16", "DINOv2-reg-S/14"):
        config = dense_encoder(variant(name), "segment")
        with torch.device("meta"):
            model = LinearSegmenterConfig(vit=config, classes=3).build()
        parts = {key.split(".")[1] for key in model.state_dict() if key.startswith("vit.")}
        assert not parts & {"pool", "representation", "text", "head", "mask_token"}, name
    with pytest.raises(Error) as error:
        dense_encoder(variant("BiT-R50x1"), "segment")
    assert error.value.code == "model.unsupported"


def test_upscaling_blocks_are_those_of_pytorch():
    block = ScaleBlock(6)
    initialize_layers(block, torch.Generator().manual_seed(3))
    maps = torch.randn(2, 6, 3, 4)
    fine = F.gelu(block.up(maps))
    fine = block.mix(fine).permute(0, 2, 3, 1)
    expected = F.layer_norm(fine, (6,), eps=1e-6).permute(0, 3, 1, 2)
    assert torch.allclose(block(maps), expected, atol=1e-5)
    assert block(maps).shape == (2, 6, 6, 8)


def test_batch_norm_is_that_of_pytorch():
    own, theirs = BatchNorm(4), torch.nn.BatchNorm2d(4)
    initialize_layers(own)
    maps = torch.randn(3, 4, 5, 6)
    for _ in range(3):
        assert torch.allclose(own(maps), theirs(maps), atol=1e-6)
    assert torch.allclose(own.variance, theirs.running_var)
    assert torch.allclose(own.eval()(maps), theirs.eval()(maps), atol=1e-6)
    assert all(value.is_floating_point() for value in own.state_dict().values())


def test_channel_norm_normalises_each_place():
    norm = ChannelNorm(8)
    initialize_layers(norm)
    maps = norm(3 + 5 * torch.randn(2, 8, 3, 3))
    assert maps.mean(1).abs().max() < 1e-5
    assert (maps.var(1, unbiased=False) - 1).abs().max() < 1e-3


def test_other_sizes_are_padded_with_zeros_at_the_right_and_bottom():
    model = segmenter()  # cells of 2 pixels
    images = torch.randn(2, 3, 29, 43)
    logits = model(images)
    assert logits.shape == (2, 5, 15, 22)
    assert torch.equal(logits, model(F.pad(images, (0, 5, 0, 3)))[..., :15, :22])


def test_fourteen_pixel_patches_have_cells_of_three_and_a_half():
    model = segmenter({"patch": 14, "image_size": (56, 56)})
    assert model.config.cell == 3.5
    logits = model(torch.randn(1, 3, 50, 57))
    assert logits.shape[-2:] == (15, 17)
    assert upsample(logits, (50, 57), 3.5).shape[-2:] == (50, 57)


@pytest.mark.parametrize("size,cell", [((24, 36), 4.0), ((21, 35), 4.0), ((20, 17), 3.5), ((5, 5), 1.0)])
def test_both_ways_to_upsample_are_the_interpolation_of_pytorch(size, cell):
    maps = torch.randn(2, 3, *(-(-int(side) // 1) for side in (size[0] / cell + 0.99, size[1] / cell + 0.99)))
    grid = tuple(int(cell * side) for side in maps.shape[-2:])
    expected = F.interpolate(maps.double(), scale_factor=cell, mode="bilinear", recompute_scale_factor=False)
    expected = expected[..., : size[0], : size[1]].float()
    rows, columns = (
        axis_matrix(n, length, cell, maps.device) for n, length in zip(maps.shape[-2:], size, strict=True)
    )
    assert grid[0] >= size[0]
    assert torch.allclose(upsample(maps, size, cell), expected, atol=1e-5)
    assert torch.allclose(rows @ maps @ columns.mT, expected, atol=1e-5)


def test_maps_at_the_original_pixels_leave_the_padding_out():
    maps = torch.randn(3, 8, 8)  # cells of 4 pixels of a view of 32 x 32, of which 20 x 32 are image
    expected = F.interpolate(maps[None, :, :5], (50, 80), mode="bilinear")[0]
    assert torch.allclose(resized_maps(maps[:, :5], (20, 32), (50, 80), 4.0), expected, atol=1e-5)
    part = resized_maps(maps[:, :5], (20, 32), (50, 80), 4.0, slice(10, 13))
    assert torch.allclose(part, expected[:, 10:13], atol=1e-5)


def test_windows_begin_where_mmsegmentation_has_them():
    assert window_starts(1024, 512, 341) == [0, 341, 512]
    assert window_starts(683, 512, 341) == [0, 171]
    assert window_starts(512, 512, 341) == [0]
    assert window_starts(100, 512, 341) == [0]


def test_overlapping_windows_are_averaged_exactly():
    images = torch.randn(2, 1, 10, 7)
    calls = []

    def forward(part):
        calls.append(part.shape[-2:])
        return part * 2 + len(calls)  # another constant in each window

    out = windowed(forward, images, (4, 4), (3, 3))
    assert calls == [(4, 4)] * 6  # rows 0, 3, 6 and columns 0, 3
    total, count = torch.zeros(10, 7), torch.zeros(10, 7)
    for number, (y, x) in enumerate(((y, x) for y in (0, 3, 6) for x in (0, 3)), start=1):
        total[y : y + 4, x : x + 4] += number
        count[y : y + 4, x : x + 4] += 1
    assert torch.allclose(out, 2 * images + total / count, atol=1e-6)


def test_a_window_of_the_configuration_splits_larger_images_only():
    model = segmenter(window=32)
    whole = segmenter()
    small, large = torch.randn(1, 3, 32, 32), torch.randn(1, 3, 40, 64)
    assert torch.equal(model(small), whole(small))
    assert not torch.allclose(model(large), whole(large))
    assert torch.equal(model(large)[..., :4, :8], whole(large[..., :32, :32])[..., :4, :8]), (
        "one window alone"
    )
    assert in_windows(lambda images: images, small, model.config) is small
    with pytest.raises(Error) as error:
        segmenter(window=30)
    assert error.value.code == "model.config"


@pytest.mark.parametrize("options", [{"norm": "group"}, {"upscale": 9}, {"dropout": 1.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(Error) as error:
        segmenter(**options)
    assert error.value.code == "model.config"


def test_the_same_seed_gives_the_same_model():
    one, two = segmenter(norm="batch"), segmenter(norm="batch")
    assert all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )
    assert isinstance(one.vit, ViT) and one.classifier.weight.std() < 0.02
