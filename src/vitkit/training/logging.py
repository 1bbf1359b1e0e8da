"""Where a run's numbers go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio."""

import contextlib
import importlib.util
import io
import json
import netrc
import os
import queue
import re
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vitkit.errors import Error
from vitkit.io.files import naming, staged
from vitkit.report.terminal import warn

PROJECT = "vitkit"
START_SECONDS = 90.0  # so long a run waits for a tracker before it starts without it,
CLOSE_SECONDS = 30.0  # and so long at its end, until what is left is sent
WAITING_ROWS = 100_000  # a tracker that is further behind than this is given up


class Tracker(Protocol):
    """Anything that takes numbers by step."""

    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self, failed: bool = False) -> None: ...


def check_trackers(names: Iterable[str]) -> None:
    """A ValueError for a tracker that is not known or not installed; nothing is imported or created."""
    for name in names:
        if name not in TRACKERS:
            raise Error(f"no tracker {name!r}; known: {', '.join(TRACKERS)}", code="request.unknown")
        spec = importlib.util.find_spec(name)
        # A folder "wandb" in the working directory looks like a package, but one without an origin.
        if spec is None or spec.origin is None:
            raise Error(
                f'the tracker {name} is not installed: pip install "vitkit[{name}]"',
                code="request.extra-missing",
            )


def open_tracker(name: str, folder: Path, about: Mapping[str, Any]) -> "Aside":
    """The run of this folder in the tracker of that name: a new one, or the one it has had before."""
    make = TRACKERS[name]
    return Aside(lambda: make(folder.resolve(), plain(about)))


