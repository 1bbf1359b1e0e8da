"""pretrain as a verb: the published rows, sigmoid over many classes, sets kept apart, shards over HTTP."""

import json
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import run
from test_experiment import go, rows, same, tiny

import vitkit
from vitkit.data.sources.source import digits
from vitkit.models.variants import configure, skeleton, with_options
from vitkit.planning import plan
from vitkit.recipes import RECIPES, recipe
from vitkit.runs.build import build_model, open_splits

SMALL = ["--image-size", "8", "--steps", "6", "--batch", "16", "--workers", "0", "--device", "cpu"]
MODEL = ["--model", "ViT-Ti/4", "--set", "model_options=width=32,depth=1,heads=2,hidden=32", "evaluations=0",
         "schedule.warmup=1"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "epochs", "rate", "decay", "weight_decay", "dropout"),
    [
        ("jft.ViT-B/16", 7, 8e-4, "linear", 0.1, 0.0), ("jft.ViT-B/32", 7, 8e-4, "linear", 0.1, 0.0),
        ("jft.ViT-L/32", 7, 6e-4, "linear", 0.1, 0.0), ("jft.ViT-L/16", 7, 4e-4, "linear", 0.1, 0.0),
        ("jft.ViT-L/16-14ep", 14, 4e-4, "linear", 0.1, 0.0), ("jft.ViT-H/14", 14, 3e-4, "linear", 0.1, 0.0),
        ("jft.BiT-R50x1", 7, 1e-3, "linear", 0.1, 0.0), ("jft.BiT-R50x2", 7, 1e-3, "linear", 0.1, 0.0),
        ("jft.BiT-R101x1", 7, 8e-4, "linear", 0.1, 0.0), ("jft.BiT-R152x1", 7, 6e-4, "linear", 0.1, 0.0),
        ("jft.BiT-R152x2", 7, 6e-4, "linear", 0.1, 0.0), ("jft.R50+ViT-B/16", 7, 8e-4, "linear", 0.1, 0.0),
        ("jft.R50+ViT-B/32", 7, 8e-4, "linear", 0.1, 0.0), ("jft.R50+ViT-L/32", 7, 2e-4, "linear", 0.1, 0.0),
        ("jft.R50+ViT-L/16", 7, 4e-4, "linear", 0.1, 0.0),
        ("jft.R50+ViT-L/16-14ep", 14, 4e-4, "linear", 0.1, 0.0),
        ("i21k.ViT-B/16", 90, 1e-3, "linear", 0.03, 0.1), ("i21k.ViT-B/32", 90, 1e-3, "linear", 0.03, 0.1),
        ("i21k.ViT-L/16", 90, 1e-3, "linear", 0.03, 0.1), ("i21k.ViT-L/32", 90, 1e-3, "linear", 0.03, 0.1),
        ("i21k.ViT-L/16-30ep", 30, 1e-3, "linear", 0.03, 0.1),
        ("i21k.ViT-L/32-30ep", 30, 1e-3, "linear", 0.03, 0.1),
        ("imagenet.ViT-B/16", 300, 3e-3, "cosine", 0.3, 0.1),
        ("imagenet.ViT-L/16", 300, 3e-3, "cosine", 0.3, 0.1),
    ],
)  # fmt: skip
def test_table_3_is_as_published(name, epochs, rate, decay, weight_decay, dropout):
    r = recipe(name)
    assert r.length.epochs == epochs and r.schedule.rate == rate and r.schedule.decay == decay
    assert r.optimizer.weight_decay == weight_decay and r.dropout == dropout and r.optimizer.kind == "adam"
    assert r.optimizer.betas == (0.9, 0.999) and r.batch == 4096 and r.schedule.warmup == 10_000
    assert r.image_size == (224, 224) and r.optimizer.clip == (1.0 if name.startswith("imagenet") else 0.0)
    assert r.schedule.floor == (1e-5 if decay == "linear" else 0.0) and r.loss == "sigmoid"


def test_augreg_and_plain_are_as_published():
    light, none = recipe("augreg-i21k.ViT-B/16"), recipe("augreg-i21k.ViT-Ti/16")
    assert light.randaugment == (2, 10) and light.mixup == 0.2 and light.model_options == {"head": "gap"}
    assert none.randaugment == () and none.mixup == 0 and none.optimizer.moment == "bf16"
    assert recipe("augreg-i1k.ViT-L/16").mixup == 0.5 and recipe("augreg-i1k.ViT-L/16").randaugment == (2, 15)
    plain = recipe("plain")
    assert plain.batch == 1024 and plain.length.epochs == 90 and plain.loss == "softmax"
    assert plain.model_options == {"head": "gap", "positions": "sincos2d", "representation": 384}


