"""The commands in Python: the same results as on the command line, as values, and nothing printed unasked."""

import doctest
import inspect
import json
import os
import re
import signal
import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from test_cli import run as command
from test_tasks import TINY

import vitkit
from vitkit import api
from vitkit.cli.arguments import arguments_of
from vitkit.cli.verbs import VERBS
from vitkit.commands import results
from vitkit.inference.predict import view_of
from vitkit.options import Training

SET = {"model_options": "width=32,depth=1,heads=2,hidden=32", "evaluations": 0, "schedule.warmup": 1}
SAME: api.TrainingOptions = {  # as TINY
    "model": "ViT-Ti/4", "image_size": 8, "steps": 6, "batch": 16, "workers": 0, "set": SET,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> vitkit.Run:
    return vitkit.finetune("digits", out=tmp_path_factory.mktemp("api") / "run", **SAME)


@pytest.fixture
def digit() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (11, 9, 3), dtype=np.uint8)


def test_a_run_in_python_is_the_run_of_the_command(trained, tmp_path, capfd):
    assert command("finetune", "digits", "--out", tmp_path / "cli", *TINY, "--json") == 0
    printed = json.loads(capfd.readouterr().out)
    for name in ("model.safetensors", "recipe.json"):
        assert (trained.folder / name).read_bytes() == (tmp_path / "cli" / name).read_bytes()
    assert trained.metrics.to_json() == printed["test"] and trained.result["steps"] == printed["steps"] == 6
    again = vitkit.finetune("digits", out=trained.folder, **SAME)
    assert again.result == trained.result and again.folder == trained.folder, "it is finished"
    assert capfd.readouterr() == ("", ""), "nothing is printed unless it is asked for"


def test_a_run_shows_what_it_is(trained):
    fresh = vitkit.Run(trained.folder)
    assert re.fullmatch(r"Run\('.*/run', steps=6, Metrics\(top1=0\.\d+, .*images=179\)\)", repr(fresh))
    assert len(repr(fresh)) < 300 and "model" not in vars(fresh), "the model is loaded when it is asked for"
    assert fresh.metrics.top1 == fresh.metrics["top1"] and fresh.metrics.images == 179
    assert fresh.model is fresh.model and fresh.model.labels == tuple("0123456789")
    assert fresh.recipe.batch == 16 and fresh.recipe.data == "digits"
    assert fresh.report == trained.folder / "report.html" and "<html" in fresh.report.read_text()
    assert "srcdoc=" in fresh.report._repr_html_() and "report.html" in fresh._repr_html_()
    assert os.fspath(fresh) == str(trained.folder)
    assert vitkit.predict(fresh, np.zeros((8, 8, 3), np.uint8)) == vitkit.predict(
        fresh.model, np.zeros((8, 8, 3), np.uint8)
    )


def test_a_run_has_its_history_and_its_mistakes(trained, tmp_path):
    losses = [row["loss"] for row in trained.history if "loss" in row]
    assert len(losses) == 6 and trained.history[0]["step"] == 1
    wrong, metrics = trained.mistakes, trained.metrics
    assert len(wrong) == round((1 - metrics.top1) * metrics.images) > 0
    assert (
        wrong[0].keys() == {"file", "truth", "said", "confidence"} and wrong[0]["truth"] != wrong[0]["said"]
    )
    assert [row["confidence"] for row in wrong] == sorted((row["confidence"] for row in wrong), reverse=True)
    shown = wrong._repr_html_()
    assert shown.count("<figure") == results.PICTURES and f"{len(wrong)} mistakes" in shown
    (tmp_path / "recipe.json").write_bytes((trained.folder / "recipe.json").read_bytes())
    (tmp_path / "result.json").write_bytes((trained.folder / "result.json").read_bytes())
    assert vitkit.Run(tmp_path).history == []
    with refused("run.not-found", "mistakes.csv"):
        _ = vitkit.Run(tmp_path).mistakes


def test_metrics_show_their_worst_classes_in_a_notebook(trained):
    shown = trained.metrics._repr_html_()
    worst = min(row["accuracy"] for row in trained.metrics["per_class"].values())
    cells = re.findall(r"<td>([\d.]+) %</td>", shown)
    assert len(cells) == 10 and cells[0] == f"{100 * worst:.1f}" and cells == sorted(cells, key=float)
    few = vitkit.Metrics({"top1": 0.5, "per_class": {"<b>": {"images": 2, "accuracy": 0.5}}}, ["a < b"])
    assert "&lt;b&gt;" in few._repr_html_() and "a &lt; b" in few._repr_html_()


