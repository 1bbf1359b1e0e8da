"""The same command gives the same run: its length follows data and device, and its flags what it keeps."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_cli import run
from test_learn import photos, published  # noqa: F401
from test_tasks import TINY

from vitkit.commands import finetune
from vitkit.options import Training
from vitkit.planning import automatic
from vitkit.planning import plan as planning
from vitkit.runs.build import SplitCache
from vitkit.runs.kept_weights import after_evaluation, best_notes, keeps_best
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import Classify

TOP1 = Classify.headline
LOOKS = [word for word in TINY if not word.startswith("evaluations")]


def test_the_measured_speed_does_not_change_the_recipe(photos, tmp_path, monkeypatch):  # noqa: F811
    published(monkeypatch, tmp_path)
    made, said = [], []
    for seconds in (0.001, 60.0, None):
        monkeypatch.setattr(planning, "seconds_a_step", lambda *_, seconds=seconds: seconds)
        options = Training(device="cpu", workers=0, out=tmp_path / "run")
        machine = planning.Machine(Runtime(), SplitCache(), said.append)
        made.append(planning.plan(finetune.finetuning(str(photos), options), machine).recipe)
    assert made[0] == made[1] == made[2] and made[0].length.steps == 500
    times = [text for text in said if text.startswith("500 steps of 8 images")]
    assert "about 0 s" in times[0] and "about 8.3 h" in times[1] and all("--steps" in one for one in times)


@pytest.mark.parametrize(
    "images, batch, cpu, gpu",
    [
        (24, 8, 500, 500),
        (300, 32, 400, 500),
        (1000, 64, 200, 500),
        (6400, 64, 200, 500),
        (10_000, 64, 313, 500),
        (20_000, 64, 625, 10_000),
        (500_000, 64, 15_625, 20_000),
        (600, 4096, 20, 500),
    ],
)
def test_the_length_by_images_and_kind_of_device(images, batch, cpu, gpu):
    assert automatic.steps_for(images, batch, gpu=False) == cpu
    assert automatic.steps_for(images, batch, gpu=True) == gpu


def test_the_chosen_weights_do_not_depend_on_what_is_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = [automatic.default_weights(gpu=gpu) for gpu in (False, True)]
    (tmp_path / "vitkit").mkdir()
    (tmp_path / "vitkit" / "ViT-S_16.augreg-i21k.npz").write_bytes(b"")
    assert [automatic.default_weights(gpu=gpu) for gpu in (False, True)] == before
    assert before == ["ViT-Ti/16.augreg-i21k", "ViT-B/16.augreg-i21k"]


def result_of(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize(
    "words, keep, patience",
    [
        ((), "best", 5),
        (("--keep", "last"), "last", 0),
        (("--patience", 0), "best", 0),
        (("--keep", "last", "--patience", 6), "last", 6),
        (("--recipe", "cifar10"), "auto", 0),
    ],
    ids=str,
)
def test_best_weights_and_an_early_stop_are_flags(words, keep, patience, tmp_path, capsys):
    assert run("finetune", "digits", "--out", tmp_path / "r", *words, *LOOKS) == 0
    recipe, told = json.loads((tmp_path / "r" / "recipe.json").read_text()), capsys.readouterr().out
    assert (recipe["keep"], recipe["patience"]) == (keep, patience)
    assert (tmp_path / "r" / "best.safetensors").exists() == (keep == "best")
    kept = result_of(tmp_path / "r")["kept"]
    assert kept["weights"] == ("best" if keep == "best" else "last") and kept["planned_steps"] == 6
    (line,) = [line for line in told.splitlines() if "kept the " in line]
    assert f"kept the {kept['weights']} weights" in line and "6 steps" in line


def test_a_run_that_gets_no_better_stops_early_and_says_so(tmp_path, capsys):
    words = ["finetune", "digits", "--out", tmp_path / "r", "--lr", 0, "--patience", 2, *LOOKS]
    assert run(*words, "evaluations=6") == 0
    result, (told, progress) = result_of(tmp_path / "r"), capsys.readouterr()
    lines = [line for line in progress.splitlines() if line.startswith("step ")]
    assert [line.count("; best ") for line in lines] == [1, 1, 1]
    counts = [re.findall(r"early after (\d) more", line) for line in lines]
    assert counts == [["2"], ["1"], []]
    assert result["steps"] == 3 and result["kept"]["stopped_early"] and result["kept"]["step"] == 1
    assert "stopped early at step 3 of 6; kept the best weights on validation, of step 1" in told


@pytest.mark.parametrize("words", [("--keep", "best"), ("--patience", 3)], ids=str)
def test_flags_that_need_validation_are_refused_without_it(words, tmp_path, capsys):
    assert run("finetune", "digits", "--out", tmp_path / "r", *words, *TINY) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"{words[0][2:]}={words[1]}" in told and "evaluations is 0" in told and not (tmp_path / "r").exists()
    )


def test_a_run_of_an_earlier_version_goes_on_as_it_was(tmp_path):
    words = ["finetune", "digits", "--out", tmp_path / "r", *LOOKS]
    assert run(*words) == 0
    path = tmp_path / "r" / "recipe.json"
    stored = json.loads(path.read_text())
    old = {name: value for name, value in stored.items() if name != "keep"} | {"patience": 0}
    path.write_text(json.dumps(old))
    (tmp_path / "r" / "result.json").unlink()  # as if it was stopped after its last step
    assert run(*words) == 0 and result_of(tmp_path / "r")["kept"]["weights"] == "last"


def test_equal_accuracies_are_decided_by_the_loss():
    memory = {"best": None, "since": 0}
    for step, (top1, loss) in enumerate([(0.9, 0.5), (0.9, 0.4), (0.9, 0.45), (0.8, 0.1), (1.0, 0.6)], 1):
        memory |= after_evaluation(memory, SimpleNamespace(top1=top1, loss=loss, images=10), TOP1, step)
        if step == 4:
            assert memory == {
                "best": 0.9, "best_loss": 0.4, "best_step": 2, "best_images": 10, "since": 2, "last": 0.8,
            }  # fmt: skip
    assert (memory["best_step"], memory["since"]) == (5, 0)
    old = {"best": 0.9, "since": 3}  # in a checkpoint of an earlier version
    assert after_evaluation(old, SimpleNamespace(top1=0.9, loss=0.2, images=10), TOP1, 7)["best_step"] == 7


@pytest.mark.parametrize("margin, best, last, images, kept", [
    (0.0, 0.96, 0.95, 250, True), (0.5, 0.96, 0.95, 250, True), (1.0, 0.96, 0.95, 250, False),
    (0.5, 0.96, 0.955, 250, False), (0.5, 0.9, 0.85, 20, True), (0.5, 0.9, 0.9, 250, False),
    (0.5, 1.0, 0.99, 250, True), (0.5, -0.3, -0.4, 250, True),
])  # fmt: skip
def test_earlier_weights_are_kept_only_if_they_are_better_by_the_margin(margin, best, last, images, kept):
    recipe = SimpleNamespace(keeps_best=True, keep_margin=margin)
    progress = {"best": best, "last": last, "best_images": images}
    assert keeps_best(recipe, progress) == kept
    assert not keeps_best(SimpleNamespace(keeps_best=False, keep_margin=margin), progress)
    assert not keeps_best(recipe, {"best": None})


def test_the_best_evaluation_and_when_the_run_stops_early():
    recipe, progress = SimpleNamespace(patience=3), {"best": None, "since": 0}
    assert best_notes(recipe, TOP1, progress, 5) == ()
    progress |= {"best": 0.912, "best_step": 300, "best_images": 1000}
    best = "best 91.2 % at step 300"
    stops = "stops early after 3 more evaluations without improvement"
    assert best_notes(recipe, TOP1, progress, 5) == (best, stops)
    assert best_notes(recipe, TOP1, progress, 3) == (best,)  # the third is the last one anyway
    assert best_notes(SimpleNamespace(patience=0), TOP1, progress, 5) == (best,)
    once = stops.replace("3 more evaluations", "1 more evaluation")
    assert best_notes(recipe, TOP1, progress | {"since": 2}, 3) == (best, once)
    assert best_notes(recipe, TOP1, progress | {"since": 3}, 3) == (best,)
    loss = replace(TOP1, key="loss", higher=False, percent=False)
    assert best_notes(recipe, loss, progress | {"best": -0.25}, 1) == ("best 0.25 at step 300",)
