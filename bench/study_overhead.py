"""What trials of a study cost beside their own steps, one after the other in one process.

    python bench/study_overhead.py --data digits --steps 100 --device cpu

Told for each trial and in all: the seconds of its steps (as its own ledger counts them), of its evaluations,
and of everything else (opening data, building, checkpoints, files), and the driver's own time around them.
The ledger counts what the first steps of a process prepare (kernels, a recording) as time of steps: how much
longer they were than those of the same trial with another seed is told too, if one is among the trials.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from vitkit.runs import finish
from vitkit.runs import run as experiment
from vitkit.runs.checkpointer import Checkpointer
from vitkit.runs.evaluator import Evaluator
from vitkit.studies.executor import InlineExecutor, Job, run_jobs
from vitkit.studies.prepare import Request, make_plan
from vitkit.studies.trial import WorkerConfig, run_trial


def timed(owner: object, name: str, spent: dict[str, float]) -> None:
    """Add up what a part of a run takes."""
    part = getattr(owner, name)

    def call(*args, **options):
        begun = time.perf_counter()
        try:
            return part(*args, **options)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun

    setattr(owner, name, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--downstream", default="")
    parser.add_argument("--study", default="positions")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    request = Request(study=options.study, data=(options.data,), downstream=options.downstream,
                      steps=options.steps, size=0)  # fmt: skip
    plan = make_plan(request, 1, lambda kinds: {})
    spent: dict[str, float] = {}
    for owner, name in (
        (Evaluator, "evaluate"), (Evaluator, "evaluate_fewshot"), (experiment, "finish_run"),
        (experiment.Trainer, "train"), (experiment.Trainer, "check_files"), (Checkpointer, "save"),
        (finish, "save_model"),
    ):  # fmt: skip
        timed(owner, name, spent)
    torch.set_num_threads(1)
    config = WorkerConfig(device=options.device, workers=options.workers, threads=1, cache_batches=True)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(one.name, run_trial, (one, Path(folder)), one.needs) for one in plan.trials[: options.trials]
        ]
        begun = time.perf_counter()
        found = run_jobs(jobs, InlineExecutor(config))
        total = time.perf_counter() - begun
    for name, outcome in found.items():
        assert not outcome.error, outcome.trace
        print(f"{name}: {outcome.seconds:.2f} s, of them {outcome.value['cost']['seconds']:.2f} s of steps")
    steps = sum(outcome.value["cost"]["seconds"] for outcome in found.values())
    looking = spent["evaluate"] + spent["evaluate_fewshot"]
    rest = total - steps - looking
    print({name: round(value, 2) for name, value in spent.items()})
    print(f"{len(found)} trials: {total:.2f} s; steps {steps:.2f} s, evaluation {looking:.2f} s "
          f"({looking / steps:.1%} of the steps), the rest {rest:.2f} s ({rest / steps:.1%}), of it the "
          f"driver {total - sum(o.seconds for o in found.values()):.3f} s")  # fmt: skip
    parts = [outcome.value["cost"]["time"] for outcome in found.values()]
    recorded = {name: sum(part[name] for part in parts) for name in parts[0]}
    working = recorded["data"] + recorded["training"] + recorded["evaluation"]
    print("as the trials recorded it:", {name: round(value, 2) for name, value in recorded.items()},
          f"overhead {1 - working / sum(o.seconds for o in found.values()):.1%} of the trials")  # fmt: skip
    (name, first), *others = ((name, outcome.value["cost"]["seconds"]) for name, outcome in found.items())
    for other, seconds in others:
        if name.rpartition(",")[0] == other.rpartition(",")[0]:
            print(f"steps of the first trial: {first - seconds:.2f} s longer than those of {other}")


if __name__ == "__main__":
    main()
