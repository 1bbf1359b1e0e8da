"""YOLOS in the names of transformers and in its own: outputs, round trips, and what a file does not say."""

import json

import importable_peers  # noqa: F401
import pytest
import safetensors.torch
import torch

import vitkit
from vitkit.errors import WeightsError
from vitkit.models.dense.yolos import YolosConfig
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig

LIMIT = 1e-5
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
MIDDLE = "vit.encoder.mid_position_embeddings"


def peer_of(tmp_path, *, middle, size=(32, 48), labels=5):
    """transformers' model with random numbers everywhere, and the folder that it saves."""
    transformers = pytest.importorskip("transformers")
    config = transformers.YolosConfig(
        **SIZES, image_size=list(size), patch_size=8, num_detection_tokens=7,
        use_mid_position_embeddings=middle, num_labels=labels,
    )  # fmt: skip
    peer = transformers.YolosForObjectDetection(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    peer.save_pretrained(tmp_path / "peer")
    return peer, tmp_path / "peer"


def yolos(middle=(32, 48), size=(32, 48), **options):
    vit = ViTConfig(
        width=32, depth=3, heads=2, hidden=48, patch=8, image_size=size, classes=0, position_resize="hf",
        gelu="erf", norm_eps=1e-12,
    )  # fmt: skip
    model = fresh(YolosConfig(vit=vit, classes=5, detections=7, middle_size=middle, **options), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.task, model.labels = "detect", tuple("abcde")
    return model.eval()


def same(model, other, size=(32, 48)):
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        mine, its = model.train_outputs(images), other.train_outputs(images)
    return all(torch.equal(mine[name], its[name]) for name in mine)


@torch.no_grad()
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("size", [(32, 48), (48, 40), (27, 70)])
def test_outputs_equal_those_of_transformers(tmp_path, middle, size):
    """At the size of the positions, and at others, also with pixels outside whole patches."""
    peer, folder = peer_of(tmp_path, middle=middle)
    model = vitkit.load(folder)
    assert model.task == "detect" and model.config.detections == 7 and model.config.classes == 5
    assert model.config.middle_size == ((32, 48) if middle else (0, 0))
    assert model.config.vit.norm_eps == 1e-12 and model.preprocessing.resize == "fit"
    images = torch.randn(2, 3, *size)
    mine, its = model.train_outputs(images), peer(images)
    torch.testing.assert_close(mine["logits"], its.logits, atol=LIMIT, rtol=LIMIT)
    torch.testing.assert_close(mine["boxes"], its.pred_boxes, atol=LIMIT, rtol=LIMIT)
    scores, labels = its.logits.softmax(-1)[..., :-1].max(-1)
    rows, order = model(images), scores.argsort(descending=True)
    torch.testing.assert_close(rows[..., 4], scores.gather(1, order), atol=LIMIT, rtol=LIMIT)
    assert rows[..., 5].tolist() == labels.gather(1, order).tolist()


def test_the_loss_is_that_of_transformers(tmp_path):
    pytest.importorskip("scipy")
    from transformers.loss.loss_for_object_detection import HungarianMatcher

    from vitkit.models.dense.set_loss import SetLoss

    peer, folder = peer_of(tmp_path, middle=False)
    model = vitkit.load(folder)
    images, boxes = torch.randn(2, 3, 32, 48), torch.rand(2, 3, 4) * 0.4 + 0.1
    classes = torch.tensor([[0, 4, 2], [3, -1, -1]])
    out = model.train_outputs(images)
    losses = SetLoss()(out, boxes, classes)
    targets = [{"class_labels": c[c >= 0], "boxes": b[c >= 0]} for b, c in zip(boxes, classes, strict=True)]
    pairs = HungarianMatcher(class_cost=1, bbox_cost=5, giou_cost=2)(
        {"logits": out["logits"], "pred_boxes": out["boxes"]}, targets
    )
    rows = SetLoss().match(out, boxes, classes)
    for image, (predictions, objects) in enumerate(pairs):
        assert rows[image, predictions].tolist() == objects.tolist()
        assert (rows[image] >= 0).sum() == len(objects)
    expected = peer(images, labels=targets)
    assert losses["loss"].item() == pytest.approx(expected.loss.item(), rel=1e-4)
    assert losses["distance_loss"].item() == pytest.approx(expected.loss_dict["loss_bbox"].item(), rel=1e-4)


@pytest.mark.parametrize("middle", [(0, 0), (32, 48)])
def test_transformers_computes_what_we_write(tmp_path, middle):
    transformers = pytest.importorskip("transformers")
    model = yolos(middle)
    assert vitkit.save(model, tmp_path / "folder") == ()
    peer, info = transformers.YolosForObjectDetection.from_pretrained(
        tmp_path / "folder", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    images = torch.randn(1, 3, 40, 48)
    with torch.no_grad():
        mine, its = model.train_outputs(images), peer.eval()(images)
    torch.testing.assert_close(mine["logits"], its.logits, atol=LIMIT, rtol=LIMIT)
    torch.testing.assert_close(mine["boxes"], its.pred_boxes, atol=LIMIT, rtol=LIMIT)
    assert peer.config.id2label[3] == "d"


@pytest.mark.parametrize("middle", [(0, 0), (32, 48), (16, 32)])
@pytest.mark.parametrize("format", ["vitkit", "yolos", "hf"])
def test_every_format_gives_the_same_model_back(tmp_path, format, middle):
    model = yolos(middle)
    path = tmp_path / ("folder" if format == "hf" else "m.safetensors")
    if format == "hf" and middle == (16, 32):  # the others are at 32 x 48
        with pytest.raises(WeightsError) as error:
            vitkit.save(model, path, format)
        assert error.value.code == "weights.unsupported"
        return
    vitkit.save(model, path, format)
    again = vitkit.load(path)
    assert again.config == model.config and again.labels == model.labels and again.task == "detect"
    assert same(model, again) and same(model, again, (40, 40))


def test_arrays_alone_need_the_image_size(tmp_path):
    model = yolos()
    vitkit.save(model, tmp_path / "m.pth", "yolos")
    with pytest.raises(WeightsError) as error:
        vitkit.load(tmp_path / "m.pth")
    assert error.value.code == "request.missing"
    again = vitkit.load(tmp_path / "m.pth", image_size=(32, 48), heads=2)
    assert again.config.middle_size == (32, 48) and again.config.vit.norm_eps == 1e-6


def test_both_spellings_of_the_middle_positions_are_read(tmp_path):
    _, folder = peer_of(tmp_path, middle=True)
    model = vitkit.load(folder)
    arrays = safetensors.torch.load_file(folder / "model.safetensors")
    assert MIDDLE in arrays
    arrays["vit.encoder.interpolation.mid_position_embeddings"] = arrays.pop(MIDDLE)
    safetensors.torch.save_file(arrays, folder / "model.safetensors")
    assert same(model, vitkit.load(folder))


def test_other_models_in_its_layout_are_refused(tmp_path):
    _, folder = peer_of(tmp_path, middle=False)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "detr"}))
    with pytest.raises(WeightsError):
        vitkit.load(folder)


@pytest.mark.parametrize(
    "size, patches", [((512, 864), 1728), ((800, 1344), 4200), ((800, 1333), 4150)], ids=str
)
def test_published_sizes_are_known_from_the_number_of_positions(size, patches):
    from vitkit.weights.formats.layout import Hints
    from vitkit.weights.formats.yolos_layouts import COCO_NAMES, table_size

    assert table_size(patches + 1, 16, Hints()) == size
    names = COCO_NAMES.split(", ")
    assert len(names) == 91 and names.count("N/A") == 11 and names[1] == "person"