@pytest.mark.parametrize("name", [n for n in RECIPES if n.startswith(("jft.", "i21k.", "imagenet."))])
def test_a_published_model_has_its_tanh_layer(name):
    """At 21,843 classes, as wide as the model; a ResNet has none. No memory is taken."""
    r = recipe(name)
    config = with_options(configure(r.model, classes=21_843, image_size=r.image_size), r.model_options)
    model = skeleton(config)
    assert model.head.bias.shape == (21_843,) and r.head_bias == -10
    if "ViT" in name:
        assert model.representation.weight.shape == (config.width, config.width)


def test_many_classes_begin_unlikely(tmp_path):
    r = tiny(
        loss="sigmoid",
        head_bias=-10.0,
        mixup=0.0,
        model_options=tiny().model_options.having(representation=32),
    )
    model = build_model(r, open_splits(r)["train"])
    assert torch.all(model.head.bias == -10) and model.config.representation == 32
    go(tmp_path, r)
    first = rows(tmp_path)[0][
        "loss"
    ]  # one class is right: its logit of -10 costs 10, the nine others nothing
    assert first == pytest.approx(10.0, abs=0.01)
    assert vitkit.load(tmp_path / "model.safetensors").config.representation == 32


def test_a_run_from_shards_equals_the_run_from_the_data(tmp_path, capsys):
    assert run("shard", "digits", tmp_path / "shards") == 0
    assert "1797 images in 1 shards" in capsys.readouterr().out
    go(tmp_path / "data", tiny())
    go(tmp_path / "packed", replace(tiny(), data=str(tmp_path / "shards")))
    assert same(tmp_path / "data", tmp_path / "packed")


class Ranges(SimpleHTTPRequestHandler):
    """A file server that knows byte ranges, as object stores do."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        wanted = self.headers.get("Range")
        path = self.translate_path(self.path)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            return self.send_error(404)
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        else:
            part = content
            self.send_response(200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


def test_shards_are_read_over_http(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run("shard", "digits", tmp_path / "served" / "shards") == 0
    handler = partial(Ranges, directory=str(tmp_path / "served"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/shards/"
        assert run("pretrain", address, "--out", tmp_path / "far", *SMALL, *MODEL, "--json") == 0
    finally:
        server.shutdown()
    near = str(tmp_path / "served" / "shards")
    assert run("pretrain", near, "--out", tmp_path / "near", *SMALL, *MODEL, "--json") == 0
    assert same(tmp_path / "far", tmp_path / "near")


def test_what_is_in_another_set_is_not_trained_on(tmp_path, capsys):
    source = digits()
    for name, numbers in (("train", range(60)), ("other", range(0, 60, 6))):
        for i in numbers:
            folder = tmp_path / name / source.classes[source.labels[i]]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.ascontiguousarray(source.fetch(i)).repeat(6, 0).repeat(6, 1)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    arguments = ["pretrain", tmp_path / "train", "--against", tmp_path / "other", "--out", tmp_path / "run"]
    assert run(*arguments, *SMALL, *MODEL, "val=0.1", "test=0.1", "--json") == 0
    removed = json.loads((tmp_path / "run" / "removed.json").read_text())
    exact = {one["key"] for one in removed if one["reason"] == "same pixels"}
    trained = open_splits(recipe_of(tmp_path / "run"), tmp_path / "run")["train"]
    shared = {f"{source.classes[source.labels[i]]}/{i}.png" for i in range(0, 60, 6)}
    assert exact and exact <= shared and not shared & set(trained.keys)


def recipe_of(out):
    from vitkit.recipes.recipe import from_json

    return from_json((out / "recipe.json").read_text())


FINETUNE = ["finetune", "digits", "--model", "ViT-Ti/4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "digits"], "--recipe that names its model"),
        (["pretrain", "digits", "--recipe", "jft.ViT-X/16"], "no recipe"),
        (
            ["pretrain", "digits", "--recipe", "i21k.ViT-B/16", "--subset", "lots"],
            "10%, 25/class or imbalanced=100",
        ),
        (["shard", "nowhere", "out"], "no data at 'nowhere'"),
        ([*FINETUNE, "--track", "pigeon"], "tracker 'pigeon'"),
        ([*FINETUNE, "--parallel", "thin"], "--parallel 'thin': expected"),
        ([*FINETUNE, "--workers", "-1"], "--workers -1: expected"),
        (["doctor", "digits", "--workers", "-1"], "--workers -1: expected"),
        ([*FINETUNE, "--max-bad", "5"], "--max-bad 5.0: expected a number from 0 to 1"),
        ([*FINETUNE, "--price-per-hour", "nan"], "--price-per-hour nan: expected"),
    ],
)
def test_mistakes_are_told_before_any_work(arguments, message, tmp_path, monkeypatch, capsys):
    """Not even a step is timed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "seconds_a_step", None)
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/checkpoints"))
