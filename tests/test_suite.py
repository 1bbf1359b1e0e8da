"""suite as a verb: many tasks by one recipe, what is missing, whose means those are, and going on."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cli import run

import vitkit
from vitkit.commands.suite import Choice, Entry, task_recipe, with_means
from vitkit.datasets.vtab import TASKS
from vitkit.options import Training

sys.path.insert(0, str(Path(__file__).parent / "data" / "vtab"))
import formats

QUICK = ["--image-size", "16", "--batch", "8", "--workers", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A model, the files of two data sets of VTAB, and a folder of somebody's own."""
    root = tmp_path_factory.mktemp("suite")
    model = vitkit.build("ViT-Ti/8", classes=3, image_size=16, depth=1, width=32, heads=2, hidden=32)
    vitkit.save(model, root / "small.npz")
    formats.cifar100(root / "vtab" / "cifar100")
    formats.smallnorb(root / "vtab" / "smallnorb", 820, 480)
    for i in range(30):
        folder = root / "photos" / ("dark" if i % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 12, 3), i + 200 * (i % 2 == 0), np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def done(here):
    tasks = ["--tasks", "cifar100", "dtd", "snorb-azimuth", here / "photos"]
    command = ["suite", here / "small.npz", "--data", here / "vtab", *tasks, "--steps", "3", *QUICK,
               "--out", here / "out", "--json"]  # fmt: skip
    assert run(*command) == 0
    return command, json.loads((here / "out" / "suite.json").read_text())


def test_every_task_with_data_is_run_and_the_others_are_named(here, done):
    _, told = done
    rows = {row["task"]: row for row in told["tasks"]}
    assert list(rows) == ["cifar100", "snorb-azimuth", "photos"] and told["waiting"] == 0
    assert told["missing"] == [{"task": "dtd", "group": "Natural"}]
    assert rows["cifar100"]["images"] == 40 and rows["snorb-azimuth"]["images"] == 240
    assert rows["cifar100"]["order"] == "tfds" and not rows["cifar100"]["complete"]
    assert rows["photos"]["group"] == "own" and rows["photos"]["order"] is None
    assert (here / "out" / "photos" / "model.safetensors").exists()


def test_means_say_of_how_many_tasks_they_are(done):
    _, told = done
    rows, means = {row["task"]: row["top1"] for row in told["tasks"]}, told["means"]
    both = (rows["cifar100"] + rows["snorb-azimuth"]) / 2
    assert means["VTAB-1k"]["images"] == 40 + 240
    low, high = means["VTAB-1k"]["interval"]
    assert low < both < high and high - low < 0.2
    means = {
        name: {k: v for k, v in row.items() if k not in ("images", "interval")} for name, row in means.items()
    }
    assert means["Natural"] == {"mean": rows["cifar100"], "tasks": 1, "of": 7, "complete": False}
    assert means["Specialized"] == {"mean": None, "tasks": 0, "of": 4, "complete": False}
    assert means["VTAB-1k"] == {"mean": pytest.approx(both), "tasks": 2, "of": 19, "complete": False}
    assert means["own"] == {"mean": rows["photos"], "tasks": 1, "of": 1, "complete": True}


def test_the_final_run_is_on_the_thousand_by_the_recipe_of_the_paper(here, done):
    recipe = json.loads((here / "out" / "cifar100" / "seed-0" / "recipe.json").read_text())
    assert (
        recipe["name"] == "vtab" and recipe["train_on"] == "train+val" and recipe["schedule"]["rate"] == 0.01
    )
    assert recipe["data"] == f"vtab:cifar100:{here / 'vtab'}" and recipe["length"]["steps"] == 3
    assert recipe["crop"] == "squash-random" and recipe["flip"] and recipe["resize"] == 19
    turned = json.loads((here / "out" / "snorb-azimuth" / "seed-0" / "recipe.json").read_text())
    assert not turned["flip"] and turned["crop"] == "squash-random"


def test_the_same_command_again_only_reads(here, done, capsys):
    command, told = done
    path = here / "out" / "cifar100" / "seed-0" / "result.json"
    before = path.stat().st_mtime_ns
    assert run(*command) == 0
    assert path.stat().st_mtime_ns == before
    assert json.loads(capsys.readouterr().out)["means"] == told["means"]
    assert run(*command[:-1]) == 0
    out = capsys.readouterr().out
    assert "missing: no data" in out and "1 of 7 tasks, incomplete" in out and "snorb-azimuth" in out


def test_of_several_rates_one_is_chosen_on_the_two_hundred(here, tmp_path, capsys):
    what = [
        "suite",
        here / "small.npz",
        "--data",
        here / "vtab",
        "--tasks",
        "cifar100",
        "--steps",
        "2",
        *QUICK,
    ]
    how = ["--rates", "0.001", "0.01", "--seeds", "2", "--out", tmp_path / "out", "--json"]
    assert run(*what, *how) == 0
    (row,) = json.loads(capsys.readouterr().out)["tasks"]
    assert row["rate"] in (0.001, 0.01) and len(row["seeds"]) == 2 and row["std"] is not None
    tried = json.loads((tmp_path / "out" / "cifar100" / "rate-0.001" / "result.json").read_text())
    assert tried["test"]["split"] == "val" and tried["test"]["images"] == 200


