"""The study of recipes: one change at a time around a base, paired by seed, stopped and continued."""

import csv
import json

import pytest
from refusals import refused
from test_cli import run

from vitkit.datasets.opening import data_and_part
from vitkit.models.variants import configure, fresh, with_options
from vitkit.recipes.values import ModelOptions
from vitkit.studies.differences import changes_from_base
from vitkit.studies.folder import read_plan
from vitkit.studies.prepare import Request
from vitkit.studies.recipe_changes import CHANGES, Change, base_recipe, changed, labels, recipes
from vitkit.studies.recipe_plan import select
from vitkit.studies.scale import STUDIES
from vitkit.studies.setting import Setting
from vitkit.weights.save import save

TINY = ModelOptions(width=16, depth=1, heads=2, hidden=16)
S = Setting(data=("a.npz", "b/:25/class"), downstream="", weights="w.npz", pixels=224, steps=0, seeds=2,
            sizes=(10_000, 250))  # fmt: skip


@pytest.mark.parametrize(
    "text, data, fields",
    [
        ("digits", "digits", {}),
        ("a.npz:10000", "a.npz", {"subset": "10000"}),
        ("photos/:25/class,noise=0.2", "photos/", {"subset": "25/class", "label_noise": 0.2}),
        ("photos:imbalanced", "photos", {"subset": "imbalanced=100"}),
        ("photos:imbalanced=20", "photos", {"subset": "imbalanced=20"}),
        ("https://host/data.zip", "https://host/data.zip", {}),
        (r"C:\photos", r"C:\photos", {}),
        ("vtab:pets:/data", "vtab:pets:/data", {}),
        ("digits:noise=much", "digits:noise=much", {}),
    ],
)
def test_data_with_a_part(text, data, fields):
    assert data_and_part(text) == (data, fields)


def test_the_base_recipe_and_its_length():
    large, small = base_recipe(S, "a.npz", 10_000, 1), base_recipe(S, "b/:25/class", 250, 0)
    assert (large.data, large.subset, large.weights, large.seed) == ("a.npz", "", "w.npz", 1)
    assert (small.data, small.subset, small.batch, large.batch) == ("b/", "25/class", 16, 512)
    assert changed(large, Change(), 10_000).length.steps == round(15 * 10_000 / 512)
    assert changed(small, Change(), 250).length.steps == 20_000 / 16
    assert changed(small, CHANGES["half as long"], 250).length.steps == 10_000 / 16
    assert changed(small, Change(), 250).schedule.warmup == 125
    assert changed(small, CHANGES["no warm-up"], 250).schedule.warmup == 0
    paper = changed(large, CHANGES["paper"], 10_000)
    assert (paper.optimizer.kind, paper.schedule.rate, paper.mixup, paper.crop) == (
        "sgd", 0.01, 0.0, "inception",
    )  # fmt: skip
    assert large.keep == "last" and large.patience == large.evaluations == 0


def test_one_change_at_a_time_and_none_that_changes_nothing():
    trials = recipes(S)
    names = list(dict.fromkeys(trial.factors["change"] for trial in trials))
    assert set(CHANGES) - set(names) == {"image size 224"}  # which is that of the base
    assert len(trials) == 2 * 2 * len(names) == len({trial.recipe for trial in trials})
    assert [trial.recipe.seed for trial in trials] == sorted(trial.recipe.seed for trial in trials)
    assert {trial.factors["data"] for trial in trials} == {"a", "b 25/class"}
    assert labels(["x/train.npz", "y/train.npz"]) == ["x/train.npz", "y/train.npz"]
    chosen = select(trials, ["warm-up", "160"])
    assert {t.factors["change"] for t in chosen} == {"base", "no warm-up", "warm-up 30 %", "image size 160"}
    with refused("study.value", "mixxup", "no mixup"):
        select(trials, ["mixxup"])


