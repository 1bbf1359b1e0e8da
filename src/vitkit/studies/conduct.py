"""Run a study from a request to its report page, and write the page of an existing study again."""

import json
import math
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.io.files import locked, replace_file
from vitkit.options import parse_budget
from vitkit.recipes.recipe import Recipe
from vitkit.report.study_page import difference_rows, study_page
from vitkit.report.terminal import print_facts, print_table, say, warn
from vitkit.studies import clusters
from vitkit.studies.analysis import factors_of, figures_of, means, means_row
from vitkit.studies.claims import evaluate_claim
from vitkit.studies.differences import changes_from_base
from vitkit.studies.executor import (
    InlineExecutor,
    Job,
    LocalExecutor,
    run_jobs,
    share_gpus,
    worker_configs,
)
from vitkit.studies.fits import laws
from vitkit.studies.folder import (
    claim_folder,
    has_begun,
    is_finished,
    read_failed,
    read_plan,
    table_rows,
    write_table,
)
from vitkit.studies.forecasts import before_prediction, compare, predict
from vitkit.studies.prepare import Request, Stopwatch, Timings, make_plan, run_order
from vitkit.studies.progress import Progress
from vitkit.studies.recipe_plan import plan_recipes, select
from vitkit.studies.scale import study as named_study
from vitkit.studies.study import Plan
from vitkit.studies.study_inputs import check_inputs, resumed_plan
from vitkit.studies.time_limit import TimeLimit
from vitkit.studies.time_use import facts as time_facts
from vitkit.studies.time_use import session, time_line, time_use
from vitkit.studies.trial import BATCHES, SPLITS, measure_timing, run_trial

