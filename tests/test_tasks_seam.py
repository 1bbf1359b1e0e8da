"""A fourth task in one file: it trains, resumes, evaluates, reports, exports, predicts and serves."""

import ast
import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, rows, same, tiny
from test_house import FILES, SRC
from torch import Tensor, nn

import vitkit
from vitkit.data.views import normalise
from vitkit.inference.predict import pixels
from vitkit.models.variants import Model
from vitkit.recipes.recipe import Recipe
from vitkit.runs.folder import Interrupted
from vitkit.server.app import answer
from vitkit.server.served_model import open_served
from vitkit.server.settings import Settings
from vitkit.tasks import task as registry
from vitkit.tasks.task import (
    Answer,
    Batch,
    Evaluation,
    Headline,
    Objective,
    Task,
    register,
    task_class,
    task_names,
    task_of,
)
from vitkit.training.checkpoint import complete
from vitkit.training.schedule import Duration

# ---- the whole of the fourth task ----


@dataclass(frozen=True)
class Error:
    """The mean absolute error of a brightness from 0 to 1."""

    images: int
    loss: float
    mae: float

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Value(Answer):
    """One number of an image."""

    brightness: float

    @property
    def value(self) -> float:
        return self.brightness

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self, image: str, *, unsure: bool = False, width: int = 1 << 30, alone: bool = False) -> str:
        return f"{image}: brightness {self.brightness:.3f}"

    def cells(self) -> list[tuple[Any, ...]]:
        return [(self.brightness,)]


def brightness(images: Tensor) -> Tensor:
    """uint8 (B, C, H, W) -> (B,), from 0 to 1."""
    return images.float().mean((1, 2, 3)) / 255


class Damped(nn.Module):
    """The model with a scale that is learned beside it and not kept."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images) * self.scale


@dataclass(frozen=True, kw_only=True)
class Brightness(Task):
    """The mean brightness of an image, as a regression."""

    name: ClassVar[str] = "brightness"
    headline: ClassVar[Headline] = Headline("mae", "mean absolute error", higher=False, percent=False)
    metric_names: ClassVar[tuple[str, ...]] = ("mae",)
    labelled: ClassVar[bool] = False
    unused_fields: ClassVar[tuple[str, ...]] = ("mixup", "label_smoothing")
    about: ClassVar[str] = "to estimate brightness"
    columns: ClassVar[tuple[str, ...]] = ("brightness",)

    def labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return ("brightness",)

    def build(self, model: Model) -> nn.Module:
        return Damped(model)

    def extract(self, module: nn.Module) -> Model:
        return module.model if isinstance(module, Damped) else module

    def objective(self, model: Model) -> Objective:
        p = model.preprocessing

        def loss(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
            off = module(normalise(batch["image"], p.mean, p.std)).float()[:, 0] - brightness(batch["image"])
            return {"loss": off.square().mean(), "mae": off.abs().mean()}

        return loss

    def outputs(self, module: nn.Module, batch: Batch, context: Evaluation) -> Tensor:
        values = context.forward(self.extract(module), batch["image"])[:, 0]
        return (values - brightness(batch["image"]))[:, None].double()

    def evaluate(self, module: nn.Module, batches: Iterable[Batch], context: Evaluation) -> Error:
        off = context.gather(torch.cat([self.outputs(module, batch, context) for batch in batches]))
        return Error(len(off), float(off.square().mean()), float(off.abs().mean()))

    def answers(self, model: Any, values: Tensor, top: int) -> list[Answer]:
        return [Value(float(value)) for value in values[:, 0]]


# ---- its tests ----


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(Brightness)
    yield
    del registry.REGISTERED["brightness"]


def recipe(**changes) -> Recipe:
    base = {"objective": "brightness", "mixup": 0.0, "keep": "best", "length": Duration(steps=24)}
    made = tiny(**(base | changes))
    return replace(made, schedule=replace(made.schedule, rate=0.01))


@pytest.fixture(scope="module")
def straight(registered, tmp_path_factory):
    out = tmp_path_factory.mktemp("tasks") / "straight"
    go(out, recipe())
    return out


@pytest.fixture
def pictures(tmp_path):
    """A dark, a grey and a bright picture, without labels."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, value in {"dark": 20, "grey": 128, "light": 230}.items():
        Image.fromarray(np.full((16, 16, 3), value, np.uint8)).save(folder / f"{name}.png")
    return folder


