"""Predictions are made before the larger trials start, have honest intervals, and never change."""

import json
from dataclasses import replace

import numpy as np
import pytest
from small_study import SETTING

from vitkit.report.study_page import predictions
from vitkit.studies.fits import law, prediction
from vitkit.studies.folder import claim_folder, table_rows, trial_folder, write_failed
from vitkit.studies.forecasts import PREDICTIONS, before_prediction, compare, predict, predicted_trials
from vitkit.studies.prepare import Request, trial_flops
from vitkit.studies.scale import STUDIES
from vitkit.studies.study import Plan
from vitkit.studies.time_limit import TimeLimit

STUDY = STUDIES["scaling"]
IMAGES = {"digits": 1618}


@pytest.fixture
def plan(tmp_path):
    trials = STUDY.make(replace(SETTING, seeds=2, pixels=64, patch=8))
    asked = Request(study="scaling", data=("digits",)).to_json()
    plan = Plan(study="scaling", asked=asked, chosen={"train_images": IMAGES}, trials=tuple(trials))
    claim_folder(tmp_path, plan)
    return plan


def finish(out, plan, trials, scale=1.0):
    """Write results whose error is a power law of the compute."""
    by_name = {trial.name: trial for trial in plan.trials}
    for trial in trials:
        exaflops = trial_flops(trial, by_name, IMAGES) / 1e18
        error = scale * 0.05 * exaflops**-0.1 * (1 + 0.002 * trial.recipe.seed)
        test = {"top1": 0.1, "images": 100, "fewshot_mean": 1 - error}
        cost = {"forward_FLOPs": 1e9, "exaFLOPs": exaflops, "parameters": 1}
        folder = trial_folder(out, trial.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps({"test": test, "cost": cost, "steps": 2}))


def test_a_prediction_is_not_changed_by_the_later_result(tmp_path, plan):
    small, large = before_prediction(plan, STUDY, tmp_path), predicted_trials(plan, STUDY)
    assert {trial.factors["size"] for trial in small.trials} == {"small", "medium", "large"}
    assert {trial.factors["size"] for trial in large} == {"largest"} and len(large) == 6
    finish(tmp_path, plan, small.trials)
    assert predict(plan, STUDY, tmp_path)
    content = (tmp_path / PREDICTIONS).read_bytes()
    stored = json.loads(content)
    assert set(stored["trials"]) == {trial.name for trial in small.trials} and len(stored["digest"]) == 64
    assert [entry["measured"] for entry in compare(tmp_path, [])["compared"]] == [None] * 3

    finish(tmp_path, plan, large, scale=0.5)  # far better than predicted
    assert predict(plan, STUDY, tmp_path) and (tmp_path / PREDICTIONS).read_bytes() == content
    beside = compare(tmp_path, table_rows(tmp_path, plan))
    assert [entry["inside"] for entry in beside["compared"]] == [False] * 3 and beside["changed"] == []
    assert [e["predicted"] for e in beside["compared"]] == [e["predicted"] for e in stored["predictions"]]
    page = predictions(beside)
    assert stored["made"] in page and stored["digest"][:16] in page and "no</td>" in page
    finish(tmp_path, plan, large)
    assert [e["inside"] for e in compare(tmp_path, table_rows(tmp_path, plan))["compared"]] == [True] * 3
    finish(tmp_path, plan, small.trials[:1], scale=2.0)
    assert compare(tmp_path, [])["changed"] == [small.trials[0].name]
    assert before_prediction(plan, STUDY, tmp_path) is plan


def test_larger_trials_wait_for_the_smaller_ones(tmp_path, plan):
    small = before_prediction(plan, STUDY, tmp_path).trials
    finish(tmp_path, plan, small[1:])
    assert not predict(plan, STUDY, tmp_path) and not (tmp_path / PREDICTIONS).exists()
    write_failed(tmp_path, {small[0].name: {"error": "it failed", "trace": ""}})
    assert predict(plan, STUDY, tmp_path)  # a failed trial is not waited for
    assert len(json.loads((tmp_path / PREDICTIONS).read_text())["trials"]) == len(small) - 1


def test_nothing_is_predicted_once_a_larger_trial_has_started(tmp_path, plan):
    finish(tmp_path, plan, before_prediction(plan, STUDY, tmp_path).trials)
    trial_folder(tmp_path, predicted_trials(plan, STUDY)[0].name).mkdir(parents=True)
    assert predict(plan, STUDY, tmp_path) and compare(tmp_path, []) is None
    paper = replace(plan, asked=plan.asked | {"scale": "paper"})
    assert predicted_trials(paper, STUDY) == [] and before_prediction(paper, STUDY, tmp_path) is paper


def test_a_prediction_interval_covers_the_larger_run():
    """In about 95 of 100 simulated studies: three sizes of three seeds predict the mean of three more."""
    rng, x, inside = np.random.default_rng(0), np.repeat([1.0, 3.0, 9.0], 3), 0

    def errors(at):
        return 0.8 * at**-0.1 * np.exp(rng.normal(0, 0.02, len(at)))

    for _ in range(100):
        center, low, high = prediction(x, errors(x), 27.0, 3)
        assert low < center < high
        inside += low <= errors(np.full(3, 27.0)).mean() <= high
    assert 90 <= inside <= 99


def test_a_prediction_is_the_law_with_the_interval_of_a_line():
    x, y = [1.0, 2.0, 4.0, 8.0], [1.0, 0.9, 0.85, 0.75]
    center, low, high = prediction(x, y, 16.0, 2)
    assert center == pytest.approx(law(x, y).predict(16.0))
    stats = pytest.importorskip("scipy.stats")
    logs = np.log(x)
    line = stats.linregress(logs, np.log(y))
    spread = line.stderr * np.sqrt(((logs - logs.mean()) ** 2).sum())
    error = spread * np.sqrt(
        1 / 2 + 1 / 4 + (np.log(16) - logs.mean()) ** 2 / ((logs - logs.mean()) ** 2).sum()
    )
    margin = stats.t.ppf(0.975, 2) * error
    assert np.log([low, high]) == pytest.approx(np.log(center) + np.array([-margin, margin]), rel=1e-3)
    assert prediction([1.0, 1.0, 2.0], [0.5, 0.5, 0.4], 4.0) is None


def test_the_larger_trials_have_the_time_that_the_smaller_ones_left():
    limit = TimeLimit(lambda: 40.0, start_by=100.0, stop_after=70.0)
    rest = limit.rest()
    assert (rest.start_by, rest.stop_after) == (60.0, 30.0) and 0 <= rest.clock() < 5
