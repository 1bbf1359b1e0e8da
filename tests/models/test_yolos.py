"""YOLOS: detection tokens beside any ViT, positions at other sizes, and its outputs."""

import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.models.dense.yolos import YolosConfig
from vitkit.models.positions import resize_positions
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig

VIT = {"width": 32, "depth": 3, "heads": 2, "hidden": 48, "patch": 8, "image_size": (32, 48), "classes": 0}


def yolos(middle=(0, 0), **options):
    config = YolosConfig(vit=ViTConfig(**(VIT | options)), classes=3, detections=7, middle_size=middle)
    model = fresh(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 48), (40, 32)])
@pytest.mark.parametrize("middle", [(0, 0), (32, 48), (16, 40)])
def test_tokens_are_those_of_the_paper_in_any_order(middle, size):
    """Tokens after the patches and every layer in full, as the original code has them."""
    model, images = yolos(middle), torch.randn(2, 3, *size)
    vit, grid, count = model.vit, (size[0] // 8, size[1] // 8), 7
    z = vit.embed(vit.patches(images)[0], grid)
    tokens = (model.detection_tokens + model.detection_positions).expand(2, -1, -1)
    z = torch.cat([z, tokens], dim=1)
    for layer, block in enumerate(vit.encoder.blocks):
        z = block(z)
        if model.middle_positions is not None and layer < 2:
            table = model.middle_positions[layer][None]
            old = model.config.middle_grid
            of_others = resize_positions(table[:, :-count], old, grid, vit.config.position_resize)
            z = z + torch.cat([of_others, table[:, -count:]], dim=1)
    expected = vit.encoder.norm(z)[:, -count:]
    torch.testing.assert_close(model.detected(images), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"rope": "dinov3", "positions": "none"}, {"registers": 2}, {"class_token": False, "head": "gap"},
     {"mlp": "swiglu"}, {"distilled": True}, {"positions": "sincos2d"}],
    ids=str,
)  # fmt: skip
def test_any_vit_can_have_detection_tokens(options):
    model, images = yolos(**options), torch.randn(2, 3, 32, 48)
    rows = model(images)
    assert rows.shape == (2, 7, 6) and (rows[..., 4].diff(dim=1) <= 0).all()
    torch.testing.assert_close(model(images[:1]), rows[:1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_are_boxes_with_the_best_class_that_is_an_object():
    model, images = yolos(), torch.randn(1, 3, 32, 48)
    out, rows = model.train_outputs(images), model(images)[0]
    chances = out["logits"].softmax(-1)[0]
    assert chances.shape == (7, 4)
    best = chances[:, :3].max(-1)
    order = best.values.argsort(descending=True)
    torch.testing.assert_close(rows[:, 4], best.values[order])
    assert rows[:, 5].tolist() == best.indices[order].tolist()
    x, y, w, h = out["boxes"][0, order].unbind(-1)
    expected = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1).clamp(0, 1)
    torch.testing.assert_close(rows[:, :4], expected)
    assert torch.equal(model(images, train=True)["boxes"], out["boxes"])


def test_middle_positions_learn_at_every_size():
    model = yolos((32, 48)).train()
    model.train_outputs(torch.randn(1, 3, 40, 24))["boxes"].sum().backward()
    assert model.middle_positions.grad.abs().sum((1, 2)).gt(0).all()


@pytest.mark.parametrize(
    "options, vit",
    [({"classes": 0}, {}), ({"detections": 0}, {}), ({}, {"classes": 5}), ({}, {"injection": "shared"}),
     ({}, {"positions": "relative"}), ({"middle_size": (32, 48)}, {"registers": 1}),
     ({"middle_size": (32, 48)}, {"depth": 1}), ({}, {"head": "gap", "final_norm": "pooled"})],
    ids=str,
)  # fmt: skip
def test_configurations_that_cannot_be_built_are_refused(options, vit):
    with pytest.raises(ConfigError):
        YolosConfig(**({"vit": ViTConfig(**(VIT | vit)), "classes": 2} | options))
