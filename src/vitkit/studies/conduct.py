"""The verbs of studies: what there is, a study from a request to its page, and the page again."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.io.files import locked, replace_file
from vitkit.metrics.intervals import percent
from vitkit.recipes.recipe import Recipe
from vitkit.report.study_page import study_page
from vitkit.report.terminal import duration, print_facts, print_table, say, warn
from vitkit.studies import clusters
from vitkit.studies.analysis import factors_of, figures_of, judge, laws, means, table6
from vitkit.studies.executor import Job, Local, Outcome, drive, places, together
from vitkit.studies.folder import (
    claim,
    done,
    read_failed,
    read_plan,
    remembered,
    rows_of,
    write_failed,
    write_table,
)
from vitkit.studies.prepare import Paces, Request, Stopwatch, make_plan, ordered
from vitkit.studies.scale import study as named_study
from vitkit.studies.study import Plan
from vitkit.studies.trial import BATCHES, pace_of, perform

PAGE, SUMMARY = "page.html", "summary.json"
Emit = Callable[[Any], None] | None
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Where:
    """What may differ from one machine to the next without changing what a study comes to."""

    out: Path
    on: str = "local"  # or ray, slurm
    processes: int | None = None
    device: str = "auto"
    precision: str = "auto"
    compile: bool = False
    cluster: tuple[str, ...] = ()  # options of sbatch, by their names in submitit
    plan: bool = False

    def __post_init__(self):
        if self.on not in ("local", "ray", "slurm"):
            raise Error(f"--on must be local, ray or slurm, not {self.on!r}")


def run_study(request: Request, where: Where, emit: Emit) -> bool:
    """Plan, run what is not done yet, write table, figures and page; whether every trial has succeeded."""
    log: Tell = (lambda text: None) if emit else warn
    with ExitStack() as held:
        crews = Executors(where, held, log)
        plan = remembered(where.out, request.asked())
        plan = plan or make_plan(request, crews.slots, crews.measure, log)
        if where.plan:
            told = {"study": plan.study, "out": str(where.out)} | plan.chosen
            emit(told | {"names": [one.name for one in plan.trials]}) if emit else print_facts(told)
            return True
        where.out.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(where.out))
        claim(where.out, plan)
        carry_out(plan, where.out, crews, log)
    told = report(where.out)
    emit(told) if emit else tell_summary(told)
    return not told["failed"]


class Executors:
    """Who times steps and who runs trials: the same processes, where both are on this machine."""

    def __init__(self, where: Where, held: ExitStack, log: Tell = lambda text: None):
        self.where, self.held, self.log = where, held, log
        count = where.processes if where.on == "local" else 1
        self.places = places(where.device, count, where.precision, where.compile)
        self.here: Local | None = None

    @property
    def slots(self) -> int:
        return len(self.places) if self.where.on == "local" else self.where.processes or 1

    def local(self) -> Local:
        if self.here is None:
            if self.held.enter_context(together([place.device for place in self.places])):
                self.log("processes on one GPU compute at the same time, by NVIDIA's MPS")
            self.here = self.held.enter_context(Local(self.places))
        return self.here

    def measure(self, kinds: Sequence[Recipe]) -> Paces:
        """Every kind of step, timed while the other processes time others: as it will be."""
        jobs = [Job(f"pace {i}", pace_of, (kind,)) for i, kind in enumerate(kinds)]
        found = drive(jobs, self.local())
        for outcome in found.values():
            if outcome.error:
                raise Error(f"a training step could not be timed: {outcome.error}", code="study.value")
        return {kind: found[f"pace {i}"].value for i, kind in enumerate(kinds)}

    def crew(self) -> Any:
        """Whoever runs the trials."""
        where = self.where
        share = clusters.Share(where.device, where.precision, where.compile)
        if where.on == "ray":
            return self.held.enter_context(clusters.Ray(share, where.processes))
        if where.on == "slurm":
            options = clusters.parse_options(where.cluster)
            if where.processes:
                options.setdefault("slurm_array_parallelism", where.processes)
            return self.held.enter_context(clusters.Slurm(share, where.out / "slurm", options))
        return self.local()


def carry_out(plan: Plan, out: Path, crews: Executors, log: Tell) -> None:
    """Every trial that has no result yet; after each, what failed and the table are written."""
    left = [one for one in ordered(plan) if not done(out, one)]
    if len(left) < len(plan.trials):
        log(f"{len(plan.trials) - len(left)} of {len(plan.trials)} trials were finished before")
    if not left:
        return
    failed = {k: v for k, v in read_failed(out).items() if not any(one.name == k for one in left)}
    write_failed(out, failed)
    shutil.rmtree(out / BATCHES, ignore_errors=True)  # of a process that was killed; the data may be another
    clock, ended = Stopwatch(), [0]
    folder = out.absolute()

    def hear(job: Job, outcome: Outcome) -> None:
        ended[0] += 1
        if outcome.error:
            failed[job.name] = {"error": outcome.error, "trace": outcome.trace}
            write_failed(out, failed)
        rest = clock() / ended[0] * (len(left) - ended[0])
        log(f"{ended[0]}/{len(left)} {job.name}: {in_short(outcome)}; about {duration(rest)} left")

    try:
        drive([Job(one.name, perform, (one, folder), one.needs) for one in left], crews.crew(), hear)
    finally:
        shutil.rmtree(folder / BATCHES, ignore_errors=True)


def in_short(outcome: Outcome) -> str:
    if outcome.error:
        return f"FAILED: {outcome.error.splitlines()[0][:200]}"
    test = outcome.value["test"]
    few = ""
    if "fewshot_mean" in test:
        few = f", few-shot {percent(test['fewshot_mean'], test['fewshot_images'])}"
    return f"{percent(test['top1'], test['images'])}{few}, {outcome.seconds:.0f} s"


def report(out: Path) -> dict[str, Any]:
    """Table, figures and page out of what the folder holds; the summary that is told."""
    plan = read_plan(out)
    study = named_study(plan.study)
    rows = rows_of(out, plan)
    write_table(out, rows)
    failed = {k: v for k, v in read_failed(out).items() if k not in {row["trial"] for row in rows}}
    summary: dict[str, Any] = {
        "study": plan.study, "out": str(out), "page": str(out / PAGE), "score": study.score,
        "trials": len(plan.trials), "finished": len(rows), "failed": failed,
        "verdicts": [judge(one, rows, study.score).to_json() for one in study.claims_at(plan.asked["scale"])],
        "means": means(rows, plan), "laws": laws(rows, study.fitted, study.score) if study.fitted else [],
    }  # fmt: skip
    page = study_page(
        summary | {"shows": study.shows, "about": study.about, "published": study.published,
                   "figures": figures_of(study, rows, out), "rows": rows, "factors": factors_of(plan),
                   "table": "table.csv", "chosen": plain(plan), "total": len(plan.trials),
                   "commands": [command(plan, out)],
                   "means": [table6(line) for line in summary["means"]]}
    )  # fmt: skip
    replace_file(out / PAGE, lambda beside: beside.write_text(page, encoding="utf-8"))
    text = json.dumps(summary, indent=1)
    replace_file(out / SUMMARY, lambda beside: beside.write_text(text))
    return summary


def plain(plan: Plan) -> dict[str, Any]:
    """What was chosen, one value a name."""
    images = plan.chosen["train_images"]
    asked = {"data": list(plan.asked["data"]), "downstream": plan.asked["downstream"] or "the same"}
    return asked | plan.chosen | {"train_images": [f"{place}: {n:,}" for place, n in images.items()]}


def command(plan: Plan, out: Path) -> str:
    """The command that goes on with a study, or makes it again elsewhere."""
    lists = {name: tuple(plan.asked.get(name, ())) for name in ("data", "set", "rows")}
    request = Request(**(plan.asked | lists))
    words = ["vitkit study run", request.study, "--data", *request.data]
    usual = replace(request, downstream="", budget="20min", seeds=3, scale="mini", image_size=None,
                    steps=None, size=None, set=(), rows=())  # fmt: skip
    for name, value in request.asked().items():
        if value != usual.asked().get(name):
            words += [
                f"--{name.replace('_', '-')}",
                *map(str, value if isinstance(value, list) else [value]),
            ]
    return " ".join([*words, "--out", str(out)])


def tell_summary(told: Mapping[str, Any]) -> None:
    print_table(
        {"claim": v["claim"], "found": v["outcome"], "measured": v["words"]} for v in told["verdicts"]
    )
    for name, one in told["failed"].items():
        say(f"failed: {name}: {one['error'].splitlines()[0]}")
    say(f"{told['finished']} of {told['trials']} trials are finished; the page: {told['page']}")
