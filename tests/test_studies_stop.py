"""A study that stops after a time goes on to the same results, and records where its time went."""

import json
import math
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from refusals import refused
from small_study import tiny_plan
from test_cli import run

from vitkit.metrics import speed
from vitkit.options import parse_budget
from vitkit.studies import time_use as times
from vitkit.studies.analysis import figures_of
from vitkit.studies.conduct import Execution, Executors, report, run_trials
from vitkit.studies.folder import claim_folder, has_begun, table_rows
from vitkit.studies.scale import STUDIES
from vitkit.studies.time_limit import TimeLimit, expected_seconds, trial_work
from vitkit.training.schedule import Duration

NEVER = math.inf
SAME = ("trial", "head", "seed", "steps", "exaFLOPs", "top1", "fewshot_mean", "images_seen")


def plan_of(steps=4):
    """Two heads by two seeds, and a trial that starts from the first."""
    plan = tiny_plan(broken=False)
    trials = [replace(t, recipe=replace(t.recipe, length=Duration(steps=steps))) for t in plan.trials]
    return replace(plan, trials=tuple(trials))


def go(plan, out, limit=None, stop_at=NEVER):
    said = []
    claim_folder(out, plan)
    with ExitStack() as stack:
        executors = Executors(Execution(out=out, device="cpu"), stack, inline=True, stop_at=stop_at)
        executors.configs = [replace(config, threads=1) for config in executors.configs]
        run_trials(plan, out, executors, said.append, limit=limit)
    return said


def numbers(out, plan):
    return [{name: row[name] for name in SAME} for row in table_rows(out, plan)]


def test_a_stopped_study_goes_on_to_the_results_of_one_that_was_not(tmp_path):
    plan, here, there = plan_of(), tmp_path / "here", tmp_path / "there"
    go(plan, there)
    # the time is up as soon as the second trial has begun, which then saves after its first step
    limit = TimeLimit(lambda: 10.0 * (len(list(here.glob("trials/*"))) > 1), stop_after=5.0)
    go(replace(plan, trials=plan.trials[:1]), here)
    (here / "plan.json").unlink()
    said = go(plan, here, limit, stop_at=0.0)
    (saved,) = here.glob("trials/*/checkpoints/*")
    begun = [trial.name for trial in plan.trials[1:] if has_begun(here, trial)]
    assert saved.name == "step-00000001" and begun == [saved.parent.parent.name]
    assert len(numbers(here, plan)) == 1 and f"{len(plan.trials) - 1} trials are left" in said[-1]
    go(plan, here)
    assert numbers(here, plan) == numbers(there, plan) and len(numbers(here, plan)) == 5
    for trial in plan.trials:
        files = [folder / "trials" / trial.name / "model.safetensors" for folder in (here, there)]
        first, second = (file.read_bytes() for file in files)
        assert first[-4000:] == second[-4000:]  # the arrays; the card before them has the path of the run
    rows = times.read(here)
    assert [row["ended"] for row in rows if "trial" in row] == ["finished", "stopped", *4 * ["finished"]]
    use = times.time_use(here, plan)
    assert use["sessions"] == 3 and use["busy"] is None and 0 < use["overhead"] < 1
    parts = sum(use[name] for name in (*times.PARTS, "other"))
    assert parts == pytest.approx(use["finished_trials"], rel=1e-3)
    assert use["session"] >= use["finished_trials"] + use["waiting"] - 0.1
    assert json.loads(json.dumps(report(here)))["time"] == use
    assert "overhead of trials" in (here / "page.html").read_text()


def test_what_a_limit_allows():
    now = 0.0
    limit = TimeLimit(lambda: now, stop_after=100.0, expected={"short": 20.0, "long": 60.0, "longest": 101.0})
    assert all(limit.allows(name) for name in ("short", "long", "longest", "unknown"))
    now = 41.0
    assert [limit.allows(name) for name in ("short", "long", "longest", "unknown")] == [
        True,
        False,
        True,
        True,
    ]
    now = 100.0
    assert limit.is_up() and not any(map(limit.allows, ("short", "long", "longest", "unknown")))
    late = TimeLimit(lambda: 50.0, stop_after=100.0, expected={"long": 60.0})
    assert late.allows("long")  # as the plan always takes 50 seconds, it would never start
    budget = TimeLimit(lambda: now, start_by=100.0)
    assert not budget.allows("short") and not budget.is_up()


