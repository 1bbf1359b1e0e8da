"""Verbs that compute nothing start without torch, and predict needs little beside it."""

import json
import subprocess
import sys

import make_listing
import numpy as np
import pytest
from PIL import Image
from test_cli import run

from vitkit import listing

CODE = """
import json, sys
from vitkit.cli import main
try:
    main(sys.argv[2:])
finally:
    json.dump(sorted(sys.modules), open(sys.argv[1], "w"))
"""
HEAVY = {"torch", "matplotlib", "tensorboard", "scipy", "pandas"}


def started(tmp_path, *words) -> tuple[subprocess.CompletedProcess, set[str]]:
    """The command in a process of its own, and the modules that it imported."""
    noted = tmp_path / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", CODE, noted, *map(str, words)], capture_output=True, text=True
    )
    return done, set(json.loads(noted.read_text()))


def test_the_listing_is_what_the_tables_amount_to():
    assert listing.table() == json.loads(json.dumps(make_listing.computed())), (
        "run: python tests/make_listing.py"
    )


@pytest.mark.parametrize("words", ["list", "list weights", "list recipes --json", "study list"])
def test_lists_need_no_torch(words, tmp_path):
    done, modules = started(tmp_path, *words.split())
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 5
    assert not modules & (HEAVY | {"numpy", "PIL"})


@pytest.mark.parametrize(
    "words",
    ["predict {} a.jpg", "evaluate {} digits", "evaluate model {}", "finetune {}", "doctor {}", "serve {}",
     "embed {} digits --out f.parquet", "embed model {} --out f.npz",
     "inspect {} a.jpg", "export {} out.onnx", "convert {} out.npz", "report {}", "report {} runs/b",
     "finetune digits --weights {}", "study run heads --data {}", "shard {} out", "fewshot {} digits"],
)  # fmt: skip
def test_a_wrong_path_is_refused_without_torch(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").touch()
    done, modules = started(tmp_path, *words.format("runs/typo").split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "runs/typo" in done.stderr
    assert not modules & HEAVY


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder of a training that took two steps."""
    out = tmp_path_factory.mktemp("starts") / "run"
    words = ["finetune", "digits", "--model", "ViT-Ti/4", "--image-size", 8, "--steps", 2, "--batch", 8]
    words += ["--set", "model_options=width=16,depth=1,heads=1,hidden=16", "--out", out, "--json"]
    assert run(*words, "--subset", "60", "--workers", 0) == 0
    return out


def test_a_report_is_drawn_without_torch(trained, tmp_path):
    before = (trained / "report.html").read_text()
    done, modules = started(tmp_path, "report", trained)
    assert done.returncode == 0 and not modules & HEAVY
    assert (trained / "report.html").read_text() == before


@pytest.mark.parametrize("file", ["model.safetensors", "official.npz"])
@pytest.mark.slow
def test_predict_imports_torch_and_little_else(trained, tmp_path, file):
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    if file == "official.npz":  # whose q, k and v are arrays of their own
        assert run("convert", trained, tmp_path / file) == 0
    model = (trained if file == "model.safetensors" else tmp_path) / file
    done, modules = started(tmp_path, "predict", model, tmp_path / "a.png", "--json")
    assert done.returncode == 0 and "torch" in modules
    needless = {"matplotlib", "tensorboard", "torch.utils.tensorboard", "torch._dynamo", "torch._inductor",
                "sympy", "onnx", "onnxruntime", "openvino", "pyarrow", "scipy", "pandas",
                "torch.distributed.checkpoint", "torch.distributed.fsdp"}  # fmt: skip
    assert not modules & needless
    assert not {name for name in modules if name.startswith(("vitkit.studies", "vitkit.training.logging"))}


def test_recipes_of_a_report_are_those_of_the_code():
    from vitkit.recipes import RECIPES

    assert set(listing.table()["recipe_fields"]) == set(RECIPES)
    assert listing.recipe_fields("no such recipe") == {} and listing.is_finetuning("pets")
