"""The Hugging Face Hub: hf:owner/name is read, a model is pushed with its card, and no token is shown."""

import json
import logging
import os
import pickle
import re
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from hub_server import Hub, Repo
from huggingface_hub import constants
from PIL import Image
from refusals import refused
from test_cli import run as command

import vitkit
from vitkit.inference.predict import pixels
from vitkit.models.card import Preprocessing
from vitkit.weights import hub as names
from vitkit.weights.formats import layouts
from vitkit.weights.formats.layout import Hints
from vitkit.weights.formats.timm_config import read_fields

TOKEN = "hf_SeCrEtToKeN0123456789"
LABELS = ("cat", "dog", "fox | <b>owl</b>", "nöise", "yak")
CROP = Preprocessing(
    resize="crop", crop=0.9, interpolation="bicubic", mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)
)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The server as the Hub of this process, an empty cache, and a token in the environment."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub(TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def model(small):
    """A classifier with the preprocessing that is hardest to express."""
    made = small(gelu="tanh")
    made.labels, made.preprocessing = LABELS, CROP
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A short run from weights in a private folder."""
    folder = tmp_path_factory.mktemp("private-home")
    start = vitkit.build("ViT-Ti/8", width=32, depth=1, heads=2, hidden=32, image_size=(16, 16), classes=3)
    vitkit.save(start, folder / "start.safetensors")
    options = {"evaluations": 0, "schedule.warmup": 1}
    weights = folder / "start.safetensors"
    vitkit.finetune(
        "digits",
        weights=weights,
        out=folder / "run",
        steps=4,
        batch=16,
        image_size=16,
        workers=0,
        set=options,
    )
    return folder / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def saved(model, folder: Path, format: str) -> dict[str, bytes]:
    vitkit.save(model, folder / "model.safetensors" if format == "vitkit" else folder, format)
    return contents(folder)


def outputs(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, *model.config.image_size, generator=generator)
    with torch.no_grad():
        return model(images)


def downloads(hub: Hub) -> set[str]:
    return {path.rpartition("/")[2] for method, path in hub.requests if "/resolve/" in path}


# reading


@pytest.mark.parametrize("format", ["hf", "timm", "vitkit"])
def test_a_model_of_the_hub_is_read_with_its_labels_and_its_commit(hub, model, tmp_path, format):
    (tmp_path / "made").mkdir()
    files = saved(model, tmp_path / "made", format)
    others = {
        "tf_model.h5": b"large",
        "pytorch_model.bin": b"large",
        "README.md": b"---\nlicense: mit\n---\n",
    }
    commit = hub.add("me/photos", files | others).refs["main"]
    loaded = vitkit.load("hf:me/photos")
    assert torch.equal(outputs(loaded), outputs(model)) and loaded.config == model.config
    assert loaded.labels == LABELS and loaded.preprocessing == CROP
    assert loaded.origin.source == f"hf:me/photos@{commit}" and loaded.origin.licence == "mit"
    sides = {"config.json", "preprocessor_config.json"}  # whether they exist is remembered
    assert downloads(hub) | sides == set(files) | sides, "only what is needed"


@pytest.mark.parametrize("format", ["hf", "timm"])
def test_a_repository_of_another_library_has_no_card_of_ours(hub, model, tmp_path, format):
    files = saved(model, tmp_path / "made", format)
    arrays = safetensors.torch.load(files["model.safetensors"])
    hub.add("other/photos", files | {"model.safetensors": safetensors.torch.save(arrays)})
    loaded = vitkit.load("hf://other/photos")
    assert torch.equal(outputs(loaded), outputs(model)) and loaded.labels == LABELS
    crop = CROP.crop if format == "timm" else 32 / 36  # a processor states whole pixels
    assert loaded.preprocessing == replace(CROP, crop=crop) and loaded.config.gelu == "tanh"


def test_the_tokenizer_is_downloaded_when_a_text_needs_it(hub, small, tmp_path):
    from tokenizers import Tokenizer, models

    from vitkit.models.text_tower import TextConfig

    text = TextConfig(vocabulary=8, length=4, width=8, depth=1, heads=1, hidden=8, output=32)
    clip = {"input_norm": True, "project_bias": False, "norm_eps": 1e-5, "gelu": "quick", "classes": 0}
    model = small(**clip, representation=32, representation_kind="linear", text=text)
    files = saved(model, tmp_path / "made", "hf")
    words = Tokenizer(models.WordLevel({"cat": 0, "dog": 1, "?": 2}, unk_token="?"))
    hub.add("me/clip", files | {"tokenizer.json": words.to_str().encode()})
    both = vitkit.load("hf:me/clip", text=True)
    assert "tokenizer.json" not in downloads(hub)
    embedded = vitkit.embed(both, text=["cat", "dog"])
    assert embedded.shape == (2, 32) and "tokenizer.json" in downloads(hub)
    hub.add("me/none", files)
    with refused("weights.not-found", "tokenizer.json"):
        vitkit.embed("hf:me/none", text="cat")


def test_branches_tags_and_commits(hub, small):
    first, second = small(), small(depth=1)
    repo = hub.add("me/photos", {"model.safetensors": b""})
    for branch, made in (("main", first), ("v1.0", second), ("refs/pr/1", second)):
        repo.commit({"model.safetensors": in_memory(made)}, branch=branch)
    assert vitkit.load("hf:me/photos").config.depth == 2
    assert vitkit.load("hf:me/photos@v1.0").config.depth == 1
    assert vitkit.load("hf:me/photos@refs/pr/1").config.depth == 1
    assert vitkit.load(f"hf:me/photos@{repo.refs['v1.0']}").origin.source.endswith(repo.refs["v1.0"])


def in_memory(model) -> bytes:
    from vitkit.weights.card import card_of, to_json

    arrays = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return safetensors.torch.save(arrays, {"vitkit": to_json(card_of(model, "vitkit"))})


def test_the_cache_serves_where_the_hub_does_not(hub, model, monkeypatch):
    hub.add("me/photos", {"model.safetensors": in_memory(model)})
    loaded = vitkit.load("hf:me/photos")
    hub.requests.clear()
    vitkit.load("hf:me/photos")
    assert not any(path.startswith("/store") for _, path in hub.requests), "it is in the cache"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert torch.equal(outputs(vitkit.load("hf:me/photos")), outputs(loaded))
    assert vitkit.load("hf:me/photos").origin.source == loaded.origin.source
    with refused("network.unreachable"):
        vitkit.load("hf:me/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(outputs(vitkit.load("hf:me/photos")), outputs(loaded))
    with refused("network.unreachable"):
        vitkit.load("hf:me/photos@v2")


@pytest.mark.slow
def test_the_environment_of_huggingface_hub_is_obeyed(hub, model, tmp_path):
    hub.add("me/photos", {"model.safetensors": in_memory(model)})
    vitkit.load("hf:me/photos")
    hub.requests.clear()
    (tmp_path / "home").mkdir()
    Path(constants.HF_HUB_CACHE).rename(tmp_path / "home" / "hub")
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "vitkit", "show", "hf:me/photos", "--json"]
    done = subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["origin"]["source"].startswith("hf:me/photos@") and not hub.requests


def test_preprocessing_that_is_not_in_the_cache_is_not_guessed(hub, model, tmp_path, monkeypatch):
    hub.add("me/photos", saved(model, tmp_path / "made", "hf"))
    huggingface_hub.hf_hub_download("me/photos", "config.json", endpoint=hub.url)
    huggingface_hub.hf_hub_download("me/photos", "model.safetensors", endpoint=hub.url)
    with monkeypatch.context() as offline:
        offline.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with refused("network.unreachable"):
            vitkit.load("hf:me/photos")
    vitkit.load("hf:me/photos")
    monkeypatch.setenv("HF_ENDPOINT", "http://user:password@127.0.0.1:9")
    assert vitkit.load("hf:me/photos").preprocessing == CROP
    with refused("network.unreachable", "http://127.0.0.1:9") as caught:
        vitkit.load("hf:me/other")
    assert "password" not in str(caught.value)


def test_shards_are_read_and_a_missing_one_is_noticed_offline(hub, model, tmp_path, monkeypatch):
    files = saved(model, tmp_path / "made", "hf")
    arrays = safetensors.torch.load(files.pop("model.safetensors"))
    halves = sorted(arrays)[::2], sorted(arrays)[1::2]
    shards = {f"model-{i + 1:05d}-of-00002.safetensors": half for i, half in enumerate(halves)}
    index = {"weight_map": {name: shard for shard, half in shards.items() for name in half}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files |= {
        shard: safetensors.torch.save({name: arrays[name] for name in half}) for shard, half in shards.items()
    }
    hub.add("me/large", files)
    loaded = vitkit.load("hf:me/large")
    assert torch.equal(outputs(loaded), outputs(model)) and downloads(hub) == set(files)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    vitkit.load("hf:me/large")
    next(Path(constants.HF_HUB_CACHE).rglob("model-00002-of-00002.safetensors")).unlink()
    with refused("network.unreachable"):
        vitkit.load("hf:me/large")


def test_the_files_of_open_clip_are_downloaded_together(hub, small, tmp_path, monkeypatch):
    clip = {"input_norm": True, "project_bias": False, "norm_eps": 1e-5, "classes": 0, "gelu": "erf"}
    made = small(**clip, representation=24, representation_kind="linear", position_resize="timm")
    vitkit.save(made, tmp_path / "m.safetensors", "clip")
    arrays = safetensors.torch.load_file(tmp_path / "m.safetensors")
    head_width = made.config.width // made.config.heads
    vision = {"image_size": list(made.config.image_size), "head_width": head_width}
    stated = {"model_cfg": {"vision_cfg": vision}, "preprocess_cfg": {"mean": [0.1, 0.2, 0.3]}}
    files = {"open_clip_config.json": json.dumps(stated).encode(),
             "open_clip_model.safetensors": safetensors.torch.save(arrays)}  # fmt: skip
    hub.add("me/clip", files | {"config.json": b'{"model_type": "bert"}'})  # not of these weights
    loaded = vitkit.load("hf:me/clip")
    assert loaded.config == made.config and not loaded.origin.notes and downloads(hub) == set(files)
    assert loaded.preprocessing.mean == (0.1, 0.2, 0.3)
    with monkeypatch.context() as offline:
        offline.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        assert vitkit.load("hf:me/clip").config == made.config
    for vision in ({"timm_model_name": "convnext_base"}, {"layers": [3, 4, 6, 3]}):
        stated = {"open_clip_config.json": json.dumps({"model_cfg": {"vision_cfg": vision}}).encode()}
        hub.add("me/other", files | stated)
        hub.requests.clear()
        with refused("weights.unsupported"):
            vitkit.load("hf:me/other")
        assert downloads(hub) == {"open_clip_config.json"}


def test_files_that_repositories_share_may_lie_beside_them(hub, model):
    hub.add("me/photos", {"model.safetensors": in_memory(model)})
    vitkit.load("hf:me/photos")
    cache = Path(constants.HF_HUB_CACHE)
    blob = next((cache / "models--me--photos" / "blobs").iterdir())
    (cache / "blobs").mkdir()
    blob.rename(cache / "blobs" / blob.name)
    blob.symlink_to(Path("../../blobs") / blob.name)
    vitkit.load("hf:me/photos")
    outside = cache.parent / "outside"
    (cache / "blobs" / blob.name).rename(outside)
    blob.unlink()
    blob.symlink_to(outside)
    with refused("weights.untrusted"):
        vitkit.load("hf:me/photos")


NAMES = [
    "hf:",
    "hf:photos",
    "hf:a/b/c",
    "hf:a/b@",
    "hf:a/b@x y",
    "hf:a/b@../x",
    "hf:../b",
    "hf:a/b--c",
    "hf:a/b.git",
]


def test_names_that_cannot_be_are_refused_without_a_request(hub):
    for name in NAMES:
        with refused("request.value"):
            vitkit.load(name)
        with refused("request.value"):
            vitkit.finetune("digits", weights=name, plan=True)
    assert not hub.requests


def test_what_is_wrong_with_a_repository_is_said(hub, model, monkeypatch):
    hub.add("me/photos", {"model.safetensors": in_memory(model)})
    hub.add("me/gated", {"model.safetensors": in_memory(model)}, gated=True)
    hub.add("me/hidden", {"model.safetensors": in_memory(model)}, private=True)
    hub.add("me/empty", {"weights.onnx": b"", "README.md": b"---\n---\n"})
    with refused("weights.not-found", "hf:me/photos"):
        vitkit.load("hf:me/fotos")
    with refused("weights.not-found", "main"):
        vitkit.load("hf:me/photos@mian")
    with refused("network.refused", "hf auth login"):
        vitkit.load("hf:me/gated")
    with refused("weights.not-found", "weights.onnx"):
        vitkit.load("hf:me/empty")
    with refused("weights.not-found", "hf:me/photos"):
        vitkit.load("https://huggingface.co/me/photos")
    vitkit.load("hf:me/hidden")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refused("network.refused"):
        vitkit.load("hf:me/photos")
    monkeypatch.delenv("HF_TOKEN")
    with refused("weights.not-found", "hf auth login"):
        vitkit.load("hf:me/hidden@main")


@pytest.mark.parametrize(
    "config", [{"model_type": "bert"}, {"architecture": "resnet50", "pretrained_cfg": {}}]
)
def test_another_architecture_is_refused_before_its_weights_are_downloaded(hub, config):
    hub.add("me/other", {"config.json": json.dumps(config).encode(), "model.safetensors": b"large"})
    with refused("weights.unsupported"):
        vitkit.load("hf:me/other")
    assert downloads(hub) == {"config.json"}


def test_pickles_are_read_as_data_only(hub, model, tmp_path):
    files = saved(model, tmp_path / "made", "hf")
    torch.save(safetensors.torch.load(files.pop("model.safetensors")), tmp_path / "arrays.bin")
    hub.add("me/old", files | {"pytorch_model.bin": (tmp_path / "arrays.bin").read_bytes()})
    assert torch.equal(outputs(vitkit.load("hf:me/old")), outputs(model))

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    hub.add("me/evil", {"pytorch_model.bin": pickle.dumps({"a": Evil()})})
    with pytest.raises(vitkit.Error):
        vitkit.load("hf:me/evil")
    assert not (tmp_path / "executed").exists()


def test_without_the_extra_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused("request.extra-missing", "vitkit[hub]"):
        vitkit.load("hf:me/photos")


def test_commands_take_names_of_the_hub(hub, model, tmp_path, capfd):
    hub.add("me/photos", {"model.safetensors": in_memory(model)})
    Image.fromarray(np.full((40, 50, 3), 90, np.uint8)).save(tmp_path / "grey.png")
    assert command("predict", "hf:me/photos", tmp_path / "grey.png", "--json") == 0
    assert json.loads(capfd.readouterr().out)[0]["top"][0]["label"] in LABELS
    assert command("show", "hf:me/photos", "--json") == 0
    assert json.loads(capfd.readouterr().out)["origin"]["source"].startswith("hf:me/photos@")
    assert command("convert", "hf:me/photos", tmp_path / "copy.safetensors") == 0
    assert torch.equal(outputs(vitkit.load(tmp_path / "copy.safetensors")), outputs(model))
    assert command("predict", "hf:me/fotos", tmp_path / "grey.png") == 2
    run = vitkit.finetune(
        "digits", weights="hf:me/photos", out=tmp_path / "run", steps=2, batch=16, image_size=16, workers=0,
        set={"evaluations": 0, "schedule.warmup": 1},
    )  # fmt: skip
    commit = hub.repos["me/photos"].refs["main"]
    assert run.model.origin.source == f"hf:me/photos@{commit}", "the commit, not only the branch"
    assert run.recipe.weights == "hf:me/photos"


# what timm's architectures decide beyond their arrays


@pytest.mark.slow
def test_timms_architectures_compute_what_we_infer():
    timm = pytest.importorskip("timm")
    checked = 0
    for module in ("vision_transformer", "vision_transformer_hybrid", "deit", "eva"):
        for name in timm.list_models(module=module):
            with torch.device("meta"):
                peer = timm.create_model(name)
            shapes = {key: tuple(value.shape) for key, value in peer.state_dict().items()}
            files = {
                "config.json": {"architecture": name, "pretrained_cfg": {"input_size": [3, *size_of(peer)]}}
            }
            layout = next((known for known in layouts() if known.recognises(shapes)), None)
            try:
                config = layout.infer(shapes, Hints(files=files)).config
                if {f for entry in layout.entries(config) for f in entry.foreign} != set(shapes):
                    continue  # refused, since arrays are left over
            except (vitkit.Error, AttributeError):
                continue
            block = peer.blocks[0]
            kind = type(block.mlp.act).__name__
            gelu = "tanh" if "Tanh" in kind else "quick" if "Quick" in kind else "erf"
            pooling = {"avg": "gap"}.get(peer.global_pool, peer.global_pool)
            if config.rope == "dinov3":  # without a stated pooling, features are the class token
                pooling = "token"
            expected = (block.attn.num_heads, gelu, pooling, size_of(peer))
            if not name.startswith("test_vit"):  # too small for any rule about heads
                assert (config.heads, config.gelu, config.head, config.image_size) == expected, name
                assert type(block).__name__ in ("Block", "EvaBlock"), name
                assert (block.norm1.eps, rope_of(peer)) == (config.norm_eps, config.rope), name
                checked += 1
    assert checked > 150


def rope_of(peer) -> str:
    rope = type(getattr(peer, "rope", None)).__name__
    return {"NoneType": "none", "RotaryEmbeddingDinoV3": "dinov3", "RotaryEmbeddingCat": "eva02"}[rope]


def size_of(peer) -> tuple[int, int]:
    return tuple(getattr(peer.patch_embed, "img_size", None) or (224, 224))


@pytest.mark.parametrize("name", ["vit_base_patch16_rpn_224", "vit_base_patch16_rope_ape_224.naver_in1k"])
def test_architectures_with_other_blocks_are_refused(name):
    with refused("weights.unsupported"):  # the arrays of rope_ape are those of a ViT without RoPE
        read_fields({"config.json": {"architecture": name}}, Hints())


def test_what_an_architecture_decides_is_read_from_its_name():
    assert read_fields({"config.json": {"architecture": "vit_so400m_patch16_siglip_256.v2"}}, Hints()) == {
        "heads": 16,
        "gelu": "tanh",
    }


# writing


def test_a_pushed_model_is_loaded_by_transformers(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    done = vitkit.push(model, "me/photos", dry_run=tmp_path / "out")
    assert done.format == "hf" and done.url == "" and set(done.files) == set(contents(tmp_path / "out"))
    peer = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        difference = (peer(images).logits - model(images)).abs().max()
    assert difference <= 1e-5 * max(1.0, float(outputs(model).abs().max()))
    assert tuple(peer.config.id2label.values()) == LABELS
    picture = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")(
        Image.fromarray(picture), return_tensors="pt"
    )
    ours = pixels(picture, model) / 255
    ours = (ours - torch.tensor(CROP.mean)[:, None, None]) / torch.tensor(CROP.std)[:, None, None]
    assert (theirs["pixel_values"][0] - ours).abs().mean() < 0.02, "the same crop, up to rounding"


ONLY_TIMM = [
    {"head": "gap", "class_token": False}, {"layer_scale": True}, {"image_size": (32, 48)},
    {"registers": 4, "class_position": False, "mlp": "swiglu", "hidden": 40},
    {"rope": "dinov3", "positions": "none", "norm_eps": 1e-5, "key_bias": False, "gelu": "erf"},
]  # fmt: skip
EVA02 = {"rope": "eva02", "mlp": "swiglu", "mlp_norm": True, "key_bias": False, "gelu": "erf"}
CLIP = {"input_norm": True, "project_bias": False, "gelu": "quick", "norm_eps": 1e-5}


@pytest.mark.parametrize(
    "options",
    [
        *ONLY_TIMM, {"head": "map", "class_token": False}, {"gelu": "erf", "hidden": 50}, EVA02, CLIP,
        {"distilled": True}, {"head": "gap", "class_token": False, "registers": 2}, {"qk_norm": True},
    ],
)  # fmt: skip
def test_a_pushed_model_is_loaded_by_timm(small, tmp_path, options):
    timm = pytest.importorskip("timm")
    model = small(**options)
    model.labels, model.preprocessing = LABELS, CROP
    for block in () if model.config.key_bias else model.encoder.blocks:
        block.attention.qkv.bias.data.chunk(3)[1].zero_()  # not used, and in no file
    format = None if options in ONLY_TIMM else "timm"
    done = vitkit.push(model, "me/photos", format=format, dry_run=tmp_path / "out")
    assert done.format == "timm"
    peer = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.rand(2, 3, *model.config.image_size)
    with torch.no_grad():
        difference = (peer(images) - model(images)).abs().max()
    assert difference <= 1e-5 * max(1.0, float(outputs(model).abs().max()))
    assert tuple(peer.pretrained_cfg["label_names"]) == LABELS
    data = timm.data.resolve_model_data_config(peer)
    assert (data["crop_pct"], data["mean"], data["std"]) == (0.9, list(CROP.mean), list(CROP.std))
    assert (data["interpolation"], data["input_size"]) == ("bicubic", (3, *model.config.image_size))
    assert torch.equal(outputs(vitkit.load(tmp_path / "out")), outputs(model))


def test_the_format_is_one_that_computes_the_same(small, tmp_path):
    tanh_layer = small(representation=16)
    assert vitkit.push(tanh_layer, "me/a", dry_run=tmp_path / "a").format == "vitkit"
    other_epsilon = small(norm_eps=1e-3, layer_scale=True)
    assert vitkit.push(other_epsilon, "me/b", dry_run=tmp_path / "b").format == "vitkit"
    resnet = vitkit.build("BiT-R50x1", width=64, blocks=(1, 1, 1, 1), classes=3)
    assert vitkit.push(resnet, "me/c", dry_run=tmp_path / "c").format == "vitkit"
    assert set(contents(tmp_path / "c")) == {"README.md", "model.safetensors"}
    with refused("weights.unsupported"):
        vitkit.push(tanh_layer, "me/a", format="hf", dry_run=tmp_path / "d")
    with refused("weights.unsupported"):
        vitkit.push(resnet, "me/c", format="timm", dry_run=tmp_path / "d")
    with refused("request.value"):
        vitkit.push(resnet, "me/c", format="onnx", dry_run=tmp_path / "d")
    with refused("request.value"):
        vitkit.push(resnet, "c", dry_run=tmp_path / "d")
    with refused("file.exists"):
        vitkit.push(resnet, "me/c", dry_run=tmp_path / "c")
    assert not (tmp_path / "d").exists() and not list(tmp_path.glob(".push-*"))


def test_several_labels_stay_several_labels(small, tmp_path):
    model = small()
    model.labels, model.task = LABELS, "multilabel"
    vitkit.push(model, "me/tags", dry_run=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert vitkit.load(tmp_path / "out").task == "multilabel"


def header(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_the_card_of_a_run_states_what_was_measured(trained, tmp_path):
    vitkit.push(trained, "me/digits", license="mit", dry_run=tmp_path / "out")
    files = contents(tmp_path / "out")
    card = files["README.md"].decode()
    data, test = header(card), vitkit.Run(trained).result["test"]
    assert data["license"] == "mit" and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "image-classification" and data["datasets"] == ["digits"]
    (row,) = data["model-index"][0]["results"]
    assert row["metrics"][0]["value"] == test["top1"] and row["metrics"][0]["type"] == "accuracy"
    assert row["dataset"] == {"name": "digits", "type": "digits", "split": "test"}
    parsed = huggingface_hub.ModelCard(card).data.eval_results[0]
    assert (parsed.metric_type, parsed.metric_value) == ("accuracy", test["top1"])
    for title in ("How to use it", "Accuracy", "Data", "Classes", "Model", "Recipe", "Cost", "Versions"):
        assert f"\n## {title}\n" in card
    rows = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in card.splitlines()}
    assert {("data set", "digits"), ("test images", "179"), ("`batch`", "16")} <= rows
    assert {("`weights`", "start.safetensors"), ("started from", "start.safetensors")} <= rows
    per_class = {row[0]: row[3] for row in rows if len(row) == 4 and row[0].isdigit()}
    assert per_class == {label: str(row["images"]) for label, row in test["per_class"].items()}
    for name, content in files.items():
        assert b"private-home" not in content, f"{name} has a path of this machine"


def test_a_card_shows_names_as_they_are(model, tmp_path):
    vitkit.push(model, "me/photos", dry_run=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert r"| 2 | fox \| &lt;b&gt;owl&lt;/b&gt; |" in card
    assert not {"license", "model-index", "datasets"} & set(header(card)), "nothing that is not known"
    assert "## Accuracy" not in card and "timm" not in card


def test_a_push_is_one_commit_and_replaces_another_format(hub, trained, tmp_path):
    done = vitkit.push(trained, "me/digits", message="first")
    repo = hub.repos["me/digits"]
    assert done.url == f"{hub.url}/me/digits" and done.commit == repo.refs["main"]
    assert set(repo.files) - {".gitattributes"} == set(done.files)
    assert torch.equal(outputs(vitkit.load("hf:me/digits")), outputs(vitkit.load(trained)))
    again = vitkit.push(trained, "me/digits", format="timm")
    assert repo.messages[:2] == ["initial commit", "first"] and len(repo.messages) == 3
    assert set(repo.files) == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    loaded = vitkit.load("hf:me/digits")
    assert loaded.origin.source == f"hf:me/digits@{again.commit}" and loaded.origin.format == "timm"
    assert torch.equal(outputs(loaded), outputs(vitkit.load(trained)))


@pytest.mark.parametrize(
    "place", ["/api/models/me/digits/commit", "/store", "/api/models/me/digits/preupload"]
)
def test_a_push_that_fails_changes_nothing(hub, model, place):
    before = hub.add("me/digits", {"README.md": b"---\n---\nmine"}).refs["main"]
    hub.fails.add(place)
    with pytest.raises(vitkit.Error) as caught:
        vitkit.push(model, "me/digits")
    assert caught.value.code in ("network.refused", "network.unreachable")
    assert hub.repos["me/digits"].refs["main"] == before


def test_private_means_private(hub, model):
    vitkit.push(model, "me/secret", private=True)
    assert hub.repos["me/secret"].private
    vitkit.push(model, "me/secret", message="again", private=True)
    hub.repos["me/public"] = Repo()
    before = hub.repos["me/public"].commit({})
    with refused("request.conflict"):
        vitkit.push(model, "me/public", private=True)
    assert hub.repos["me/public"].refs["main"] == before


def test_writing_needs_a_token_and_a_valid_card(hub, model, monkeypatch):
    with refused("request.value"):
        vitkit.push(model, "me/photos", license="no such")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refused("network.refused"):
        vitkit.push(model, "me/photos")
    monkeypatch.delenv("HF_TOKEN")
    with refused("network.refused", "hf auth login"):
        vitkit.push(model, "me/new")
    assert "me/new" not in hub.repos


def test_the_verb_says_where_and_why(hub, trained, tmp_path, capfd):
    assert command("push", trained, "me/digits", "--dry-run", tmp_path / "out") == 0
    assert "README.md" in capfd.readouterr().out and not hub.repos
    assert command("push", trained, "me/digits", "--json") == 0
    done = json.loads(capfd.readouterr().out)
    assert done["url"] == f"{hub.url}/me/digits" and done["format"] == "hf" and done["why"]
    assert command("push", trained, "digits") == 2
    assert command("push", trained, "me/digits", "--format", "onnx") == 2
    assert command("push", tmp_path / "nothing", "me/digits") == 2


def test_the_token_is_nowhere(hub, trained, tmp_path, capfd, caplog, monkeypatch):
    shown = []
    with caplog.at_level(logging.DEBUG):
        for name in ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3"):
            logging.getLogger(name).setLevel(logging.DEBUG)
        vitkit.push(trained, "me/digits", dry_run=tmp_path / "out")
        assert command("push", trained, "me/digits") == 0
        assert command("show", "hf:me/digits") == 0
        hub.fails.add("/api/models/me/digits/commit")
        for wrong in (
            lambda: vitkit.load("hf:me/none"),
            lambda: vitkit.load("hf:me/digits@none"),
            lambda: vitkit.push(trained, "me/digits", license="other"),
            lambda: vitkit.push(trained, "me/digits", license="no such"),
        ):
            with pytest.raises(vitkit.Error) as caught:
                wrong()
            shown.append("".join(traceback.format_exception(caught.value)) + repr(caught.value))
        assert command("push", trained, "me/digits", "--license", "other") == 2
    shown += [*capfd.readouterr(), caplog.text]
    assert any("me/digits" in text for text in shown)
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    stored += [data for files in hub.repos["me/digits"].commits.values() for data in files.values()]
    stored += [path.read_bytes() for path in trained.rglob("*") if path.is_file()]
    assert not any(re.search(TOKEN, text, re.IGNORECASE) for text in shown)
    assert not any(TOKEN.encode() in content for content in stored)


def test_names_are_parsed():
    assert str(names.parse("hf:a/b")) == "hf:a/b" and names.parse("hf:a/b").revision == "main"
    assert str(names.parse("hf://a/b@refs/pr/1")) == "hf:a/b@refs/pr/1"