def test_differences_are_paired_by_seed_and_averaged_over_data_sets():
    scores = {
        ("base", "a"): (0.50, 0.60), ("base", "b"): (0.70, 0.70),
        ("up", "a"): (0.52, 0.61), ("up", "b"): (0.71, 0.72),
        ("down", "a"): (0.40, 0.51), ("down", "b"): (0.62, None), ("alone", "c"): (0.9, 0.9),
    }  # fmt: skip
    rows = [
        {"change": change, "data": data, "seed": seed, "top1": value}
        for (change, data), values in scores.items()
        for seed, value in enumerate(values)
    ]
    up, down = changes_from_base(STUDIES["recipes"], rows)
    assert (up["change"], down["change"]) == ("up", "down")
    assert up["data"]["a"]["mean"] == pytest.approx(0.015) and up["data"]["a"]["count"] == 2
    assert up["mean"]["mean"] == pytest.approx(0.015) and up["outcome"] == "better"
    assert up["mean"]["low"] == pytest.approx(0.015)  # 0.015 in both seeds
    assert up["data"]["a"]["high"] == pytest.approx(0.015 + 12.706 * 0.005, rel=1e-3)
    assert down["data"]["b"]["low"] is None and down["mean"]["mean"] == pytest.approx(-0.09)
    assert down["outcome"] == "inconclusive"  # only one seed has both data sets


def test_flags_that_a_study_does_not_take_are_refused():
    with refused("request.missing", "--weights"):
        Request(study="recipes", data=("digits",))
    for flag, value in (("downstream", "digits"), ("size", 1), ("scale", "paper")):
        with refused("request.conflict", f"--{flag}", "recipes"):
            Request(study="recipes", data=("digits",), weights="w", **{flag: value})
    with refused("request.conflict", "--weights"):
        Request(study="heads", data=("digits",), weights="w")


@pytest.mark.slow
def test_the_study_is_stopped_by_its_budget_continued_and_reported(tmp_path, capsys):
    config = with_options(configure("ViT-Ti/4", classes=5, image_size=(16, 16)), TINY)
    save(fresh(config, seed=0), tmp_path / "w.safetensors")
    out = tmp_path / "study"
    words = ["study", "run", "recipes", "--weights", tmp_path / "w.safetensors", "--data", "digits:10/class",
             "digits:imbalanced=20,noise=0.2", "--image-size", 16, "--steps", 2, "--seeds", 2, "--device",
             "cpu", "--out", out, "--json", "--only", "no mixup"]  # fmt: skip
    assert run(*words, "--plan") == 0
    assert json.loads(capsys.readouterr().out)["changes"] == ["base", "no mixup"]
    assert run(*words, "--budget", "0.001s") == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 0
    assert run(*words) == 0  # with the default budget, which is not part of the plan
    summary = json.loads(capsys.readouterr().out)
    assert summary["finished"] == 8 and summary["trials"] == len(read_plan(out).trials) > 100
    (change,) = summary["changes"]
    assert change["change"] == "no mixup" and list(change["data"]) == [
        "digits 10/class", "digits imbalanced=20,noise=0.2",
    ]  # fmt: skip
    with (out / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    top1 = {(row["change"], row["data"], row["seed"]): float(row["top1"]) for row in table}
    for data, difference in change["data"].items():
        each = [top1["no mixup", data, seed] - top1["base", data, seed] for seed in "01"]
        assert difference["mean"] == pytest.approx(sum(each) / 2) and difference["count"] == 2
    assert {row["train_images"] for row in table} == {"100", "501"}
    assert not list(out.rglob("*.safetensors")) and len(list((out / "figures").glob("recipes-1.*"))) == 2
    page = (out / "page.html").read_text()
    assert "of 1 changes" in page and "no mixup" in page and "--weights" in page
    results = {path: path.stat().st_mtime for path in out.glob("trials/*/result.json")}
    assert run(*words, "half as long") == 0  # adds its own four trials
    assert json.loads(capsys.readouterr().out)["finished"] == 12
    assert all(path.stat().st_mtime == time for path, time in results.items())
