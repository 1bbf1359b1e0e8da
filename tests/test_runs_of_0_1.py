"""Files of version 0.1: run folders go on to the end that they would have had, recipes mean the same."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitkit.recipes import recipe
from vitkit.recipes.recipe import from_json, override, read_recipe, to_json
from vitkit.runs.folder import changed_flags
from vitkit.studies.folder import differences
from vitkit.studies.scale import STUDIES
from vitkit.studies.setting import Setting
from vitkit.studies.study import Plan
from vitkit.studies.study import from_json as plan_from_json

FILES = Path(__file__).parent / "runs_of_0_1"
POOLED = ("plain", "augreg-i21k.ViT-B/16")  # of the stored recipes
COMMON = ["--model", "ViT-Ti/4", "--batch", "16", "--steps", "12", "--workers", "0", "--device", "cpu"]
SET = ["subset=200", "evaluations=3", "schedule.warmup=2", "schedule.rate=0.01"]
COMMANDS = {
    "classify": [
        "finetune", "digits", *COMMON, "--image-size", "8", "--set", *SET, "mixup=0.2", "randaugment=1,5",
        "dropout=0.1", "model_options=width=16,depth=2,heads=2,hidden=32,head=gap,positions=sincos2d",
    ],
    "masked": [
        "pretrain", "digits", *COMMON, "--image-size", "16", "--set", *SET, "mixup=0", "objective=masked",
        "masked.bits=2", "model_options=width=16,depth=1,heads=2,hidden=16",
    ],
}  # fmt: skip


def expected() -> dict:
    return json.loads((FILES / "expected.json").read_text())


def digest(path: Path) -> str:
    """Of names and tensors, whatever else the file says."""
    made = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        made.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def same_machine(known: dict) -> bool:
    """Whether numbers must be equal to the last bit."""
    here = {"machine": platform.machine(), "torch": torch.__version__, "processor": processor()}
    return here == {name: known[name] for name in here}


def processor() -> str:
    """A hash of the kind of the processor: two kinds of one family may round otherwise."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    kind = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    return hashlib.sha256(
        "\n".join(sorted({one for one in lines if one.startswith(kind)})).encode()
    ).hexdigest()


def resumed(kind: str, out: Path) -> str:
    """Do the command in a process of its own, and return what it printed on standard error."""
    line = [sys.executable, "-m", "vitkit", *COMMANDS[kind], "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(params=list(COMMANDS))
def kind(request):
    return request.param


def test_the_same_command_takes_a_run_up_to_the_same_end(kind, tmp_path):
    out, known = shutil.copytree(FILES / kind, tmp_path / "run"), expected()
    assert "resumed at step 5 of 12" in resumed(kind, out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 13))
    for row, before in zip(steps, known[kind]["steps"], strict=True):  # another order has other losses
        for name, value in before.items():
            assert row[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (row["step"], name)
    for row, before in zip((r for r in rows if "val_loss" in r), known[kind]["val"], strict=True):
        assert row["val_loss"] == pytest.approx(before["val_loss"], abs=1e-4)
    found = json.loads((out / "result.json").read_text())
    assert found["steps"] == 12 and found["test"]["loss"] == pytest.approx(known[kind]["test_loss"], abs=1e-4)
    if same_machine(known):
        assert digest(out / "model.safetensors") == known[kind]["model"]
        assert digest(out / "checkpoints/step-00000012/state-00000.safetensors") == known[kind]["state"]


def test_every_stored_recipe_is_the_one_of_its_name_today():
    for name, table in json.loads((FILES / "recipes.json").read_text()).items():
        old = from_json(json.dumps(table))
        now = recipe(name)
        if name == "finetune":  # the default of 0.1
            now = replace(recipe("table4"), name=name, about=old.about)
        if name in POOLED:  # whose models have no class token today
            assert "class_token" not in now.model_options
            now = replace(now, model_options=now.model_options.having(class_token=True))
        assert old == now and hash(old) == hash(now), name
        assert changed_flags(old, now) == []
        assert from_json(to_json(old)) == old


def test_a_run_of_before_is_still_the_same_run_as_its_recipe_written_now(kind, tmp_path):
    old = read_recipe(FILES / kind / "recipe.json")
    (tmp_path / "recipe.json").write_text(to_json(old))
    again = read_recipe(tmp_path / "recipe.json")
    assert again == old and changed_flags(old, again) == []
    other = override(old, ["model_options=width=16,depth=3,heads=2,hidden=32"])
    assert other != old and any("3" in text for text in changed_flags(old, other))


def planned(study: str, old: Plan) -> Plan:
    """What is planned today for the same request."""
    setting = Setting(
        data=("digits",), downstream="digits", seeds=1, scale=old.asked["scale"], images=1000,
        downstream_images=1000, downstream_side=100,
    )  # fmt: skip
    names = {trial.name for trial in old.trials}
    made = [trial for trial in STUDIES[study].make(setting) if trial.name in names]  # later ones were added
    return Plan(study=study, asked=old.asked, chosen=old.chosen, trials=tuple(made))


@pytest.mark.parametrize("study", ["scaling", "pretrain-sets", "optimizer"])
def test_a_stored_plan_is_the_one_that_is_made_today(study):
    old = plan_from_json(json.dumps(json.loads((FILES / "plans.json").read_text())[study]))
    new = planned(study, old)
    assert [one.name for one in old.trials] == [one.name for one in new.trials]
    assert differences(old, new) == [] and old == new


def test_the_files_stay_small():
    assert sum(path.stat().st_size for path in FILES.rglob("*") if path.is_file()) < 300_000