@pytest.mark.slow
def test_one_setting_for_all_tasks_is_the_best_by_their_mean_on_validation_images(here, tmp_path, capsys):
    out = tmp_path / "out"
    what = ["suite", here / "small.npz", "--data", here / "vtab", "--tasks", "cifar100", "snorb-azimuth",
            "--one-setting", "--rates", "0.001", "0.1", "--schedules", "2", "4", *QUICK]  # fmt: skip
    what += ["--out", out]
    assert run(*what, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    one, names = (
        told["setting"],
        ["rate-0.001-steps-2", "rate-0.1-steps-2", "rate-0.001-steps-4", "rate-0.1-steps-4"],
    )
    assert list(one["means"]) == names and one["tasks"] == 2
    for name in names:  # each on the 200 images, by 800
        tests = [json.loads((out / task / name / "result.json").read_text())["test"] for task in one["tried"]]
        assert all(test["split"] == "val" and test["images"] == 200 for test in tests)
        assert one["means"][name] == pytest.approx(sum(test["top1"] for test in tests) / 2)
    assert one["means"][one["chosen"]] == max(one["means"].values())
    rate, steps = (float(one["chosen"].split("-")[i]) for i in (1, 3))
    for row in told["tasks"]:
        assert row["chosen"] == one["chosen"] and row["tried"] == one["tried"][row["task"]]
        recipe = json.loads((out / row["task"] / "seed-0" / "recipe.json").read_text())
        assert recipe["train_on"] == "train+val" and recipe["schedule"]["rate"] == row["rate"] == rate
        assert recipe["length"]["steps"] == row["steps"] == steps
    assert run(*what) == 0  # again: only read
    assert "setting for all tasks" in capsys.readouterr().out


def test_the_sweep_of_the_paper_is_two_rates_by_two_schedules():
    entry = Entry("dtd", "Natural", "vtab:dtd:x")
    made = Choice(one_setting=True).settings(entry, Training(weights="w"))
    assert {(r.schedule.rate, r.length.steps, r.schedule.warmup) for r in made.values()} == {
        (0.003, 500, 40), (0.003, 2500, 200), (0.01, 500, 40), (0.01, 2500, 200)}  # fmt: skip


def test_flips_and_crops_follow_the_table():
    for task in TASKS.values():
        entry = Entry(task.name, task.group, f"vtab:{task.name}:x", flip=task.flip, crop=task.crop)
        recipe = task_recipe(entry, Training(weights="w"), ())
        assert recipe.flip == task.flip and (recipe.crop == "squash") == (not task.crop)
        assert recipe.length.steps == 2500 and recipe.image_size == (384, 384) and recipe.batch == 512
        assert recipe.resize == (448 if task.crop else 0) and recipe.rates == (0.01,)
    short = task_recipe(entry, Training(weights="w", steps=500, set=("batch=64",)), (0.003, 0.01))
    assert short.schedule.warmup == 40 and short.batch == 64 and short.rates == (0.003, 0.01)


def test_a_mean_is_complete_only_with_every_task_and_every_file():
    rows = [
        {"task": t.name, "group": t.group, "top1": 0.5, "images": 9, "complete": True} for t in TASKS.values()
    ]
    assert all(told["complete"] for told in with_means(rows, [])["means"].values())
    rows[0]["complete"] = False
    means = with_means(rows, [])["means"]
    assert (
        not means["Natural"]["complete"]
        and not means["VTAB-1k"]["complete"]
        and means["Structured"]["complete"]
    )
    mine = [{"task": "a", "group": "own", "top1": 0.5, "images": 9, "complete": True}]
    assert set(with_means(mine, [])["means"]) == {"own"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--tasks", "mnist"],
            "unknown task 'mnist': neither an existing data set nor a VTAB-1k task (caltech101,",
        ),
        (["--tasks", "dtd"], "need --data ROOT"),
        (["--data", "nowhere"], "--data 'nowhere': folder not found"),
        (["--data", ".", "--tasks", "dtd", "pets"], "--data . has no data for any of these tasks: dtd, pets"),
        (["--tasks", "photos", "other/photos"], "two tasks are named photos"),
        (["--tasks", "photos", "--seeds", "0"], "--seeds 0: expected"),
        (["--data", "broken", "--tasks", "cifar100"], "has no train.bin"),
        (["--tasks", "photos", "--schedules", "5"], "--one-setting"),
        (["--tasks", "photos", "--one-setting", "--steps", "5"], "--schedules"),
        (["--tasks", "photos", "--one-setting", "--schedules", "0"], "--schedules 0"),
    ],
)
def test_requests_that_cannot_be_met_end_before_any_training(
    here, tmp_path, monkeypatch, capsys, arguments, why
):
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "other/photos"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(here / "photos", target_is_directory=True)
    Path("broken/cifar100").mkdir(parents=True)
    assert run("suite", here / "small.npz", *arguments, *QUICK) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "runs").exists()
