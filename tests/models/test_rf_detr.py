"""RF-DETR against transformers: the encoder with windows, predictions, all training outputs and the loss."""

import pytest
import torch
from rf_detr_peer import both

from vitkit.errors import ConfigError, Error
from vitkit.models.dense.deformable import DeformableAttention, initialize_deformable
from vitkit.models.dense.rf_detr import RfDetrConfig, cell_boxes, detections, rf_detr_config, rf_detr_on
from vitkit.models.dense.rf_detr_loss import GroupSetLoss
from vitkit.models.dense.windowed_encoder import joined, split, windowed_maps
from vitkit.models.variants import fresh, published_variant, skeleton
from vitkit.models.vit import ViTConfig
from vitkit.ops.boxes import corners

LIMIT = 1e-5


def config(**options):
    vit = ViTConfig(
        width=32, depth=2, heads=2, hidden=48, patch=8, image_size=(64, 64), classes=0, layer_scale=True,
        position_resize="timm",
    )  # fmt: skip
    sizes = {"taken": (1, 2), "queries": 10, "groups": 3, "decoder_width": 32, "decoder_hidden": 48,
             "self_heads": 4, "cross_heads": 8, "bottlenecks": 1, "classes": 5}  # fmt: skip
    return RfDetrConfig(**{"vit": vit} | sizes | options)


def small(**options):
    model = fresh(config(**options), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def objects(rows=5):
    """Objects of two images among unused rows, and as transformers takes them."""
    true, classes = torch.zeros(2, rows, 4), torch.full((2, rows), -1)
    true[0, [0, 2, 3]] = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.7, 0.6, 0.3, 0.5], [0.5, 0.5, 0.1, 0.1]])
    classes[0, [0, 2, 3]] = torch.tensor([1, 3, 0])
    true[1, 1], classes[1, 1] = torch.tensor([0.4, 0.6, 0.5, 0.2]), 4
    labels = [{"class_labels": c[c >= 0], "boxes": t[c >= 0]} for t, c in zip(true, classes, strict=True)]
    return true, classes, labels


def largest(left, right):
    assert left.shape == right.shape
    return (left - right).abs().max().item()


# against transformers


@torch.no_grad()
@pytest.mark.parametrize("windows, taken", [(2, (1, 2, 4)), (4, (1, 3)), (1, (2, 4))])
def test_the_encoder_equals_that_of_transformers(tmp_path, windows, taken):
    pytest.importorskip("transformers")
    theirs, ours = both(tmp_path, windows=windows, taken=taken)
    assert (ours.config.windows, ours.config.taken) == (windows, taken)
    for side in (64, 96):
        images = torch.randn(2, 3, side, side)
        expected = theirs.model.backbone.backbone(images).feature_maps
        maps = windowed_maps(ours.vit, images, windows=windows, taken=taken)
        assert len(maps) == len(expected)
        assert max(largest(a, b) for a, b in zip(maps, expected, strict=True)) < LIMIT


