"""The same plan on Ray and through submitit: the same table as on this machine."""

import pytest
from refusals import refused
from small_study import tiny_plan
from test_studies_drive import carried_out

from vitkit.studies.clusters import RayExecutor, Resources, SlurmExecutor, parse_options
from vitkit.studies.executor import Job, run_jobs
from vitkit.studies.folder import claim_folder, table_rows
from vitkit.studies.trial import run_trial

SAME = ("trial", "head", "seed", "steps", "exaFLOPs", "top1", "fewshot_mean", "images_seen")


def numbers(out, plan):
    return [{name: row[name] for name in SAME} for row in table_rows(out, plan)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    out, plan = tmp_path_factory.mktemp("here"), tiny_plan(seeds=1)
    carried_out(plan, out, processes=1)
    return numbers(out, plan)


def jobs(plan, out):
    claim_folder(out, plan)
    return [Job(one.name, run_trial, (one, out), one.needs) for one in plan.trials]


@pytest.mark.slow
def test_ray_comes_to_the_same_table(tmp_path, here):
    pytest.importorskip("ray")
    plan = tiny_plan(seeds=1)
    with RayExecutor(Resources("cpu"), processes=2) as executor:
        result = run_jobs(jobs(plan, tmp_path), executor)
    assert numbers(tmp_path, plan) == here
    assert [one.name for one in plan.trials if result[one.name].error] == [t.name for t in plan.trials[-2:]]


@pytest.mark.slow
def test_submitit_comes_to_the_same_table(tmp_path, here):
    pytest.importorskip("submitit")
    plan = tiny_plan(seeds=1)
    options = {"timeout_min": 5, "cpus_per_task": 1}
    with SlurmExecutor(Resources("cpu", cores=1), tmp_path / "jobs", options, cluster="local") as executor:
        result = run_jobs(jobs(plan, tmp_path), executor)
    assert numbers(tmp_path, plan) == here
    assert [one.name for one in plan.trials if result[one.name].error] == [t.name for t in plan.trials[-2:]]


def test_slurm_says_what_is_missing(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("request.missing", "--on slurm", "sbatch"):
        SlurmExecutor(Resources(), tmp_path)


def test_options_of_a_cluster_are_names_with_values():
    assert parse_options(["slurm_partition=gpu", "gpus_per_node=1"]) == {
        "slurm_partition": "gpu",
        "gpus_per_node": 1,
    }
    with refused("request.value", "gpu", "name=value"):
        parse_options(["gpu"])
