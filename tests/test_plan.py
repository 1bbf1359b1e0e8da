"""--plan writes nothing and fetches nothing, and says what the command would do with its folder."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sigterm import sigterm_at
from test_cli import run
from test_tasks import TINY

import vitkit
from vitkit.data import content
from vitkit.io import http
from vitkit.planning import plan as plan_module
from vitkit.planning import start
from vitkit.planning.plan_text import headline, page, time_in_words
from vitkit.runs import run as experiment
from vitkit.tasks import task as task_module


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Thirty pictures of two kinds, a cache and a working folder of their own, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "FRESH", 0)  # so that what is read of files could be remembered at once

    def forbidden(*_, **__):
        raise AssertionError("something was fetched")

    monkeypatch.setattr(http, "connections", forbidden)
    rng = np.random.default_rng(0)
    for i in range(30):
        folder = tmp_path / "photos" / ("dark" if i % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 120, (40, 33, 3), dtype=np.uint8) + (0 if i % 2 else 120)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return Path("photos")


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with what changes when it is written."""
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(folder.rglob("*"))}


def planned(capsys, *words) -> dict:
    assert run("finetune", *words, "--plan", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_downloads_and_writes_nothing(photos, tmp_path, capsys):
    before = files(tmp_path)
    words = (photos, "--image-size", 32, "--device", "cpu", "--workers", 0)
    plan = planned(capsys, *words)
    assert plan["action"] == "create" and plan["run"] == "runs/photos" and plan["download_MB"] == 37
    assert plan["start"] == "ViT-Ti/16.augreg-i21k" and 5e6 < plan["parameters"] < 6e6
    assert plan["steps"] == plan["steps_left"] == 500 and plan["epochs"] == pytest.approx(500 * 8 / 26)
    assert plan["learning_rate"] == 0.0005 and plan["seconds"] > 0 and plan["memory_GB"] > 0
    assert (plan["keep"], plan["patience"], plan["evaluations"]) == ("last", 0, 0)
    assert files(tmp_path) == before
    assert run("finetune", *words, "--plan") == 0
    shown = capsys.readouterr().out
    assert files(tmp_path) == before
    assert max(map(len, shown.splitlines())) <= 80 and len(shown.splitlines()) < 40 and "{" not in shown
    shown = " ".join(shown.split())
    for text in ("Would create runs/photos", "37 MB", "500 steps", "0.0005", "warm-up", "32 x 32",
                 "8 images", "horizontal flips", "Mixup 0.2", "last weights", "26 training"):  # fmt: skip
        assert text in shown


@pytest.mark.parametrize("seconds, shorter", [(2000.0, "--steps 125 takes about 8 min"), (60.0, "")])
def test_a_long_run_is_planned_with_a_way_to_shorten_it(seconds, shorter):
    plan = {"action": "create", "seconds": seconds, "time": "x", "steps": 500, "steps_left": 500}
    words = time_in_words(plan)
    assert shorter in words and ("--steps" in words) == bool(shorter)


def test_a_run_after_the_plan_does_as_planned(photos, capsys):
    words = (photos, "--model", "ViT-Ti/16", "--image-size", 16, "--steps", 6, "--workers", 0)
    plan = planned(capsys, *words)
    assert run("finetune", *words) == 0
    recipe = json.loads(Path("runs/photos/recipe.json").read_text())
    result = json.loads(Path("runs/photos/result.json").read_text())
    assert (plan["steps"], plan["batch"], plan["keep"], plan["patience"]) == (
        result["steps"], recipe["batch"], recipe["keep"], recipe["patience"],
    )  # fmt: skip
    assert plan["learning_rate"] == recipe["schedule"]["rate"]
    assert any(Path("cache").rglob("files")), "what was read of the images is remembered by a run"
    assert f"kept the best weights on validation, of step {result['kept']['step']}" in capsys.readouterr().out


def test_the_plan_of_an_existing_folder_says_where_it_goes_on(tmp_path, capsys):
    words, out = ("digits", "--out", tmp_path / "r", *TINY), tmp_path / "r"
    with sigterm_at(4):
        assert run("finetune", *words) == 128 + signal.SIGTERM
    before = files(out)
    capsys.readouterr()
    plan = planned(capsys, *words)
    assert (plan["action"], plan["step"], plan["steps"], plan["steps_left"]) == ("resume", 4, 6, 2)
    assert "at step 4 of 6" in headline(plan) and files(out) == before
    assert run("finetune", *words) == 0
    before = files(out)
    capsys.readouterr()
    plan = planned(capsys, *words)
    assert (plan["action"], plan["step"], plan["steps_left"]) == ("finished", 6, 0)
    assert "already finished: 6 steps" in headline(plan) and files(out) == before
    assert not any(line.startswith("  time") for line in page(plan))


def test_a_folder_without_a_checkpoint_would_start_again(tmp_path, capsys, monkeypatch):
    words = ("digits", "--out", tmp_path / "r", *TINY)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "preflight", stop)
        assert run("finetune", *words) == 128 + signal.SIGINT
    capsys.readouterr()
    plan = planned(capsys, *words)
    assert (plan["action"], plan["step"], plan["steps_left"]) == ("restart", 0, 6)


