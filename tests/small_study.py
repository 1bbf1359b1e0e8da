"""Shared by the tests of studies: a plan of tiny trials on digits, and a call that ends its process."""

import os
import signal
from dataclasses import replace
from pathlib import Path

from vitkit.recipes.values import ModelOptions
from vitkit.studies.prepare import Request
from vitkit.studies.setting import Arm, Setting, finetuning, pretraining
from vitkit.studies.study import Plan, make_trial

TINY = ModelOptions(width=16, depth=1, heads=2, hidden=16)
SETTING = Setting(data=("digits",), downstream="", pixels=16, patch=4, batch=32, steps=2, images=1618)


def tiny_plan(study: str = "heads", broken: bool = True, seeds: int = 2) -> Plan:
    """Two heads by seeds; with one trial that cannot be run, and one that starts from it."""
    trials = []
    for seed in range(seeds):
        for head in ("token", "gap"):
            recipe = pretraining(SETTING, Arm("ViT-Ti/4", TINY).having(head=head), seed)
            trials.append(make_trial({"head": head, "rate": "same"}, recipe))
    tuned = finetuning(SETTING, 0)
    trials.append(make_trial({"head": "tuned", "rate": "same"}, tuned, needs=trials[0].name))
    if broken:
        bad = replace(trials[0].recipe, shots=1000)
        trials.append(make_trial({"head": "broken", "rate": "same"}, bad))
        trials.append(make_trial({"head": "after it", "rate": "same"}, tuned, needs=trials[-1].name))
    chosen = {"train_images": {"digits": 1618}}
    return Plan(
        study=study,
        asked=Request(study=study, data=("digits",)).to_json(),
        chosen=chosen,
        trials=tuple(trials),
    )


def killed(place: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def answered(value: int, place: object) -> int:
    return value


def written(folder: Path) -> dict[str, float]:
    """When each result was written."""
    return {path.parent.name: path.stat().st_mtime for path in folder.glob("trials/*/result.json")}