def test_it_trains_and_keeps_the_weights_that_did_best_by_its_own_metric(straight):
    result = json.loads((straight / "result.json").read_text())
    seen = [row["val_mae"] for row in rows(straight) if "val_mae" in row]
    assert len(seen) == 3 and result["kept"]["weights"] == "best" and result["kept"]["val_top1"] is None
    assert result["kept"]["val_mae"] == min(seen) < seen[0]
    assert set(result["test"]) == {"images", "loss", "mae", "split"} and result["test"]["images"] == 179
    assert {"test_mae", "test_loss", "test_images"} <= set(rows(straight)[-1])
    assert all("mae" in row for row in rows(straight)[:7])  # each step's too
    model = vitkit.load(straight)
    assert model.task == "brightness" and model.labels == ("brightness",) and model.config.classes == 1
    assert not [name for name in model.state_dict() if "scale" in name]


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_killed_run_resumes_with_equal_bytes(straight, tmp_path, keep):

    if keep == "last":
        straight = tmp_path / "straight"
        go(straight, recipe(keep="last"))
    out = tmp_path / "run"
    with sigterm_at(10), pytest.raises(Interrupted):
        go(out, recipe(keep=keep))
    assert "Not finished" in (vitkit_report(out)).read_text()
    go(out, recipe(keep=keep))
    assert same(straight, out)
    assert (straight / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    last = [complete(at / "checkpoints")[-1] / "state-00000.safetensors" for at in (straight, out)]
    assert last[0].read_bytes() == last[1].read_bytes()
    tests = [json.loads((at / "result.json").read_text())["test"] for at in (straight, out)]
    assert tests[0] == tests[1]
    assert run("report", straight, out, "--out", tmp_path / "both.html") == 0  # side by side


def vitkit_report(out: Path) -> Path:
    assert run("report", out) == 0
    return out / "report.html"


def test_the_report_shows_its_metric_and_is_drawn_again_without_the_task(straight):
    page = (straight / "report.html").read_text()
    test = json.loads((straight / "result.json").read_text())["test"]
    output = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    assert f"mean absolute error {test['mae']:.4g}" in output and "on 179 test images" in output
    assert "to estimate brightness" in output and f"vitkit predict {straight}" in output
    assert page.count("mean absolute error") > 2  # the curve has it too
    code = "import sys; from vitkit.cli import main; main(['report', sys.argv[1]])"  # it knows no such task
    done = subprocess.run([sys.executable, "-c", code, straight], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (straight / "report.html").read_text() == page


def test_it_is_trained_evaluated_and_predicted_with_by_the_commands(pictures, tmp_path, capsys):
    out = tmp_path / "by-command"
    words = ["--model", "ViT-Ti/4", "--image-size", "8", "--batch", "16", "--steps", "6", "--workers", "0"]
    fields = ["objective=brightness", "model_options=width=32,depth=1,heads=2,hidden=32", "evaluations=2"]
    assert run("finetune", "digits", "--out", out, *words, "--set", *fields, "schedule.warmup=1") == 0
    printed = capsys.readouterr().out
    assert "mean absolute error" in printed and "179 test images" in printed and "vitkit predict" in printed
    assert run("evaluate", out, "digits", "--workers", 0) == 0
    mae = json.loads((out / "result.json").read_text())["test"]["mae"]
    assert f"mean absolute error {mae:.4g} on 179 test images" in capsys.readouterr().out
    assert run("evaluate", out, pictures, "--split", "all", "--workers", 0, "--json") == 0  # without labels
    actual = json.loads(capsys.readouterr().out)
    assert actual["images"] == 3 and actual["mae"] > 0 and "per_class" not in actual


def test_it_predicts_a_number_in_every_form(straight, pictures, capsys):
    files = sorted(pictures.glob("*.png"))
    values = vitkit.predict(straight, files)
    assert values == pytest.approx([vitkit.predict(straight, file) for file in files], abs=1e-6)
    assert values[0] < values[1] < values[2]  # dark, grey, light
    assert run("predict", straight, *files, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert [set(row) for row in output] == [{"image", "brightness"}] * 3
    assert [row["brightness"] for row in output] == pytest.approx(values, abs=1e-6)
    assert run("predict", straight, *files) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{files[0]}: brightness {values[0]:.3f}"
    assert run("predict", straight, *files, "--csv") == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["brightness"]) for row in table] == pytest.approx(values, abs=1e-6)
    assert run("predict", straight, *files, "--sort-into", pictures / "sorted") == 2


@pytest.mark.parametrize("pixels", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.slow
def test_it_is_exported_and_predicts_from_the_file(straight, pictures, tmp_path, capsys, pixels):
    pytest.importorskip("onnxruntime")
    out, images = tmp_path / "model.onnx", sorted(pictures.glob("*.png"))
    assert run("export", straight, out, "--json", *(["--pixels"] if pixels else [])) == 0
    assert json.loads(capsys.readouterr().out)["output"] == "outputs"
    assert vitkit.predict(out, images) == pytest.approx(vitkit.predict(straight, images), abs=1e-4)


def test_the_service_answers_with_its_number(straight, pictures):
    settings = Settings(model=str(straight), device="cpu", engine="torch")
    served = open_served(settings)
    assert served.describe(settings)["task"] == "brightness"
    for file in pictures.glob("*.png"):
        values = served.engine(pixels(file.read_bytes(), served.model)[None])
        assert answer(served, values, 5) == {"brightness": pytest.approx(vitkit.predict(straight, file))}


def test_its_model_file_is_read_where_the_task_is_not_known_and_not_predicted_with(straight, monkeypatch):
    monkeypatch.delitem(registry.REGISTERED, "brightness")
    model = vitkit.load(straight)
    assert model.task == "brightness"
    with refused("model.unsupported", "brightness", "classify", "masked", "multilabel"):
        vitkit.predict(model, np.zeros((8, 8, 3), np.uint8))


def test_a_model_of_another_task_starts_it_and_it_starts_another(straight, tmp_path):
    go(tmp_path / "a", recipe(weights=str(straight), model="", model_options=(), length=Duration(steps=2)))
    assert vitkit.load(tmp_path / "a").task == "brightness"
    classes = tiny(weights=str(straight), model="", model_options=(), length=Duration(steps=2))
    go(tmp_path / "b", classes)
    model = vitkit.load(tmp_path / "b")
    assert task_of(model).name == "classify" and model.labels == tuple("0123456789")


def test_a_recipe_refuses_what_the_task_has_no_use_for():
    with refused("recipe.value", "objective=brightness", "mixup"):
        recipe(mixup=0.2)


# ---- the registry ----


def test_every_file_of_the_room_is_a_task_and_no_other_file_lists_them():
    names = {path.stem for path in (SRC / "tasks").glob("*.py")} - {"__init__", "task"}
    assert names == set(task_names()) - {"brightness"} >= {"classify", "masked", "multilabel"}
    assert all(task_class(name).name == name for name in names)
    listing = (SRC / "tasks/task.py").read_text()
    assert not [name for name in names if f'"{name}"' in listing]


def test_only_the_room_asks_which_task_it_is():
    """Nothing else branches on a recipe's objective or on a task's module or metrics."""
    asked = []
    for path in FILES:
        if SRC / "tasks" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Compare | ast.Call) else ""
            if re.match(r"isinstance\(.*(MaskedViT|Accuracy|Masked|Classify|Multilabel)\b", text) or (
                isinstance(node, ast.Compare) and re.search(r"\bobjective\b", text)
            ):
                asked.append(f"{path.name}: {text}")
    assert not asked