def test_an_inspection_is_that_of_the_command(trained, tmp_path):
    result = vitkit.inspect_model(trained, "digits", most=3)
    assert command("inspect", trained.folder, "digits", "--images", 3, "--out", tmp_path / "cli") == 0
    with np.load(tmp_path / "cli" / "arrays.npz") as arrays:
        assert arrays.files == list(result.arrays)
        for name in arrays.files:
            np.testing.assert_array_equal(arrays[name], result.arrays[name])
    drawn = json.loads((tmp_path / "cli" / "facts.json").read_text(encoding="utf-8"))["figures"]
    assert drawn == list(result.figures)
    filters = result.figures["filters"]._repr_png_()
    assert filters == (tmp_path / "cli" / "figures" / "filters.png").read_bytes()
    assert result._repr_png_() == (tmp_path / "cli" / "contact-sheet.png").read_bytes()


def test_an_inspection_of_pictures_in_any_form(trained, digit):
    alone = vitkit.inspect_model(trained.model)
    assert "rollout" not in alone.arrays and alone.facts["skipped"]["rollout"] == "needs images"
    assert list(alone.figures) == ["filters", "position-similarity"] and "filters" in repr(alone)
    one, two = (
        vitkit.inspect_model(trained, digit),
        vitkit.inspect_model(trained.folder, [digit, digit[::-1]]),
    )
    look = vitkit.inspect(trained, digit)
    np.testing.assert_allclose(one.arrays["rollout"][0], look.rollout, atol=1e-6)
    assert two.arrays["images"].shape[0] == 2 and two.facts["shown"][1]["image"] == "image 1"
    with refused("request.value", "most=0"):
        vitkit.inspect_model(trained, digit, most=0)
    with refused("request.value", "Linear"):
        vitkit.inspect_model(torch.nn.Linear(2, 2))


def test_a_page_that_is_missing_is_drawn(trained, tmp_path):
    for path in trained.folder.glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert vitkit.Run(tmp_path).report.is_file()


def test_ctrl_c_keeps_the_work_and_the_same_call_resumes(tmp_path):
    longer = SAME | {"steps": 60}
    straight = vitkit.finetune("digits", out=tmp_path / "straight", **longer)
    rows = tmp_path / "stopped" / "metrics.jsonl"

    def interrupt() -> None:
        while not rows.exists() or len(rows.read_text().splitlines()) < 3:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    with pytest.raises(KeyboardInterrupt, match="the same command resumes"):
        vitkit.finetune("digits", out=tmp_path / "stopped", **longer)
    watcher.join()
    with refused("run.not-found", "stopped"):
        vitkit.Run(tmp_path / "stopped")
    resumed = vitkit.finetune("digits", out=tmp_path / "stopped", **longer)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])
    assert resumed.metrics == straight.metrics


def test_a_run_in_a_thread_that_gets_no_signals(tmp_path, trained):
    done: list[vitkit.Run] = []
    one = threading.Thread(target=lambda: done.append(vitkit.finetune("digits", out=tmp_path / "r", **SAME)))
    one.start()
    one.join()
    assert done[0].metrics == trained.metrics


def test_progress_is_on_standard_error(tmp_path, capfd):
    vitkit.finetune("digits", out=tmp_path / "r", progress=True, **SAME)
    out, err = capfd.readouterr()
    assert not out and "6 steps of 16 images" in err and "6/6" in err


def test_a_plan_does_nothing_and_is_that_of_the_command(tmp_path, capsys):
    made = vitkit.finetune("digits", out=tmp_path / "r", plan=True, **SAME)
    assert isinstance(made, vitkit.Plan) and made.steps == 6 and not made.out.exists()
    assert "Would create" in repr(made) and "6 steps" in str(made)
    assert command("finetune", "digits", "--out", tmp_path / "r", *TINY, "--plan", "--json") == 0
    other = json.loads(capsys.readouterr().out)
    measured = {"seconds", "time", "memory_free_GB", "largest_batch_at_once"}
    assert {k: v for k, v in made.to_json().items() if k not in measured} == {
        k: v for k, v in other.items() if k not in measured
    }


def test_pretraining_and_the_protocol_are_runs_too(tmp_path):
    first = vitkit.pretrain("digits", out=tmp_path / "pre", **SAME)
    assert first.recipe.name == "pretrain" and first.metrics.images > 0
    words = {"image_size": 8, "steps": 2, "batch": 16, "workers": 0, "set": {"rates": (0.01,)}}
    tuned = vitkit.finetune("digits", weights=first, out=tmp_path / "p", protocol=True, seeds=2, **words)
    assert len(tuned.result["seeds"]) == 2 and tuned.recipe.weights == str(first.folder)
    assert tuned.recipe.train_on == "train+val" and tuned.model.labels and tuned.report.is_file()


