"""FCOS on a simple feature pyramid: shapes for any patch and size, padding, and the boxes that stay."""

import numpy as np
import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.models.dense.pyramid_detector import FcosConfig, boxes_at, fcos_config, locations
from vitkit.models.initialization import initialize_vit
from vitkit.models.vit import ViTConfig
from vitkit.ops.fused import exporting


def detector(patch=8, size=(64, 64), classes=2, **options):
    vit = ViTConfig(width=48, depth=2, heads=3, hidden=96, patch=patch, image_size=size, classes=0)
    model = fcos_config(vit, classes, **({"head_width": 32, "head_depth": 1} | options)).build()
    generator = torch.Generator().manual_seed(0)
    initialize_vit(model.vit, generator)
    model.initialize_head(generator)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "patch, size, strides",
    [(16, (96, 130), (8, 16, 32, 64)), (14, (70, 100), (7, 14, 28, 56)), (8, (64, 64), (8, 16, 32, 64)),
     (32, (100, 96), (8, 16, 32, 64)), (4, (32, 40), (4, 8, 16, 32))],
)  # fmt: skip
def test_levels_cover_the_image_for_any_patch(patch, size, strides):
    model = detector(patch, size)
    images = torch.randn(2, 3, *size)
    out, result = model.train_outputs(images), model(images)
    assert model.config.strides == strides
    cells = [-(-side // patch) * patch for side in size]  # padded to whole patches
    expected = [np.prod([-(-cell // stride) for cell in cells]) for stride in strides]
    counts = [(out["strides"] == stride).sum().item() for stride in strides]
    assert counts == expected and out["logits"].shape == (2, sum(expected), 2)
    assert out["distances"].shape == (2, sum(expected), 4) and (out["distances"] > 0).all()
    for axis, pixels in ((1, size[0]), (0, size[1])):  # x comes before y
        of_first = out["locations"][: counts[0], axis]
        assert of_first.min() == strides[0] / 2 and pixels - strides[0] < of_first.max() < pixels + patch
    assert result.shape == (2, model.config.detections, 6)
    assert (result[..., 4].diff(dim=1) <= 0).all()
    assert result[..., :4].min() >= 0 and result[..., :4].max() <= 1
    assert set(result[..., 5].unique().tolist()) <= {0.0, 1.0}


@torch.no_grad()
def test_images_are_padded_at_the_right_and_bottom():
    model = detector(16, (64, 64))
    images = torch.randn(1, 3, 50, 61)
    padded = torch.nn.functional.pad(images, (0, 3, 0, 14))
    scale = torch.tensor([61 / 64, 50 / 64])
    alone, whole = model.train_outputs(images), model.train_outputs(padded)
    for name in alone:
        torch.testing.assert_close(alone[name], whole[name])
    best, again = model(images)[0, 0], model(padded)[0, 0]
    torch.testing.assert_close(best[4:], again[4:])
    torch.testing.assert_close(best[:2] * scale, again[:2])  # shares of the images that were given


@torch.no_grad()
def test_few_locations_leave_rows_with_score_0():
    model = detector(16, (16, 16), classes=1)
    rows = model(torch.randn(1, 3, 16, 16))[0]
    assert rows.shape == (100, 6) and (rows[:, 4] > 0).sum() < 10 and not rows[-1].any()


def test_a_location_is_the_middle_of_its_cell():
    places = locations(2, 3, 8, torch.device("cpu"))
    assert places.tolist() == [[4, 4], [12, 4], [20, 4], [4, 12], [12, 12], [20, 12]]
    boxes = boxes_at(places, torch.full((6,), 8.0), torch.tensor([[0.5, 0.25, 1.0, 2.0]]).expand(1, 6, 4))
    assert boxes[0, 5].tolist() == [16, 10, 28, 28]


@pytest.mark.parametrize(
    "options",
    [{"doublings": 4}, {"doublings": -1}, {"levels": 0}, {"classes": 0}, {"vit": ViTConfig(classes=3)}],
)
def test_configurations_that_cannot_be_built_are_refused(options):
    with pytest.raises(ConfigError):
        FcosConfig(**({"vit": ViTConfig(classes=0), "classes": 2} | options))


@pytest.mark.slow
def test_an_exported_graph_detects_the_same_in_batches_of_any_size():
    model = detector(8, (64, 72), detections=5).requires_grad_(False)
    with exporting(), torch.no_grad():
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(model, (torch.randn(2, 3, 64, 72),), dynamic_shapes=shapes, strict=True)
    for count in (1, 3):
        images = torch.randn(count, 3, 64, 72)
        torch.testing.assert_close(program.module()(images), model(images), atol=1e-5, rtol=1e-5)
