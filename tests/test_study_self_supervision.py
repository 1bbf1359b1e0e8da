"""The study of learning without labels: its arms, its scores and its claims, run on the digits."""

import json
from dataclasses import replace

import pytest
from test_cli import run

from vitkit.recipes import RECIPES
from vitkit.recipes import recipe as named_recipe
from vitkit.runs.folder import FEATURES_OFF
from vitkit.studies import self_supervision
from vitkit.studies.scale import STUDIES
from vitkit.studies.self_supervision import ARMS, exists, notes
from vitkit.studies.setting import RATE, Setting

S = Setting(data=("digits",), downstream="", pixels=8, patch=4, batch=64, steps=50, images=1618, seeds=1)


def test_every_arm_starts_from_the_same_model_and_takes_as_many_steps():
    trials = {(t.factors["arm"], t.factors["phase"]): t for t in STUDIES["self-supervision"].make(S)}
    present = [arm for arm in ARMS if exists(arm) and arm != "distilled"]
    assert {"nothing", "labels", "masked"} <= set(present)
    assert set(trials) == {(arm, phase) for arm in present for phase in ("pretrained", "tuned")}
    for arm in present:
        r, tuned = trials[arm, "pretrained"].recipe, trials[arm, "tuned"]
        assert r.length.steps == (1 if arm == "nothing" else 50) and r.batch == 64
        assert r.model_options["width"] == 96 and r.image_size == (8, 8) and r.fewshot == FEATURES_OFF
        assert tuned.needs == trials[arm, "pretrained"].name and trials[arm, "pretrained"].frozen == "digits"
    assert trials["nothing", "pretrained"].recipe.schedule.rate == 0
    assert trials["masked", "pretrained"].recipe.task.name == "masked"
    rates = {arm: trials[arm, "pretrained"].recipe.schedule.rate for arm in present}
    assert rates["labels"] == rates["masked"] == rates["mae"] == RATE and rates["dino"] == 5e-4 * 64 / 256
    assert len({replace(t.recipe, seed=0) for (_, phase), t in trials.items() if phase == "tuned"}) == 1


def test_an_arm_appears_once_its_task_is_there(monkeypatch):
    recipes = {name: RECIPES[name] for name in RECIPES if name not in ("mae", "dino", "distill")}
    monkeypatch.setattr(self_supervision, "RECIPES", recipes)
    assert [exists(arm) for arm in ("mae", "dino", "distilled", "masked")] == [False, False, False, True]
    assert "mae" in notes(S)[0]
    monkeypatch.setattr(self_supervision, "RECIPES", recipes | {"distill": lambda: named_recipe("masked")})
    assert "--weights" in notes(S)[-1] and not notes(replace(S, weights="T.npz"))[1:]


@pytest.mark.slow
def test_it_runs_and_its_table_has_every_score(tmp_path, capsys):
    out = tmp_path / "study"
    words = ["study", "run", "self-supervision", "--data", "digits", "--seeds", "1", "--steps", "20",
             "--image-size", "16", "--processes", "1", "--device", "cpu", "--out", out]  # fmt: skip
    assert run(*words, "--json", "--set", "model.width=16", "model.depth=1", "model.heads=2") == 0
    summary = json.loads(capsys.readouterr().out)
    table = json.loads((out / "table.json").read_text())
    assert not summary["failed"] and len(table) == 2 * sum(exists(arm) for arm in ARMS[:-1])
    for row in table:
        first = row["phase"] == "pretrained"
        assert all((row[score] is not None) == first for score in ("knn", "probe", "fewshot_mean"))
        assert first or row["top1"] is not None
        assert not first or (row["fewshot_shots"], row["frozen_images"]) == (10, 179)
    named = {verdict["claim"] for verdict in summary["verdicts"]}
    assert named == {claim.text for claim in STUDIES["self-supervision"].claims}
    page = (out / "page.html").read_text("utf-8")
    assert "k-NN accuracy" in page and "linear-probe accuracy" in page