@pytest.mark.parametrize("form", ["run", "folder", "file", "model"])
def test_an_evaluation_is_that_of_the_command(trained, form, capfd):
    given = {"run": trained, "folder": str(trained.folder), "file": trained.folder / "model.safetensors"}
    metrics = vitkit.evaluate(given.get(form, trained.model), "digits", batch=50, split="all", workers=0)
    assert capfd.readouterr() == ("", "")
    words = ("--batch", 50, "--split", "all", "--workers", 0, "--json")
    assert command("evaluate", trained.folder, "digits", *words) == 0
    printed = json.loads(capfd.readouterr().out)
    known = {"matched_by", "counted", "not_counted", "parts"}  # a model alone knows no images of its run
    left_out = known if form == "model" else set()
    assert {k: v for k, v in metrics.items() if k not in left_out} == {
        k: v for k, v in printed.items() if k not in left_out
    }
    assert bool(metrics.notes) == (form == "model") and metrics.top5 == printed["top5"]


def test_another_view_leaves_the_model_as_it_was(trained):
    before = trained.model.preprocessing
    seen = vitkit.evaluate(trained.model, "digits", view="centre", workers=0)["view"]
    assert "central" in seen and trained.model.preprocessing == before


def test_features_are_those_of_the_model(trained, digit, tmp_path):
    pictures = [np.roll(digit, i, axis=0) for i in range(5)]
    model = trained.model
    with torch.no_grad():
        views = torch.stack([view_of(one, model) for one in pictures])
        mean, std = (
            torch.tensor(v)[:, None, None] for v in (model.preprocessing.mean, model.preprocessing.std)
        )
        want = model.features((views / 255 - mean) / std).numpy()
    rows = vitkit.embed(trained, pictures, batch=2)
    assert rows.shape == (5, 32) and rows.dtype == np.float32 and np.allclose(rows, want, atol=1e-5)
    assert np.allclose(vitkit.embed(model, (one for one in pictures)), want, atol=1e-5)
    assert np.allclose(vitkit.embed(trained.folder, pictures[3]), want[3], atol=1e-5)
    Image.fromarray(digit).save(tmp_path / "0.png")
    assert np.allclose(vitkit.embed(model, tmp_path / "0.png"), want[0], atol=1e-5)
    assert vitkit.embed(model, []).shape == (0, 32)
    assert not np.allclose(want[0], want[1], atol=1e-5), "the control: pictures differ"