@torch.no_grad()
def test_predictions_equal_those_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    theirs, ours = both(tmp_path)
    for side in (64, 96):
        images = torch.randn(2, 3, side, side)
        expected = theirs(pixel_values=images)
        memory, grid = ours.memory(images)
        starts, logits, boxes = ours.start(memory, grid, groups=1)
        assert largest(starts, expected.init_reference_points) < LIMIT
        assert largest(logits[:, 0], expected.enc_outputs_class) < LIMIT
        assert largest(boxes[:, 0], expected.enc_outputs_coord_logits) < LIMIT
        states = torch.stack(ours.decode(memory, grid, starts, groups=1))
        assert largest(states, expected.intermediate_hidden_states) < 5e-5  # of numbers up to 5
        scores, best = expected.logits.sigmoid().flatten(1).topk(10)
        chosen = expected.pred_boxes.gather(1, (best // 5)[..., None].expand(-1, -1, 4))
        rows = ours(images)
        assert largest(rows[..., :4], corners(chosen).clamp(0, 1)) < LIMIT
        assert largest(rows[..., 4], scores) < LIMIT and torch.equal(rows[..., 5].long(), best % 5)


def test_training_outputs_loss_and_gradients_equal_those_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    theirs, ours = both(tmp_path)
    theirs.train()
    ours.train()
    images, (true, classes, labels) = torch.randn(2, 3, 64, 64), objects()
    expected = theirs(pixel_values=images, labels=labels)
    outputs = ours(images, train=True)
    assert outputs["logits"].shape == (2, 2, 3, 10, 5)  # layers, images, groups, queries, classes
    assert largest(outputs["logits"][-1].flatten(1, 2), expected.logits) < LIMIT
    assert largest(outputs["boxes"][-1].flatten(1, 2), expected.pred_boxes) < LIMIT
    assert largest(outputs["proposal_logits"].flatten(1, 2), expected.enc_outputs_class) < LIMIT
    assert largest(outputs["proposal_boxes"].flatten(1, 2), expected.enc_outputs_coord_logits) < LIMIT

    losses = GroupSetLoss()(outputs, true, classes)
    assert losses["loss"].item() == pytest.approx(expected.loss.item(), rel=1e-5)
    parts = {"class_loss": "loss_ce", "distance_loss": "loss_bbox", "overlap_loss": "loss_giou"}
    for own, name in parts.items():
        assert losses[own].item() == pytest.approx(expected.loss_dict[name].item(), rel=1e-5)
    losses["loss"].backward()
    expected.loss.backward()
    pairs = {
        "classify.weight": theirs.class_embed.weight,
        "proposal_classes.2.bias": theirs.model.enc_out_class_embed[2].bias,
        "references": theirs.model.reference_point_embed.weight,
        "vit.class_token": theirs.model.backbone.backbone.embeddings.cls_token,
    }
    own = dict(ours.named_parameters())
    for name, parameter in pairs.items():
        assert parameter.grad.abs().max() > 1e-4
        assert largest(own[name].grad, parameter.grad) < 1e-5 * max(1, parameter.grad.abs().max())


# the parts


@pytest.mark.parametrize("grid, windows", [((4, 4), 2), ((4, 8), 2), ((6, 3), 3), ((2, 2), 1)])
def test_windows_are_rectangles_of_the_image(grid, windows):
    h, w = grid
    z = torch.arange(1 + h * w, dtype=torch.float32).view(1, -1, 1).expand(2, -1, 3)
    parts = split(z, grid, windows, prefix=1)
    assert parts.shape == (2 * windows**2, 1 + h * w // windows**2, 3) and (parts[:, 0] == 0).all()
    square = z[:, 1:].mT.unflatten(2, grid)
    assert torch.equal(joined(parts[:, 1:], grid, windows), square)
    first = square[0, 0, : h // windows, w - w // windows :]  # at the top right
    assert torch.equal(parts[windows - 1, 1:, 0], first.flatten())


@torch.no_grad()
def test_a_patch_is_seen_by_its_window_alone_before_a_layer_that_sees_all():
    model = small(taken=(1, 2))
    images = torch.randn(1, 3, 64, 64)
    changed = images.clone()
    changed[..., :8, :8] += 1
    before, after = (windowed_maps(model.vit, x, windows=2, taken=(1, 2)) for x in (images, changed))
    moved = [(a - b).abs().amax(1)[0] > 0 for a, b in zip(before, after, strict=True)]
    assert moved[0][:4, :4].all() and moved[0].sum() == 16  # layer 0: within windows
    assert moved[1].all()  # layer 1: all windows


@torch.no_grad()
def test_deformable_attention_reads_where_the_offsets_point():
    attention = DeformableAttention(4, heads=2, points=1)
    initialize_deformable(attention)
    for dense in (attention.value, attention.out):
        dense.weight.copy_(torch.eye(4))
        dense.bias.zero_()
    memory = torch.arange(16.0)[None, :, None].expand(1, -1, 4)  # a map of 4 x 4
    box = torch.tensor([[[0.375, 0.375, 0.5, 0.5]]])  # at the cell in row 1, column 1
    read = attention(torch.zeros(1, 1, 4), box, memory, (4, 4))[0, 0]
    # heads look right and left, by half of half the box: one cell
    assert read.tolist() == pytest.approx([6.0, 6.0, 4.0, 4.0])


@torch.no_grad()
def test_queries_of_a_group_do_not_see_other_groups():
    model, images = small().train(), torch.randn(1, 3, 64, 64)
    before = model.train_outputs(images)["logits"]
    model.queries[10:20] += 1
    moved = (model.train_outputs(images)["logits"] - before).abs().amax((0, 1, 3, 4))
    assert moved[1] > 1e-3 and moved[0] == moved[2] == 0


@torch.no_grad()
def test_a_new_model_predicts_its_proposals_and_no_class():
    outputs = fresh(config(), seed=0).train().train_outputs(torch.randn(2, 3, 64, 64))
    for boxes in outputs["boxes"]:
        assert torch.allclose(boxes, outputs["proposal_boxes"], atol=1e-6)
    for name in ("logits", "proposal_logits"):
        assert 0.001 < outputs[name].sigmoid().min() <= outputs[name].sigmoid().max() < 0.05


@torch.no_grad()
def test_maps_with_fewer_cells_than_queries_and_of_any_shape_give_as_many_rows():
    model = small(queries=20).train()
    for size in ((32, 32), (16, 48), (64, 32)):  # 16, 12 and 32 cells
        images = torch.randn(2, 3, *size)
        rows = model(images)
        assert rows.shape == (2, 20, 6) and rows.isfinite().all()
        cells = size[0] * size[1] // 64
        assert model.train_outputs(images)["proposal_logits"].shape == (2, 3, min(20, cells), 5)
        losses = GroupSetLoss()(model.train_outputs(images), *objects()[:2])
        assert losses["loss"].isfinite()


def test_cells_at_the_edge_of_a_large_map_propose_nothing():
    cells, inside = cell_boxes((2, 4), torch.device("cpu"))
    assert inside is None and cells.shape == (1, 8, 4)
    assert cells[0, 1].tolist() == pytest.approx([0.375, 0.25, 0.05, 0.05])
    _, inside = cell_boxes((60, 2), torch.device("cpu"))
    assert inside.view(60, 2).all(1).tolist() == [False, *[True] * 58, False]
    with torch.no_grad():
        model = small(queries=4)
        memory = torch.randn(1, 120, 32)
        _, logits, boxes = model.start(memory, (60, 2), groups=1)
        memory[:, [0, 1, 118, 119]] = 100.0
        again = model.start(memory, (60, 2), groups=1)
        assert torch.equal(again[1], logits) and torch.equal(again[2], boxes)


def test_detections_are_pairs_of_query_and_class_by_score():
    logits = torch.tensor([[[0.0, 3.0], [2.0, -1.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.1, 0.5, 0.4, 1.0]]])
    rows = detections(logits, boxes, most=3)[0]
    assert rows[:, 5].tolist() == [1, 0, 0]
    assert rows[:, 4].tolist() == pytest.approx(torch.tensor([3.0, 2.0, 0.0]).sigmoid().tolist())
    assert rows[0, :4].tolist() == pytest.approx([0.4, 0.3, 0.6, 0.7])
    assert rows[1, :4].tolist() == pytest.approx([0.0, 0.0, 0.3, 1.0])  # within the image


@torch.no_grad()
def test_half_precision_changes_little_and_boxes_stay_float32():
    model, images = small(), torch.randn(1, 3, 64, 64)
    whole = model.train_outputs(images)
    with torch.autocast("cpu", torch.bfloat16):
        half = model.train_outputs(images)
    assert half["boxes"].dtype == half["proposal_boxes"].dtype == torch.float32
    assert half["boxes"].isfinite().all() and half["logits"].shape == whole["logits"].shape
    assert half["logits"].shape[2] == 1  # in evaluation mode the first group alone


# the loss


@torch.no_grad()
def test_more_objects_than_queries_leave_some_without_one():
    outputs = small().train().train_outputs(torch.randn(2, 3, 64, 64))
    true, classes = torch.rand(2, 40, 4) * 0.2 + 0.3, torch.randint(0, 5, (2, 40))
    classes[1, 4:] = -1
    rows = GroupSetLoss().match([(outputs["logits"][0], outputs["boxes"][0])], true, classes)[0]
    assert (rows[0] >= 0).all() and len(set(rows[0, 0].tolist())) == 10
    assert sorted(rows[1, 2][rows[1, 2] >= 0].tolist()) == [0, 1, 2, 3]
    assert GroupSetLoss()(outputs, true, classes)["loss"].isfinite()


def test_images_without_objects_teach_that_there_is_nothing():
    outputs = small().train().train_outputs(torch.randn(2, 3, 64, 64))
    for rows in (0, 3):
        losses = GroupSetLoss()(outputs, torch.zeros(2, rows, 4), torch.full((2, rows), -1))
        assert losses["distance_loss"] == losses["overlap_loss"] == 0 < losses["class_loss"]
        assert losses["loss"].isfinite()


def test_each_object_has_one_query_of_each_group_and_layer():
    true, classes, _ = objects()
    with torch.no_grad():
        outputs = small().train().train_outputs(torch.randn(2, 3, 64, 64))
    stages = [*zip(outputs["logits"], outputs["boxes"], strict=True)]
    rows = GroupSetLoss().match(stages, true, classes)
    assert len(rows) == 2
    for row in rows:
        for group in range(3):
            assert sorted(row[0, group][row[0, group] >= 0].tolist()) == [0, 2, 3]
            assert row[1, group][row[1, group] >= 0].tolist() == [1]


def test_a_few_steps_learn_the_boxes_of_one_image():
    model = fresh(config(layers=1, groups=1), seed=0).train()
    images, (true, classes, _) = torch.randn(2, 3, 64, 64), objects()
    optimizer, loss = torch.optim.AdamW(model.parameters(), 5e-3), GroupSetLoss()
    values = []
    for _ in range(40):
        losses = loss(model(images, train=True), true, classes)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        values.append(losses["loss"].item())
    assert values[-1] < 0.7 * values[0]


# configurations


@pytest.mark.parametrize(
    "size, millions", [("nano", 30.5), ("small", 32.1), ("medium", 33.7), ("large", 33.9)]
)
def test_published_sizes_have_the_published_number_of_parameters(size, millions):
    model = skeleton(published_variant(f"RF-DETR-{size}"))
    assert model.config == rf_detr_config(size)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@torch.no_grad()
def test_a_detector_on_any_vit():
    for pixels, windows in ((64, 2), (72, 1)):
        vit = ViTConfig(width=32, depth=6, heads=2, hidden=48, patch=8, image_size=pixels, classes=0)
        own = rf_detr_on(vit, 3, queries=5, groups=2, decoder_width=32)
        assert (own.windows, own.taken, own.detections) == (windows, (1, 3, 4, 6), 5)
        assert fresh(own, seed=0).eval()(torch.randn(1, 3, pixels, pixels)).shape == (1, 5, 6)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"windows": 3}, "3x3"), ({"taken": ()}, "taken"), ({"taken": (2, 1)}, "taken"),
        ({"taken": (1, 3)}, "taken"), ({"cross_heads": 5}, "cross_heads"), ({"queries": 0}, "queries"),
        ({"vit": ViTConfig(classes=3)}, "classes"), ({"vit": ViTConfig(classes=0, rope="dinov3")}, "rope"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_built_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        config(**options)
    with pytest.raises(ConfigError, match="nano"):
        rf_detr_config("tiny")


def test_images_that_windows_do_not_divide_are_refused():
    with pytest.raises(Error) as caught:
        small()(torch.randn(1, 3, 72, 64))
    assert caught.value.code == "model.input" and "16" in str(caught.value)


@pytest.mark.slow
@torch.no_grad()
def test_the_exported_model_gives_the_same_rows(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from vitkit.ops.fused import exporting

    model = small()
    with exporting():
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(model, (torch.zeros(2, 3, 64, 64),), dynamic_shapes=shapes, strict=True)
        torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "m.onnx")
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    for batch in (1, 3):
        images = torch.randn(batch, 3, 64, 64)
        rows = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
        assert largest(torch.from_numpy(rows), model(images)) < 1e-4