def test_trials_are_expected_to_take_what_others_took_for_their_compute():
    plan = plan_of()
    work = trial_work(plan)
    first, second = plan.trials[0].name, plan.trials[1].name
    assert expected_seconds(work, {}) == {}
    expected = expected_seconds(work, {first: 10.0})
    assert expected[first] == pytest.approx(10.0) and expected[second] == pytest.approx(
        10.0 * work[second] / work[first]
    )


def test_a_trial_that_waits_for_one_without_time_is_left_too(tmp_path):
    plan = plan_of()
    limit = TimeLimit(lambda: 0.0, start_by=0.0)
    said = go(plan, tmp_path, limit)
    assert numbers(tmp_path, plan) == [] and "5 trials are left" in said[-1]


def test_busy_gpus_are_measured_only_where_the_driver_reports_it(monkeypatch, tmp_path):
    monkeypatch.setattr(times, "INTERVAL", 0.01)
    with times.session(tmp_path, ["cpu", "cpu"], 2, lambda: 7.0):
        time.sleep(0.05)
    values = iter([0.5, 1.0, *[0.9] * 1000])
    monkeypatch.setattr(times, "busy_reader", lambda device: lambda: next(values))
    with times.session(tmp_path, ["cuda:0", "cuda:0"], 2, lambda: 7.0):
        time.sleep(0.2)
    cpu, cuda = times.read(tmp_path)
    assert "busy" not in cpu and cpu["session"] == 7.0 and cpu["devices"] == ["cpu"]
    assert cuda["readings"] >= 2
    assert cuda["busy"] == pytest.approx((1.5 + 0.9 * (cuda["readings"] - 2)) / cuda["readings"])
    assert speed.busy_reader("cpu")() is None


def test_the_verb_stops_and_names_the_command_that_goes_on(tmp_path, capsys):
    words = ["study", "run", "heads", "--data", "digits", "--steps", "2", "--size", "0", "--seeds", "1",
             "--processes", "1", "--device", "cpu", "--out", tmp_path]  # fmt: skip
    assert run(*words, "--stop-after", "0.001s", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["finished"] == 0 and summary["trials"] == 7 and summary["time"] == {}
    assert summary["command"].startswith("vitkit study run heads --data digits")
    assert run(*words, "--stop-after", "soon") == 2
    assert "--stop-after 'soon'" in capsys.readouterr().err
    with refused("request.value", "--stop-after", "never"):
        parse_budget("never", "--stop-after")
    assert "overhead of trials" not in (tmp_path / "page.html").read_text()


def test_a_study_of_which_only_the_base_has_finished_has_no_figure_of_differences(tmp_path):
    row = {"trial": "change=base,data=a,seed=0", "change": "base", "data": "a", "seed": 0, "top1": 0.5}
    other = row | {"trial": "change=no-mixup,data=a,seed=0", "change": "no mixup", "top1": 0.6}
    assert figures_of(STUDIES["recipes"], [row], tmp_path) == []
    (figure,) = figures_of(STUDIES["recipes"], [row, other], tmp_path)
    assert list(figure["differences"]) == ["no mixup"]


@pytest.mark.slow
def test_processes_save_when_the_time_is_up_and_the_study_goes_on(tmp_path):
    plan, out = plan_of(steps=150), tmp_path / "out"

    def clock():  # the time is up once two trials train
        logs = [path for path in out.glob("trials/*/metrics.jsonl") if path.stat().st_size > 200]
        return 10.0 * (len(logs) >= 2)

    claim_folder(out, plan)
    said = []
    for limit in (TimeLimit(clock, stop_after=5.0), None):
        with ExitStack() as stack:
            executors = Executors(Execution(out=out, device="cpu", processes=2), stack)
            run_trials(plan, out, executors, said.append, limit=limit)
        if limit:
            assert len([t for t in plan.trials if has_begun(out, t)]) == 2 and not numbers(out, plan)
    assert {row["steps"] for row in numbers(out, plan)} == {150} and len(numbers(out, plan)) == 5
    whole = tmp_path / "whole"
    go(plan, whole)
    assert numbers(whole, plan) == numbers(out, plan)