@pytest.mark.slow
def test_an_exported_run_predicts_the_same(trained, digit, tmp_path, capfd):
    pytest.importorskip("onnxruntime")
    done = vitkit.export(trained, tmp_path / "m.onnx")
    assert isinstance(done, vitkit.Exported) and done.files == (tmp_path / "m.onnx",) and done.compared
    assert capfd.readouterr().out == ""
    ours, theirs = vitkit.predict(trained, digit, top=10), vitkit.predict(tmp_path / "m.onnx", digit, top=10)
    assert dict(theirs) == pytest.approx(dict(ours), abs=1e-5)
    with refused("file.exists", "m.onnx"):
        vitkit.export(trained.model, tmp_path / "m.onnx")
    with refused("model.unsupported", "m.onnx"):
        vitkit.embed(tmp_path / "m.onnx", digit)


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        ({"stepz": 3}, "request.unknown", "steps"),
        ({"steps": 0}, "request.value", "0"),
        ({"steps": "ten"}, "request.value", "ten"),
        ({"steps": True}, "request.value", "True"),
        ({"steps": 5, "epochs": 1.0}, "request.conflict", "epochs"),
        ({"lr": float("nan")}, "request.value", "nan"),
        ({"keep": "worst"}, "request.value", "best, last"),
        ({"image_size": "wide"}, "request.value", "wide"),
        ({"image_size": (8, 8, 8)}, "request.value", "8x8x8"),
        ({"subset": "lots"}, "request.value", "lots"),
        ({"device": "toaster"}, "request.value", "toaster"),
        ({"compile": 1}, "request.value", "compile=1"),
        ({"weights": 3}, "request.value", "weights=3"),
        ({"out": 3}, "request.value", "out=3"),
        ({"seeds": 0}, "request.value", "seeds=0"),
        ({"seeds": "two"}, "request.value", "two"),
        ({"data": 3}, "request.value", "data=3"),
    ],
    ids=str,
)
def test_bad_arguments_are_errors_with_a_code(words, code, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(code, value):
        vitkit.finetune(**({"data": "digits", "model": "ViT-Ti/4"} | words))
    assert not list(tmp_path.iterdir())


def test_bad_arguments_of_the_others(trained, digit):
    with refused("request.value", "batch=0"):
        vitkit.evaluate(trained, "digits", batch=0)
    with refused("request.value", "sideways"):
        vitkit.embed(trained, digit, view="sideways")
    with refused("request.value", "Linear"):
        vitkit.evaluate(torch.nn.Linear(2, 2), "digits")
    with refused("request.conflict", "cpu"):
        vitkit.embed(trained.model, digit, device="cpu")
    with refused("request.value", "fp7"):
        vitkit.export(trained, "m.onnx", precision="fp7")
    with refused("run.not-found", "nowhere"):
        vitkit.Run("nowhere")


@pytest.mark.parametrize("verb", ["finetune", "pretrain", "evaluate", "export"])
def test_keywords_are_the_options_of_the_command(verb):
    """By their names, and with the same defaults."""
    own = inspect.signature(getattr(vitkit, verb)).parameters
    flags = {
        argument.flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
        for argument in arguments_of(VERBS[verb])
        if not argument.positional
    }
    keywords = {name for name, one in own.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == flags - {"json"} | {"progress"}
    theirs = inspect.signature(VERBS[verb]).parameters
    defaults = {field.name: field.default for field in fields(Training)} if "training" in theirs else {}
    defaults |= {name: one.default for name, one in theirs.items()}
    assert {name: own[name].default for name in keywords - {"progress"}} == {
        name: defaults[name] for name in keywords - {"progress"}
    }
    positional = [name for name, one in own.items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [name for name in theirs if name in ("model", "data", "out")][: len(positional)]


class Asked(Exception):
    """Where a request has come to the function that the commands and Python share."""


@pytest.mark.parametrize(
    ("verb", "keywords", "words"),
    [
        ("finetune", {"image_size": (32, 48), "lr": 0.01, "protocol": True, "seeds": 2},
         ["--image-size", "32x48", "--lr", 0.01, "--protocol", "--seeds", 2]),
        ("finetune", {"set": {"mixup": 0.2, "flip": False, "rates": (0.1, 0.2), "schedule.warmup": 3}},
         ["--set", "mixup=0.2", "flip=False", "rates=0.1,0.2", "schedule.warmup=3"]),
        ("finetune", {"set": ["mixup=0.2"], "subset": 100, "out": "x", "cuda_graph": False, "keep": "last"},
         ["--set", "mixup=0.2", "--subset", 100, "--out", "x", "--no-cuda-graph", "--keep", "last"]),
        ("finetune", {"weights": Path("m.npz"), "track": "wandb", "against": [Path("a"), "b"], "plan": True},
         ["--weights", "m.npz", "--track", "wandb", "--against", "a", "b", "--plan"]),
        ("pretrain", {"epochs": 2, "image_size": 64, "device": "cpu", "price_per_hour": 2},
         ["--epochs", 2.0, "--image-size", 64, "--device", "cpu", "--price-per-hour", 2.0]),
    ],
    ids=str,
)  # fmt: skip
def test_a_call_asks_for_what_the_command_asks_for(verb, keywords, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("m.npz", "a.csv"):
        Path(name).touch()
    asked = []

    def note(request, *, progress):
        asked.append(request)
        raise Asked

    monkeypatch.setattr(api, "execute", note)
    monkeypatch.setattr("vitkit.commands.finetune.execute", note)
    with pytest.raises(Asked):
        getattr(vitkit, verb)("digits", **keywords)
    with pytest.raises(Asked):
        command(verb, "digits", *words)
    assert asked[0] == asked[1]


def test_the_typed_options_are_those_of_the_commands():
    assert {*api.TrainingOptions.__annotations__, "plan"} == {field.name for field in fields(Training)}


@pytest.mark.slow
def test_the_examples_in_docstrings_and_on_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, finder = doctest.DocTestRunner(), doctest.DocTestFinder(recurse=False)
    for name in ("finetune", "pretrain", "evaluate", "embed", "inspect_model", "export", "Metrics"):
        for test in finder.find(getattr(api, name), name, globs={"Metrics": results.Metrics}):
            assert test.examples
            assert not runner.run(test).failed, name
    page = (Path(__file__).parent.parent / "docs" / "reference" / "python.md").read_text()
    (tmp_path / "page").mkdir()
    monkeypatch.chdir(tmp_path / "page")
    blocks, names = re.findall(r"```python\n(.*?)```", page, re.S), {}
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "python.md", "exec"), names)
