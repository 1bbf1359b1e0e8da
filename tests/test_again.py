"""The same command again, another experiment on the same data, data that has grown, training on."""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from page_reader import Page, words_of
from PIL import Image
from test_changed_data import TINY
from test_cli import run

from vitkit.data.splits import complete, fingerprints
from vitkit.datasets.opening import open_data
from vitkit.io.files import locked
from vitkit.options import Training
from vitkit.recipes import recipe
from vitkit.runs.folder import changed_flags
from vitkit.runs.provenance.fingerprint import remembered_splits
from vitkit.training.logging import Journal
from vitkit.training.schedule import Schedule, stage_at, stages

NAMES = ("ant", "bee")


def paint(folder: Path, count: int, *, seed: int = 0, first: int = 0) -> None:
    """More images of two classes, without splits."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(first, first + count):
            pixels = rng.integers(120 * number, 120 * number + 130, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("again")
    paint(home / "pics", 20)
    before = os.getcwd()
    os.chdir(home)
    try:
        assert run("finetune", "pics", "--steps", 6, *TINY) == 0
    finally:
        os.chdir(before)
    return home


@pytest.fixture
def home(trained, tmp_path, monkeypatch, capsys):
    """A copy of the data and of its finished run of six steps, by the same relative names."""
    for name in ("pics", "runs"):
        shutil.copytree(trained / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return tmp_path


def again(*more, steps: int = 6) -> int:
    return run("finetune", "pics", "--steps", steps, *TINY, *more)


def files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}


def read_json(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def offered(text: str) -> list[list[str]]:
    """The commands that a message offers."""
    return [line.split()[1:] for line in text.splitlines() if line.startswith("  vitkit finetune")]


def test_a_finished_run_is_reported_and_not_touched(home, capsys):
    before = files(home / "runs")
    assert again() == 0
    out = capsys.readouterr().out
    assert "already finished" in out and "6 steps" in out and "test images correct" in out
    assert "vitkit predict runs/pics" in out and "--more-steps 3" in out
    (command,) = [words for words in offered(out) if "--out" in words]
    assert command[command.index("--out") + 1] == "runs/pics-2" and "--more-steps" not in command
    assert files(home / "runs") == before
    assert run("finetune", "./pics/", "--steps", 6, *TINY, "--json") == 0, "the same folder by another name"
    result = json.loads(capsys.readouterr().out)
    assert result["already_finished"] and result["steps"] == 6 and files(home / "runs") == before


def test_runs_of_two_tasks_differ_in_their_recipes():
    """Each has options of its task, which the other one lacks."""
    for first, second in itertools.permutations(("scratch", "mae", "dino", "segment"), 2):
        assert f"--recipe {first} -> {second}" in changed_flags(recipe(first), recipe(second))


@pytest.mark.slow
def test_a_run_of_another_task_has_a_numbered_folder(home, capsys):
    small = [word for word in TINY if word != "--lr" and word != "0.003"]
    assert run("pretrain", "pics", "--task", "simmim", "--steps", 2, *small) == 0
    assert read_json(home / "runs/pics-2", "recipe.json")["objective"] == "simmim"
    assert "--set objective=classify -> simmim" in capsys.readouterr().err


def test_a_finished_run_without_its_model_is_completed(home, capsys):
    (home / "runs/pics/model.safetensors").unlink()
    assert again() == 0
    assert "already finished" not in capsys.readouterr().out
    assert (home / "runs/pics/model.safetensors").exists()


def test_another_experiment_has_a_numbered_folder(home, capsys):
    before = files(home / "runs")
    assert again(steps=4) == 0
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "runs/pics-2" in line]
    assert len(lines) == 1 and "--steps 6 -> 4" in lines[0] and "{" not in lines[0]
    assert read_json(home / "runs/pics-2", "result.json")["steps"] == 4
    assert {p: c for p, c in files(home / "runs").items() if "pics-2" not in str(p)} == before
    assert again(steps=4) == 0, "the same command finds its own run"
    assert "runs/pics-2: already finished" in capsys.readouterr().out
    assert again("--seed", 3, steps=4) == 0
    assert read_json(home / "runs/pics-3", "recipe.json")["seed"] == 3
    assert again() == 0 and "runs/pics: already finished" in capsys.readouterr().out


def test_a_given_folder_of_another_run_is_refused_by_its_flags(home, capsys):
    before = files(home / "runs")
    assert again("--out", "runs/pics", "--seed", 7, "--image-size", "12", steps=9) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "{" not in err and "runs/pics" in err
    for flag in ("--steps 6 -> 9", "--seed 0 -> 7", "--image-size 8x8 -> 12x12"):
        assert flag in err
    assert files(home / "runs") == before and not (home / "runs/pics-2").exists()


@pytest.mark.parametrize("words", [["--model", "ViT-Q/16"], ["--weights", "ViT-Ti/16.nowhere"]])
def test_a_wrong_name_is_reported_before_anything_is_done(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()  # which would be the next error
    assert run("finetune", "empty", *words, "--device", "cuda:7") == 2
    err = capsys.readouterr().err
    assert words[1] in err and "empty" not in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_start_that_came_to_nothing_leaves_its_folder_to_the_next_command(home, capsys):
    shutil.rmtree(home / "runs/pics/checkpoints")
    (home / "runs/pics/result.json").unlink()
    with locked(home / "runs/pics", wait=False):  # but not while it runs
        assert again(steps=4) == 0
        assert "runs/pics-2" in capsys.readouterr().err
    assert again("--batch", 8, steps=5) == 0
    assert read_json(home / "runs/pics", "recipe.json")["batch"] == 8
    assert read_json(home / "runs/pics", "result.json")["steps"] == 5 and not (home / "runs/pics-3").exists()


def test_a_plain_run_and_a_protocol_do_not_share_a_folder(home, capsys):
    before = files(home / "runs")
    assert again("--protocol", "--seeds", 1, "--set", *TINY[TINY.index("--set") + 1 :], "rates=0.01") == 0
    assert (home / "runs/pics-2/protocol.json").exists()
    assert {p: c for p, c in files(home / "runs").items() if "pics-2" not in str(p)} == before


def test_grown_data_is_counted_and_both_commands_that_are_offered_work(home, capsys):
    paint(home / "pics", 15, seed=1, first=100)
    (home / "pics/bee/3.png").unlink()
    Image.fromarray(np.full((9, 9, 3), 60, np.uint8)).save(home / "pics/ant/1.png")  # edited
    (home / "pics/bee/5.png").rename(home / "pics/bee/five.png")  # the same content
    before = files(home / "runs")
    assert again() == 2
    err = capsys.readouterr().err
    for phrase in ("30 images added: ant 15, bee 15", "1 image removed: bee 1", "1 image changed: ant 1",
                   "1 image renamed"):  # fmt: skip
        assert phrase in err
    assert files(home / "runs") == before
    old, (on, anew) = remembered_splits(home / "runs/pics"), offered(err)
    assert {"--more-steps", "--accept-changed-data"} <= set(on)
    assert "runs/pics-2" in anew and "--split-of" in anew
    for command, folder, steps in ((on, "runs/pics", 9), (anew, "runs/pics-2", 6)):
        assert run(*command) == 0
        assert read_json(home / folder, "result.json")["steps"] == steps
        new = remembered_splits(home / folder)
        kept = {mark: split for mark, split in old.items() if isinstance(mark, bytes) and mark in new}
        assert len(kept) >= 38 and all(new[mark] == split for mark, split in kept.items())
        marks = {mark for mark in new if isinstance(mark, bytes)} - set(old)
        assert {new[mark] for mark in marks} == {"train", "val", "test"}, "new ones are divided too"
        capsys.readouterr()
    assert again() == 0 and "already finished" in capsys.readouterr().out


@pytest.mark.control("vitkit.runs.build.remembered_splits")
def test_control_without_the_memory_of_its_split_test_images_are_trained_on(home, switched_off):
    old = {mark for mark, split in remembered_splits(home / "runs/pics").items() if split == "test"}
    paint(home / "pics", 15, seed=1, first=100)
    switched_off("vitkit.runs.build.remembered_splits", lambda out: {})
    assert again("--accept-changed-data") == 0
    train = complete(open_data("pics"))["train"]
    assert set(map(bytes, fingerprints(train))) & old


def test_an_image_that_comes_back_is_in_the_split_it_was_in(home):
    placed = remembered_splits(home / "runs/pics")
    (name,) = [key for key, split in placed.items() if split == "test" and str(key).startswith("ant/")][:1]
    (home / "pics" / name).rename(home / "aside.png")
    assert again("--accept-changed-data") == 0
    paint(home / "pics", 10, seed=4, first=200)
    (home / "aside.png").rename(home / "pics/ant/back.png")
    assert again("--accept-changed-data") == 0
    assert remembered_splits(home / "runs/pics")["ant/back.png"] == "test"


def test_other_classes_can_only_be_trained_anew(home, capsys):
    shutil.copytree(home / "pics/ant", home / "pics/cat")
    for i, path in enumerate(sorted((home / "pics/cat").iterdir())):
        Image.fromarray(np.full((9, 9, 3), i, np.uint8)).save(path)
    assert again() == 2
    err = capsys.readouterr().err
    (anew,) = offered(err)
    assert "1 class added: 'cat'" in err and "--more-steps" not in err and "runs/pics-2" in anew


def test_training_on_equals_the_documented_run_and_can_be_interrupted(home, monkeypatch, capsys):
    shutil.copytree(home / "runs/pics", home / "runs/other")
    assert run("finetune", "pics", "--workers", 0, "--more-steps", 4) == 0
    out = capsys.readouterr().out
    assert "model-6.safetensors" in out and read_json(home / "runs/pics", "result-6.json")["steps"] == 6
    assert read_json(home / "runs/pics", "result.json")["steps"] == 10
    model = (home / "runs/pics/model.safetensors").read_bytes()
    straight = [*TINY[: TINY.index("--set")], "--set", *TINY[TINY.index("--set") + 1 :], "more_steps=6+4"]
    assert run("finetune", "pics", "--steps", 6, "--out", "runs/straight", *straight) == 0
    assert (home / "runs/straight/model.safetensors").read_bytes() == model
    rates = [
        row["rate"] for row in map(json.loads, (home / "runs/pics/metrics.jsonl").open()) if "rate" in row
    ]
    assert len(rates) == 10 and rates[6] > rates[5] and rates[6] > rates[9]

    write = Journal.write

    def stop(self, step, **numbers):
        write(self, step, **numbers)
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    on = ("finetune", "pics", "--out", "runs/other", "--workers", 0, "--more-steps", 4)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", stop)
        assert run(*on) == 143
    assert read_json(home / "runs/other", "result.json")["steps"] == 6
    assert run(*on[:-1], 5) == 2 and "has not finished" in capsys.readouterr().err
    assert run(*on) == 0, "goes on with the same four steps"
    assert read_json(home / "runs/other", "recipe.json")["more_steps"] == ["6+4"]
    assert (home / "runs/other/model.safetensors").read_bytes() == model
    assert run(*on) == 0, "and a finished one is trained on again"
    assert read_json(home / "runs/other", "result.json")["steps"] == 14


def test_training_on_is_refused_where_there_is_nothing_to_train_on(home, capsys):
    assert run("finetune", "pics", "--out", "runs/new", "--more-steps", 2, *TINY) == 2
    assert "no run in runs/new" in capsys.readouterr().err and not (home / "runs/new").exists()
    assert run("finetune", "pics", "--out", "runs/pics", "--more-steps", 2, "--batch", 4) == 2
    assert "--batch 16 -> 4" in capsys.readouterr().err
    shutil.rmtree(home / "runs/pics/checkpoints")
    assert run("finetune", "pics", "--more-steps", 2) == 2
    assert "checkpoint" in capsys.readouterr().err


def test_a_run_that_stopped_early_is_trained_on_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "pics", 20)
    still = {"evaluations=0": "evaluations=8", "0.003": "0"}  # nothing is learned, so it stops at once
    words = [still.get(word, word) for word in TINY]
    assert run("finetune", "pics", "--steps", 8, *words, "patience=1") == 0
    stopped = read_json(tmp_path / "runs/pics", "result.json")["steps"]
    assert stopped < 8
    assert run("finetune", "pics", "--workers", 0, "--more-steps", 5) == 0
    recipe = read_json(tmp_path / "runs/pics", "recipe.json")
    assert recipe["more_steps"] == [f"{stopped}+5"]
    assert stopped < read_json(tmp_path / "runs/pics", "result.json")["steps"] <= stopped + 5


def test_how_a_run_was_started_stays_and_later_starts_are_added(home):
    path = home / "runs/pics/environment.json"
    first = path.read_bytes()
    assert again() == 0 and path.read_bytes() == first
    paint(home / "pics", 5, seed=2, first=50)
    assert run("finetune", "pics", "--workers", 0, "--more-steps", 2, "--accept-changed-data") == 0
    assert run("finetune", "pics", "--workers", 0, "--more-steps", 1) == 0
    now = json.loads(path.read_bytes())
    later = now.pop("later")
    assert now == json.loads(first)
    assert [(one["step"], one["steps"]) for one in later] == [(6, 8), (8, 9)]
    assert sum(later[0]["data"]["images"].values()) == sum(now["data"]["images"].values()) + 10
    assert (home / "runs/pics/data-1.json.gz").exists() and not (home / "runs/pics/data-2.json.gz").exists()


def test_a_report_lists_the_commands_that_trained_the_run(home):
    path = home / "runs/pics/environment.json"
    first = read_json(home / "runs/pics", "environment.json")
    later = first | {"step": 6, "steps": 8, "command": "vitkit finetune pics --more-steps 2"}
    path.write_text(json.dumps(first | {"command": "vitkit finetune pics --steps 6", "later": [later]}))
    assert run("report", "runs/pics") == 0
    page = words_of(Page((home / "runs/pics/report.html").read_text("utf-8")).root)
    assert page.index("finetune pics --steps 6") < page.index("finetune pics --more-steps 2")


def test_a_restart_before_anything_was_learned_is_the_first(home):
    shutil.rmtree(home / "runs/pics/checkpoints")
    path = home / "runs/pics/environment.json"
    path.write_text(json.dumps(read_json(home / "runs/pics", "environment.json") | {"command": "vitkit old"}))
    (home / "runs/pics/result.json").unlink()
    assert again() == 0
    assert "later" not in json.loads(path.read_text()) and "vitkit old" not in path.read_text()


def test_stages_restart_the_schedule():
    result = stages(100, Schedule(rate=1.0, warmup=10, decay="cosine"), ("100+50", "120+8"))
    assert [(stage.start, stage.end) for stage in result] == [(0, 100), (100, 150), (120, 128)]
    rates = [stage_at(result, step).rate(step) for step in range(128)]
    first = Schedule(rate=1.0, warmup=10, decay="cosine")
    assert rates[:100] == [first.at(step, 100) for step in range(100)]
    assert rates[100] == 0 and rates[105] == 1.0 and rates[119] < 1
    assert rates[120] == 1.0 and 0 < rates[127] < 0.05


@pytest.mark.parametrize("text", ["20", "0+5", "6+0", "6+x", "6+4,5+3", "6+4,11+3"])
def test_stages_that_make_no_sense_are_refused(text, home, capsys):
    words = [*TINY, f"more_steps={text}"]
    assert run("finetune", "pics", "--steps", 6, "--out", "runs/new", *words) == 2
    assert "more_steps" in capsys.readouterr().err


def test_the_words_of_options_give_the_same_options(monkeypatch):
    from vitkit.cli import verbs

    options = Training(
        weights="ViT-Ti/16.augreg-i21k", steps=4, lr=0.003, set=("flip=false", "val=0.2"), cuda_graph=False,
        compile="auto",        out=Path("runs/x"), against=("a b", "two"), more_steps=3, parallel="fsdp",
    )  # fmt: skip
    seen = []

    def finetune(data, training, protocol=False, seeds=3, json=False):
        seen.append(training)

    finetune.__annotations__ = verbs.VERBS["finetune"].__annotations__
    finetune.__doc__ = "x"
    monkeypatch.setattr(verbs, "VERBS", {"finetune": finetune, "other": finetune})
    verbs.main(["finetune", "digits", *options.words()])
    assert seen == [options]


def test_an_out_below_a_file_is_refused_at_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("vitkit.planning.plan.seconds_a_step", None)  # nothing is timed
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        assert run("finetune", "digits", "--model", "ViT-Ti/4", "--out", out) == 2
        assert f"--out {out}" in capsys.readouterr().err