PAGE, SUMMARY = "page.html", "summary.json"
Emit = Callable[[Any], None] | None
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how a study runs; unlike a `Request`, it does not determine the results."""

    out: Path
    on: str = "local"  # or ray, slurm
    processes: int | None = None
    device: str = "auto"
    precision: str = "auto"
    compile: bool = False
    cluster: tuple[str, ...] = ()  # sbatch options by their submitit names
    plan: bool = False  # print the plan only
    stop_after: str = ""  # a duration after which running trials save and stop; empty: none
    only: tuple[str, ...] = ()  # words in the names of the changes to run, of a study of recipes; empty: all

    def __post_init__(self):
        if self.on not in ("local", "ray", "slurm"):
            raise Error(f"--on must be local, ray or slurm, not {self.on!r}")


def run_study(request: Request, execution: Execution, emit: Emit) -> bool:
    """Plan a study, run its unfinished trials and write its page; return whether all trials succeeded."""
    log: Log = (lambda text: None) if emit else warn
    fixed, clock = bool(named_study(request.study).base), Stopwatch()
    stop_after = parse_budget(execution.stop_after, "--stop-after") if execution.stop_after else math.inf
    budget = parse_budget(request.budget) if fixed else math.inf  # other plans are made to fit it
    with ExitStack() as stack:
        executors = Executors(
            execution, stack, log, inline=fixed and not execution.processes,
            stop_at=clock.start_time + stop_after,
        )  # fmt: skip
        plan = resumed_plan(execution.out, request.to_json())
        if plan is None and fixed:
            plan = plan_recipes(request, executors.slots, SPLITS, log)
        plan = plan or make_plan(request, executors.slots, executors.measure, log)
        selected = select(plan.trials, execution.only)  # refuses unknown names
        if execution.plan:
            facts = {"study": plan.study, "out": str(execution.out)} | plan.chosen
            names = [trial.name for trial in selected]
            if execution.only:
                changes = list(dict.fromkeys(str(trial.factors["change"]) for trial in selected))
                facts |= {"trials": len(selected), "changes": changes}
            emit(facts | {"names": names}) if emit else print_facts(facts)
            return True
        execution.out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(execution.out))
        check_inputs(execution.out, plan)
        claim_folder(execution.out, plan)
        limit = TimeLimit(clock, start_by=budget, stop_after=stop_after)
        small = before_prediction(plan, named_study(plan.study), execution.out)
        run_trials(small, execution.out, executors, log, execution.only, limit)
        if predict(plan, named_study(plan.study), execution.out, log) and small is not plan:
            run_trials(plan, execution.out, executors, log, execution.only, limit.rest())
    summary = report(execution.out)
    emit(summary) if emit else print_summary(summary)
    return not summary["failed"]


class Executors:
    """The executors of a study: the local one times steps; trials run on it or on a cluster.

    inline: local trials run in this process, and stop at `stop_at`, a value of time.monotonic().
    """

    def __init__(
        self, execution: Execution, stack: ExitStack, log: Log = lambda text: None, inline: bool = False,
        stop_at: float = math.inf,
    ):  # fmt: skip
        self.execution, self.stack, self.log, self.inline = execution, stack, log, inline
        self.stop_at = stop_at
        count = execution.processes if execution.on == "local" and not inline else 1
        self.configs = worker_configs(execution.device, count, execution.precision, execution.compile)
        self.pool: LocalExecutor | None = None

    @property
    def slots(self) -> int:
        return len(self.configs) if self.execution.on == "local" else self.execution.processes or 1

    @property
    def devices(self) -> list[str]:
        """The devices of the trials, if they run on this machine."""
        return [config.device for config in self.configs] if self.execution.on == "local" else []

    def local(self) -> LocalExecutor:
        """The local executor, started on first use."""
        if self.pool is None:
            if self.stack.enter_context(share_gpus([config.device for config in self.configs])):
                self.log("processes share each GPU through NVIDIA MPS")
            self.pool = self.stack.enter_context(LocalExecutor(self.configs))
        return self.pool

    def measure(self, kinds: Sequence[Recipe]) -> Timings:
        """Time each kind of step on all processes at once, so that they compete as in the study."""
        jobs = [Job(f"timing {i}", measure_timing, (kind,)) for i, kind in enumerate(kinds)]
        outcomes = run_jobs(jobs, self.local())
        for outcome in outcomes.values():
            if outcome.error:
                raise Error(f"timing a training step failed: {outcome.error}", code="study.value")
        return {kind: outcomes[f"timing {i}"].value for i, kind in enumerate(kinds)}

    def for_trials(self) -> Any:
        """The executor that runs the trials."""
        execution = self.execution
        resources = clusters.Resources(execution.device, execution.precision, execution.compile)
        if execution.on == "ray":
            return self.stack.enter_context(clusters.RayExecutor(resources, execution.processes))
        if execution.on == "slurm":
            options = clusters.parse_options(execution.cluster)
            if execution.processes:
                options.setdefault("slurm_array_parallelism", execution.processes)
            slurm = clusters.SlurmExecutor(resources, execution.out / "slurm", options)
            return self.stack.enter_context(slurm)
        if self.inline:
            return InlineExecutor(
                replace(self.configs[0], threads=0, cache_batches=False, stop_at=self.stop_at)
            )
        return self.local()


def run_trials(
    plan: Plan,
    out: Path,
    executors: Executors,
    log: Log,
    only: Sequence[str] = (),
    limit: TimeLimit | None = None,
) -> None:
    """Run all unfinished trials; record each result and each failure as soon as it happens.

    Interrupted trials come first. only: see `Execution`. limit: how much time there is.
    """
    trials, limit = select(run_order(plan), only), limit or TimeLimit(Stopwatch())
    unfinished = [trial for trial in trials if not is_finished(out, trial)]
    unfinished = sorted(unfinished, key=lambda trial: not has_begun(out, trial))
    if len(unfinished) < len(trials):
        log(f"{len(trials) - len(unfinished)} of {len(trials)} trials are already finished")
    if not unfinished:
        return
    shutil.rmtree(out / BATCHES, ignore_errors=True)  # a killed process left them; the data may have changed
    progress = Progress(plan, out, limit, [trial.name for trial in unfinished], log)
    folder = out.absolute()
    jobs = [Job(trial.name, run_trial, (trial, folder), trial.needs) for trial in unfinished]
    try:
        executor = executors.for_trials()
        with session(out, executors.devices, executors.slots, limit.clock):
            run_jobs(jobs, executor, progress.on_end, limit)
    finally:
        shutil.rmtree(folder / BATCHES, ignore_errors=True)
    progress.close()


def report(out: Path) -> dict[str, Any]:
    """Write table, figures, page and summary.json of a study folder; return the summary."""
    plan = read_plan(out)
    study = named_study(plan.study)
    rows = table_rows(out, plan)
    write_table(out, rows)
    finished = {row["trial"] for row in rows}
    failed = {name: error for name, error in read_failed(out).items() if name not in finished}
    claims = study.claims_at(plan.asked["scale"])
    summary: dict[str, Any] = {
        "study": plan.study, "out": str(out), "page": str(out / PAGE), "score": study.score,
        "trials": len(plan.trials), "finished": len(rows), "failed": failed,
        "verdicts": [evaluate_claim(claim, rows, study.score).to_json() for claim in claims],
        "means": means(rows, plan), "laws": laws(rows, study.fitted, study.score) if study.fitted else [],
        "changes": changes_from_base(study, rows) if study.base else [],
        "predictions": compare(out, rows),
        "time": time_use(out, plan), "command": command(plan, out),
    }  # fmt: skip
    page = study_page(
        summary | {"shows": study.shows, "about": study.about, "published": study.published,
                   "figures": figures_of(study, rows, out), "rows": rows, "factors": factors_of(plan),
                   "table": "table.csv", "chosen": plan_settings(plan), "total": len(plan.trials),
                   "commands": [summary["command"]], "time": time_facts(summary["time"]),
                   "means": [means_row(row) for row in summary["means"]]}
    )  # fmt: skip
    replace_file(out / PAGE, lambda beside: beside.write_text(page, encoding="utf-8"))
    text = json.dumps(summary, indent=1)
    replace_file(out / SUMMARY, lambda beside: beside.write_text(text, encoding="utf-8"))
    return summary


def plan_settings(plan: Plan) -> dict[str, Any]:
    """The settings of a plan for its page, one printable value for each name."""
    images = plan.chosen["train_images"]
    request: dict[str, Any] = {"data": list(plan.asked["data"])}
    if not named_study(plan.study).base:
        request["downstream"] = plan.asked["downstream"] or "same as data"
    return request | plan.chosen | {"train_images": [f"{path}: {n:,}" for path, n in images.items()]}


def command(plan: Plan, out: Path) -> str:
    """The command that resumes a study, or repeats it elsewhere."""
    lists = {name: tuple(plan.asked.get(name, ())) for name in ("data", "set", "rows")}
    request = Request(**(plan.asked | lists))
    words = ["vitkit", "study", "run", request.study, "--data", *request.data]
    words += ["--weights", request.weights] if request.weights else []
    defaults = replace(request, downstream="", budget="20min", seeds=3, scale="mini", image_size=None,
                       steps=None, size=None, set=(), rows=())  # fmt: skip
    for name, value in request.to_json().items():
        if value != defaults.to_json().get(name):
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join([*words, "--out", str(out)])


def print_summary(summary: Mapping[str, Any]) -> None:
    if summary["changes"]:
        print_table(difference_rows(summary["changes"]))
    if summary["verdicts"]:
        print_claims(summary["verdicts"])
    for name, failure in summary["failed"].items():
        say(f"failed: {name}: {failure['error'].splitlines()[0]}")
    if summary["time"]:
        say(time_line(summary["time"]))
    if summary["finished"] < summary["trials"]:
        say(f"to go on: {summary['command']}")
    say(f"{summary['finished']} of {summary['trials']} trials are finished; page: {summary['page']}")


def print_claims(verdicts: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        {"claim": verdict["claim"], "outcome": verdict["outcome"], "measured": verdict["words"]}
        for verdict in verdicts
    )