def plain(about: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Values that every tracker takes: numbers and text stay, the rest is written out."""
    return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in about.items()}


def note_of(folder: Path, name: str) -> Path:
    """The file in a run folder that remembers which run of a tracker it is."""
    (folder / "trackers").mkdir(exist_ok=True)
    return folder / "trackers" / name


class Aside:
    """A tracker in a thread of its own: training never waits for a network, nor does the end of the process.

    What goes wrong over there is raised here, at the next call. The loader's forked workers leave by
    os._exit: they run no exit hook of a tracker, and none of its threads lives in them.
    """

    def __init__(self, make: Callable[[], Any]):
        self.rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue()
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.failed, self.where = False, ""
        self.thread = threading.Thread(target=self.work, args=(make,), daemon=True)
        with contextlib.redirect_stdout(io.StringIO()):  # greetings; stdout is for the command's answer
            self.thread.start()
            if not self.ready.wait(START_SECONDS):
                self.failed = True
                self.rows.put(None)  # should it come up yet, it closes at once
                raise TimeoutError(f"did not start within {START_SECONDS:.0f} s")
        self.check()

    def work(self, make: Callable[[], Any]) -> None:
        tracker = None
        try:
            tracker = make()
            self.where = tracker.where
            self.ready.set()
            while (row := self.rows.get()) is not None:
                tracker.log(*row)
            tracker.close(self.failed)
        except BaseException as error:  # SystemExit too: some libraries leave that way
            self.error = error
            self.ready.set()
            if tracker is not None:
                with contextlib.suppress(BaseException):  # best effort: it is given up already
                    tracker.close(failed=True)

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"{type(self.error).__name__}: {self.error}") from self.error

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.check()
        if self.rows.qsize() >= WAITING_ROWS:
            raise TimeoutError(f"{WAITING_ROWS} rows are waiting to be sent")
        self.rows.put((step, numbers))

    def close(self, failed: bool = False) -> None:
        self.failed = failed
        self.rows.put(None)
        with contextlib.redirect_stdout(io.StringIO()):
            self.thread.join(CLOSE_SECONDS)
        self.check()
        if self.thread.is_alive():
            raise TimeoutError(f"did not finish within {CLOSE_SECONDS:.0f} s; its last rows may be missing")


class TensorBoard:
    """Event files. Resumed: readers forget the values after the step, and the new ones take their place."""

    def __init__(self, folder: Path, step: int, about: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # purge_step is the first step that is forgotten. The default of 120 s between flushes would leave
        # a hole before the checkpoint when a process is killed.
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0, flush_secs=5)
        self.end: Any = None
        if about:
            shown: dict[str, Any] = dict.fromkeys(("loss", "val_top1", "test_top1"), 0)
            experiment, start, self.end = hparams(plain(about), shown)
            if not step:
                self.summary(experiment)
                self.summary(start)

    def summary(self, summary: Any) -> None:
        self.writer._get_file_writer().add_summary(summary)  # add_hparams would open a second run

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool = False) -> None:
        if self.end is not None and not failed:
            self.summary(self.end)
        self.writer.close()


class Wandb:
    """Weights & Biases. Resumed: the same run by its id; steps that were logged before are there twice.

    Its own step may not go back, it would drop those rows. So ours is a number of the row and the x axis.
    """

    def __init__(self, folder: Path, about: dict[str, Any]):
        import wandb

        note = note_of(folder, "wandb")
        if not note.exists():
            note.write_text(uuid.uuid4().hex[:12])
        offline = "WANDB_MODE" not in os.environ and not wandb_login(wandb.setup().settings)
        settings = wandb.Settings(
            console="off", silent=True, init_timeout=START_SECONDS - 10, reinit="create_new",
            finish_timeout=CLOSE_SECONDS, finish_timeout_raises=True,
        )  # fmt: skip
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=folder.name, id=note.read_text(),
            resume="allow", dir=folder, config=about, mode="offline" if offline else None, settings=settings,
        )  # fmt: skip
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        why = "offline, as there is no API key" if offline else "offline"
        stays = f"{why}: in {folder / 'wandb'}; `wandb sync` sends it"
        self.where = stays if self.run.offline else self.run.url or "disabled"

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers | {"step": step})

    def close(self, failed: bool = False) -> None:
        self.run.finish(exit_code=int(failed))


def wandb_login(settings: Any) -> bool:
    """Whether wandb can log in without asking."""
    if settings.api_key or settings.identity_token_file:
        return True
    file = os.environ.get("NETRC") or Path("~/.netrc").expanduser()
    try:
        return netrc.netrc(file).authenticators(urllib.parse.urlsplit(settings.base_url).hostname) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MLflow:
    """MLflow. Resumed: the same run by its id; steps logged before are there twice, the newer counts."""

    SECONDS, METRICS, PARAMS = (
        1.0,
        900,
        100,
    )  # a request a second is enough; the protocol's limits of a request

    def __init__(self, folder: Path, about: dict[str, Any]):
        from mlflow import MlflowClient

        store, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not store:  # a database in a file: needs no server, and travels with the run folder
            (folder / "mlflow").mkdir(exist_ok=True)
            store = f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"
            place = (folder / "mlflow" / "artifacts").as_uri()
        self.where = re.sub(r"//[^/@]*@", "//", store)  # shown: without a password
        self.client = MlflowClient(tracking_uri=store)  # not the module's functions: no global state
        self.metrics: list[Any] = []
        self.sent = 0.0
        note = note_of(folder, "mlflow")
        if not (note.exists() and self.resumed(note.read_text())):
            self.run = self.started(folder.name, place, about)
            note.write_text(self.run)

    def resumed(self, run: str) -> bool:
        """Whether the store has this run; it may be another store than the last time."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.update_run(run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        self.run = run
        return True

    def started(self, name: str, place: str | None, about: dict[str, Any]) -> str:
        from mlflow.entities import Param

        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project, place)
        run: str = self.client.create_run(experiment, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in about.items()]
        for at in range(0, len(params), self.PARAMS):
            self.client.log_batch(run, params=params[at : at + self.PARAMS], synchronous=True)
        return run

    def log(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.metrics += [Metric(name, value, now, step) for name, value in numbers.items()]
        if time.monotonic() - self.sent > self.SECONDS or len(self.metrics) >= self.METRICS:
            self.send()

    def send(self) -> None:
        for at in range(0, len(self.metrics), self.METRICS):
            self.client.log_batch(self.run, metrics=self.metrics[at : at + self.METRICS], synchronous=True)
        self.metrics, self.sent = [], time.monotonic()

    def close(self, failed: bool = False) -> None:
        self.send()
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


class Trackio:
    """Trackio. Resumed: the same run by its name; steps that were logged before are there twice."""

    def __init__(self, folder: Path, about: dict[str, Any]):
        import trackio

        note = note_of(folder, "trackio")
        if not note.exists():  # a name is all it knows a run by, and other folders may be called the same
            taken: set[str] = set()
            with contextlib.suppress(ValueError):  # no run of ours yet
                taken = {run.name for run in trackio.Api().runs(PROJECT)}
            note.write_text(folder.name + (f"-{uuid.uuid4().hex[:6]}" if folder.name in taken else ""))
        self.run = trackio.init(
            PROJECT, name=note.read_text(), config=about, resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self.where = f"`trackio show --project {PROJECT}` shows it"

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self, failed: bool = False) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip


LAST, HUGE = 2**53, 1e300  # what counts as a step, and as a number; NaN does not
SECOND = 1.0  # between two passing rows that trackers are told


def tell(text: str) -> None:
    warn(f"vitkit: {text}")


def parse_row(line: str) -> dict[str, Any] | None:
    """The numbers of a line by their names, a step among them; None where it is something else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # cut off, or being written just now
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] <= LAST:
        return None
    return {name: value for name, value in row.items() if type(value) in (int, float) and abs(value) < HUGE}


class Journal:
    """Rows of numbers by step. Reopened at a step, it forgets what was written after that step.

    metrics.jsonl is the record, and what goes wrong with it is an error. A tracker that fails is left out
    with one note, be it at the start, in the middle or at the end: no training ends for it.
    """

    def __init__(
        self,
        folder: Path,
        step: int = 0,
        *,
        trackers: Sequence[str] = (),
        about: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = tell,
    ):
        check_trackers(trackers)
        self.say, self.trackers, self.told = say, dict[str, Tracker](), 0.0
        self.path = folder / "metrics.jsonl"
        read = [(line, parse_row(line)) for line in self.lines()] if step else []
        kept = [line for line, row in read if row and row["step"] <= step]
        if odd := sum(row is None for _, row in read):
            say(f"{self.path}: {odd} lines that are no rows of numbers were left out")
        with staged(self.path, durable=False) as beside:
            beside.write_text("".join(line + "\n" for line in kept))
        self.file = self.path.open("a")
        self.attempt("tensorboard", self.board, folder / "events", step, about or {})
        for name in dict.fromkeys(trackers):
            self.attempt(name, self.open, name, folder, about or {})

    def board(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        self.trackers["tensorboard"] = TensorBoard(folder, step, about)

    def open(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        self.trackers[name] = tracker = open_tracker(name, folder, about)
        self.say(f"{name}: {tracker.where}")

    def attempt(self, name: str, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:  # whatever a library or a network comes up with
            self.trackers.pop(name, None)
            why = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
            self.say(f"{name} failed and is left out from here on: {why}")

    def lines(self) -> list[str]:
        """Complete rows of an earlier process; a last one that was cut off does not count."""
        if not self.path.exists():
            return []
        text = self.path.read_text(errors="replace")
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]

    def write(self, step: int, *, passing: bool = False, **numbers: Any) -> None:
        """A row; of passing ones, which every step has, trackers are told one a second.

        TensorBoard computes its checksums in Python, half a millisecond for each number.
        """
        with naming(self.path):
            self.file.write(json.dumps({"step": step} | numbers) + "\n")
            self.file.flush()
        if passing and time.monotonic() - self.told < SECOND:
            return
        self.told = time.monotonic() if passing else self.told
        values = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        for name, tracker in list(self.trackers.items()):
            self.attempt(name, tracker.log, step, values)

    def close(self, failed: bool = False) -> None:
        """Once is enough; more often does no harm."""
        with naming(self.path):
            self.file.close()
        for name, tracker in list(self.trackers.items()):
            self.attempt(name, tracker.close, failed)
        self.trackers.clear()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)
