"""Studies on this machine: what is done stays done, what fails is listed, and a dead process is survived."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from small_study import answered, killed, tiny_plan, written
from test_cli import run

from vitkit.studies.conduct import Execution, Executors, report, run_trials
from vitkit.studies.executor import Job, LocalExecutor, run_jobs, worker_configs
from vitkit.studies.folder import claim_folder, read_failed, table_rows
from vitkit.studies.trial import WorkerConfig, run_trial


def carried_out(plan, out, **options):
    claim_folder(out, plan)
    with ExitStack() as stack:
        execution = Execution(out=out, device="cpu", **({"processes": 2} | options))
        run_trials(plan, out, Executors(execution, stack), lambda text: None)


@pytest.mark.slow
def test_a_failure_is_listed_while_others_finish_and_what_is_done_is_not_run_again(tmp_path):
    plan = tiny_plan()
    carried_out(plan, tmp_path)
    failed, first = read_failed(tmp_path), written(tmp_path)
    broken, after = (one.name for one in plan.trials[-2:])
    assert set(failed) == {broken, after} and len(first) == len(plan.trials) - 2
    assert "fewer than 1000 shots" in failed[broken]["error"]
    assert "Traceback" in failed[broken]["trace"]
    assert failed[after]["error"] == f"not run: {broken} failed"

    rows = table_rows(tmp_path, plan)
    output = report(tmp_path)
    assert output["finished"] == len(rows) == 5 and set(output["failed"]) == {broken, after}
    for row in rows:
        result = json.loads((tmp_path / "trials" / row["trial"] / "result.json").read_text())
        assert (row["top1"], row["fewshot_mean"]) == (
            result["test"]["top1"],
            result["test"].get("fewshot_mean"),
        )
        assert (row["exaFLOPs"], row["parameters"]) == (
            result["cost"]["exaFLOPs"],
            result["cost"]["parameters"],
        )
        assert row["seed"] in (0, 1) and row["train_images"] == 1618
    with (tmp_path / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(line["top1"]) for line in table] == [row["top1"] for row in rows]
    assert json.loads((tmp_path / "table.json").read_text()) == rows
    pyarrow = pytest.importorskip("pyarrow.parquet")
    assert pyarrow.read_table(tmp_path / "table.parquet").to_pylist() == rows
    page = (tmp_path / "page.html").read_text()
    assert "fewer than 1000 shots" in page
    assert "Average pooling at the learning rate of the class token" in page
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    report(tmp_path)
    assert drawn == {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert {name.rpartition(".")[2] for name in drawn} == {"svg", "png"}

    mended = tiny_plan(broken=False)
    (tmp_path / "plan.json").unlink()
    carried_out(mended, tmp_path)
    assert written(tmp_path) == first and not set(read_failed(tmp_path)) & {t.name for t in mended.trials}


def test_a_tuned_trial_starts_from_the_model_it_needs_by_the_convention_it_names(tmp_path):
    plan = tiny_plan(broken=False, seeds=1)
    first, tuned = plan.trials[0], plan.trials[-1]
    run_trial(first, tmp_path, WorkerConfig(threads=1))
    larger = replace(tuned.recipe, image_size=(24, 24))
    for resize in ("official", "torchvision"):
        actual = run_trial(
            replace(tuned, name=resize, recipe=larger, resize=resize), tmp_path, WorkerConfig(threads=1)
        )
        from vitkit.weights.load import load

        model = load(actual["model"])
        assert model.config.position_resize == resize and model.config.grid == (6, 6)
        assert not (tmp_path / "trials" / resize / "checkpoints").exists()


def test_a_trial_by_the_protocol_compares_rates_on_held_out_images_and_reports_the_best(tmp_path):
    plan = tiny_plan(broken=False, seeds=1)
    first, tuned = plan.trials[0], plan.trials[-1]
    base = replace(tuned.recipe, val=0.1)
    some = {
        f"rate-{rate:g}": replace(base, schedule=replace(base.schedule, rate=rate)) for rate in (1e-9, 0.1)
    }
    one = replace(tuned, compared=some)
    run_trial(first, tmp_path, WorkerConfig(threads=1))
    actual = run_trial(one, tmp_path, WorkerConfig(threads=1))
    folder = tmp_path / "trials" / one.name
    assert actual["chosen"] == "rate-0.1" and actual["tried"]["rate-0.1"] == max(actual["tried"].values())
    final = json.loads((folder / "seed-0" / "recipe.json").read_text())
    assert final["train_on"] == "train+val" and f"rate-{final['schedule']['rate']:g}" == actual["chosen"]
    assert final["weights"].endswith(f"{first.name}/model.safetensors") and actual["test"]["split"] == "test"
    assert not list(folder.rglob("checkpoints"))
    assert [p.parent.name for p in sorted(folder.rglob("model.safetensors"))] == [one.name, "seed-0"]
    (row,) = [r for r in table_rows(tmp_path, replace(plan, trials=(first, one))) if r["chosen"]]
    assert (row["chosen"], row["top1"]) == (actual["chosen"], actual["test"]["top1"])


@pytest.mark.slow
def test_what_is_compiled_for_one_trial_serves_all_of_its_shape(tmp_path):
    import torch._dynamo.config
    from torch._dynamo.utils import counters

    token, gap, again, other, *_ = tiny_plan(broken=False).trials
    torch.compiler.reset()
    counters.clear()
    made = []
    for one in (token, again, gap, other):
        run_trial(one, tmp_path, WorkerConfig(threads=1, compile=True))
        made.append(counters["stats"]["unique_graphs"])
    assert made[0] == made[1] < made[2] == made[3]
    assert torch._dynamo.config.recompile_limit > 8


@pytest.mark.slow
def test_a_killed_process_costs_its_own_job_only():
    jobs = [Job("dies", killed, ()), *(Job(f"job {i}", answered, (i,)) for i in range(6))]
    with LocalExecutor(worker_configs("cpu", 2)) as executor:
        actual = run_jobs([*jobs, Job("after", answered, (9,), needs="dies")], executor)
    assert "SIGKILL" in actual["dies"].error and "dies failed" in actual["after"].error
    assert [actual[f"job {i}"].value for i in range(6)] == list(range(6))


def test_the_verb_lists_plans_and_refuses(tmp_path, capsys):
    assert run("study", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["study"] for row in listed][:2] == ["scaling", "data-size"] and len(listed) == 12
    words = ["study", "run", "heads", "--data", "digits", "--steps", "5", "--out", str(tmp_path / "x")]
    assert run(*words, "--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["trials"] == 21 and plan["steps"] == 5 and not (tmp_path / "x").exists()
    assert run("study", "run", "head", "--data", "digits") == 2
    assert "unknown study 'head'" in capsys.readouterr().err
    assert run("study", "report", tmp_path) == 2 and "plan.json" in capsys.readouterr().err


@pytest.mark.slow
def test_stopped_by_a_signal_all_trials_save_and_the_same_command_goes_on(tmp_path):
    words = [sys.executable, "-m", "vitkit", "study", "run", "heads", "--data", "digits", "--steps", "120",
             "--seeds", "1", "--size", "0", "--processes", "2", "--device", "cpu", "--out", str(tmp_path),
             "--set", "evaluations=0", "batch=8", "--json"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(words, stderr=subprocess.PIPE, env=environment, start_new_session=True)
    while len([p for p in tmp_path.glob("trials/*/metrics.jsonl") if p.stat().st_size > 200]) < 2:
        assert first.poll() is None
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGINT)  # as Ctrl-C on a terminal does
    _, said = first.communicate(timeout=120)
    assert first.returncode == 128 + signal.SIGINT and b"repeat the command" in said
    saved = sorted(path.name for path in tmp_path.glob("trials/*/checkpoints/step-*"))
    assert len(saved) == 2 and not list(tmp_path.glob("trials/*/result.json"))
    done = subprocess.run(words, capture_output=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["finished"] == output["trials"] == 7 and not output["failed"]


@pytest.mark.slow
def test_a_budget_is_kept(tmp_path, capsys):
    words = ["study", "run", "positions", "--data", "digits", "--budget", "100s", "--seeds", "1", "--device",
             "cpu", "--processes", "2", "--size", "0", "--out", str(tmp_path), "--json"]  # fmt: skip
    begun = time.monotonic()
    assert run(*words) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["finished"] == output["trials"] == 10
    assert time.monotonic() - begun < 250  # a shared machine may be much slower than when it was timed
    assert len(list((tmp_path / "figures").glob("*twice-as-long.svg"))) == 1
