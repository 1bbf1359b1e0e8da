"""The files of RF-DETR: its authors' checkpoints and transformers' folders, read and written."""

import argparse
import json

import pytest
import torch
from rf_detr_peer import both, peer
from safetensors.torch import load_file

from vitkit.models.card import Preprocessing
from vitkit.models.dense.rf_detr import RfDetrConfig, rf_detr_config
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig
from vitkit.weights import published
from vitkit.weights.formats.roboflow import LAYOUT
from vitkit.weights.load import config_of, load
from vitkit.weights.published import PUBLISHED, DownloadError
from vitkit.weights.save import save

IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def small(outputs=5, **options):
    """Sizes from which a checkpoint without config.json shows the whole model."""
    vit = ViTConfig(
        width=64, depth=4, heads=1, hidden=256, patch=8, image_size=(64, 64), classes=0, layer_scale=True,
        gelu="erf", mask_token=True, position_resize="timm",
    )  # fmt: skip
    sizes = {"taken": (1, 2, 3, 4), "queries": 10, "groups": 3, "decoder_width": 32, "decoder_hidden": 48,
             "self_heads": 1, "cross_heads": 2, "classes": outputs}  # fmt: skip
    model = fresh(RfDetrConfig(**{"vit": vit} | sizes | options), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.preprocessing, model.task = IMAGENET, "detect"
    return model.eval()


def same(left, right):
    assert left.config == right.config and left.preprocessing == right.preprocessing
    assert left.task == right.task == "detect"
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors", "folder"])
def test_a_model_is_written_and_read_back(tmp_path, name):
    model = small(projector_eps=1e-5 if name == "folder" else 1e-6)
    notes = save(model, tmp_path / name, "rf-detr")
    assert not any("projector_eps" in note for note in notes)
    back = load(tmp_path / name)
    assert back.origin.format == "rf-detr"
    same(model, back)


def test_our_own_format_keeps_everything(tmp_path):
    model = small(dropout=0.1, windows=4)
    model.labels = ("a", "b", "c", "d", "e")
    save(model, tmp_path / "m.safetensors")
    back = load(tmp_path / "m.safetensors")
    same(model, back)
    assert back.labels == model.labels and config_of(tmp_path / "m.safetensors") == model.config


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_authors_checkpoints_are_read(tmp_path, prefix):
    """A training checkpoint beside its arguments; some versions have a prefix."""
    model = small(outputs=91)
    save(model, tmp_path / "arrays.pth", "rf-detr")
    state = {prefix + name: array for name, array in torch.load(tmp_path / "arrays.pth").items()}
    content = {"model": state, "args": argparse.Namespace(resolution=64), "epoch": 3}
    torch.save(content, tmp_path / "checkpoint.pth")
    back = load(tmp_path / "checkpoint.pth")
    same(model, back)
    assert len(back.labels) == 91
    assert [back.labels[k] for k in (1, 13, 27, 90)] == ["person", "stop sign", "backpack", "toothbrush"]


@torch.no_grad()
def test_transformers_reads_what_we_write(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = small(projector_eps=1e-5, windows=4, taken=(2, 4), cross_heads=4)
    model.labels = ("a", "b", "c", "d", "e")
    save(model, tmp_path, "rf-detr")
    theirs = transformers.RfDetrForObjectDetection.from_pretrained(tmp_path).eval()
    assert theirs.config.id2label == dict(enumerate(model.labels))
    images = torch.randn(2, 3, 64, 64)
    expected, rows = theirs(pixel_values=images), model(images)
    scores = expected.logits.sigmoid().flatten(1).topk(10).values
    assert (rows[..., 4] - scores).abs().max() < 1e-5


def test_transformers_names_and_sizes_are_all_read(tmp_path):
    pytest.importorskip("transformers")
    theirs, ours = both(tmp_path, windows=4, taken=(1, 3))
    config = ours.config
    assert (config.windows, config.taken, config.groups, config.queries) == (4, (1, 3), 3, 10)
    assert (config.self_heads, config.cross_heads, config.points) == (4, 8, 2)
    assert config.projector_eps == theirs.config.layer_norm_eps == 1e-5
    assert ours.task == "detect" and ours.preprocessing == IMAGENET
    stored = set(load_file(tmp_path / "model.safetensors"))
    assert {name for entry in LAYOUT.entries(config) for name in entry.foreign} == stored


@pytest.mark.parametrize("change", ["mask", "activation", "json", "relu"])
def test_what_is_another_model_is_refused(tmp_path, change):
    pytest.importorskip("transformers")
    peer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text("utf-8"))
    if change == "mask":
        from safetensors.torch import save_file

        arrays = load_file(tmp_path / "model.safetensors")
        save_file(arrays | {"segmentation_head.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    elif change == "json":
        content["backbone_config"]["num_windows"] = "two"
    else:
        content["activation_function" if change == "activation" else "decoder_activation_function"] = "gelu"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    assert caught.value.code == ("weights.format" if change == "json" else "weights.unsupported")


def test_a_detector_on_another_encoder_is_saved_as_vitkit_alone(tmp_path):
    vit = ViTConfig(width=64, depth=2, heads=1, hidden=256, patch=8, image_size=(64, 64), classes=0)
    model = fresh(RfDetrConfig(vit=vit, taken=(1, 2), queries=4, groups=2, decoder_width=32), seed=0)
    with pytest.raises(ValueError) as caught:
        save(model, tmp_path / "m.pth", "rf-detr")
    assert caught.value.code == "weights.unsupported"
    save(model, tmp_path / "m.safetensors")
    assert load(tmp_path / "m.safetensors").config == model.config


def test_published_detectors_have_names_and_configurations():
    weights = {name: w for name, w in PUBLISHED.items() if name.startswith("RF-DETR")}
    assert list(weights) == [f"RF-DETR-{size}.coco" for size in ("nano", "small", "medium", "large")]
    for weight in weights.values():
        assert weight.licence == "Apache-2.0" and len(weight.md5) == 32
        assert rf_detr_config(weight.model.rpartition("-")[2]).image_size == (weight.pixels, weight.pixels)
    assert published.by_source("checkpoint_best_regular.pth") is None  # a name that many have
    small_one = weights["RF-DETR-small.coco"]
    assert published.by_source(small_one.address) is small_one


def test_a_download_with_another_md5_is_refused(tmp_path, monkeypatch):
    def fetched(address, path, **options):
        path.write_bytes(b"something else")

    monkeypatch.setattr(published.http, "download", fetched)
    monkeypatch.setattr(published, "check_reachable", lambda address: None)
    right = "6c7ba9c5a141421e1c03cb9807c97c74"
    for md5, fits in (("0" * 32, False), (right, True)):
        path = tmp_path / md5 / "m.pth"
        if fits:
            published.download("https://x", path, md5=md5)
            assert path.exists()
        else:
            with pytest.raises(DownloadError) as caught:
                published.download("https://x", path, md5=md5)
            assert caught.value.code == "network.changed" and not list(path.parent.iterdir())