def test_the_plan_of_the_protocol_counts_its_runs(tmp_path, capsys):
    words = ("digits", "--out", tmp_path / "r", *TINY, "rates=0.01,0.02", "--protocol", "--seeds", 2)
    plan = planned(capsys, *words)
    assert (plan["candidates"], plan["seeds"], plan["runs"]) == (2, 2, 4) and plan["keep"] == "last"
    assert any("2 settings" in line for line in page(plan)) and not (tmp_path / "r").exists()


@pytest.mark.parametrize("words", [("--model", "DINOv2-g/14"), ("--weights", "DINOv2-g/14.lvd142m")])
def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_built(
    photos, capsys, monkeypatch, words
):
    monkeypatch.setattr(start, "total_memory", lambda: 4 * 10**9)
    monkeypatch.setattr(plan_module, "fresh", lambda *_, **__: pytest.fail("the model was built"))
    monkeypatch.setattr(task_module, "fresh", lambda *_, **__: pytest.fail("the model was built"))
    assert run("finetune", photos, *words, "--device", "cpu", "--workers", 0, "--plan", "--json")
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "training.out-of-memory" and "1.1 billion" in error["message"]


@pytest.mark.parametrize("model", ["ViT-Ti/16", "BiT-R50x1"])
def test_a_model_of_other_channels_than_those_of_a_picture_is_refused(photos, capsys, tmp_path, model):
    words = ("--model", model, "--set", "model.channels=1", "--device", "cpu", "--out", tmp_path / "r")
    assert run("finetune", photos, *words, "--workers", 0, "--json")
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "model.unsupported" and "channels=3" in error["message"]
    assert not (tmp_path / "r").exists()


def test_the_resolution_fits_the_weights(small, photos, tmp_path):
    """Whole patches; that of the weights if it is close to 224, or if their positions cannot be resized."""
    from dataclasses import replace

    from vitkit.options import Training
    from vitkit.planning import automatic
    from vitkit.recipes import recipe
    from vitkit.runs.build import open_splits
    from vitkit.runtime.runtime import Runtime

    splits = open_splits(replace(recipe("finetune"), data=str(photos)))
    known = automatic.circumstances(Training(), splits, Runtime())
    fixed = automatic.circumstances(Training(image_size="100"), splits, Runtime())

    def chosen(pixels, circumstances=known, **options):
        path = tmp_path / "m.safetensors"
        vitkit.save(small(**options), path)
        base = replace(recipe("finetune"), weights=str(path), image_size=(pixels, pixels))
        assert start.starting_config(base) == vitkit.load(path).config
        return start.fit_resolution(base, circumstances, start.starting_config(base))[0].image_size

    assert chosen(224) == (224, 224)  # patches of 8
    assert chosen(384, patch=14, image_size=56) == (378, 378)
    assert chosen(224, patch=14, image_size=518) == (224, 224)
    assert chosen(224, patch=16, image_size=256) == (256, 256)
    assert chosen(384, patch=16, image_size=256) == (384, 384)
    assert chosen(224, patch=16, image_size=256, rope="dinov3", positions="none") == (224, 224)
    assert chosen(224, patch=30, image_size=240) == (240, 240)
    assert chosen(224, positions="relative") == (32, 32)
    assert chosen(224, patch=4) == chosen(384) == (32, 32)  # 3,136 and 2,304 patches
    assert chosen(224, patch=4, image_size=224) == (224, 224)
    assert chosen(100, fixed, patch=14, image_size=56) == (100, 100)
    published = replace(recipe("finetune"), weights="FlexiViT-S/16.i1k", image_size=(224, 224))
    assert start.fit_resolution(published, known, start.starting_config(published))[0].image_size == (
        240,
        240,
    )
