"""Logging of a run's metrics to metrics.jsonl, TensorBoard, Weights & Biases, MLflow and Trackio."""

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
START_SECONDS = 90.0  # timeout for a tracker to start; then the run starts without it
CLOSE_SECONDS = 30.0  # timeout for a tracker to send its last rows at the end of a run
WAITING_ROWS = 100_000  # a tracker that falls further behind is disabled
MAX_STEP, MAX_VALUE = 2**53, 1e300  # of a valid row; NaN is no valid value
TRACKER_INTERVAL = 1.0  # seconds between two passing rows that go to the trackers


class Tracker(Protocol):
    """Anything that logs metrics by step."""

    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self, failed: bool = False) -> None: ...


def print_message(text: str) -> None:
    warn(f"vitkit: {text}")


def parse_row(line: str) -> dict[str, Any] | None:
    """The numeric values of a line of metrics.jsonl, including its step; None if it is no valid row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # truncated, or still being written
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] <= MAX_STEP:
        return None
    return {
        name: value for name, value in row.items() if type(value) in (int, float) and abs(value) < MAX_VALUE
    }


class Journal:
    """Writes metrics to metrics.jsonl and the trackers; reopened at a step, it drops the rows after it.

    An error in writing metrics.jsonl ends the run. A tracker that fails, at whatever time, is disabled with
    one message, and the run goes on.
    """

    def __init__(
        self,
        folder: Path,
        step: int = 0,
        *,
        trackers: Sequence[str] = (),
        about: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print_message,
    ):
        check_trackers(trackers)
        self.say, self.trackers, self.last_passing = say, dict[str, Tracker](), 0.0
        self.path = folder / "metrics.jsonl"
        rows = [(line, parse_row(line)) for line in self.lines()] if step else []
        earlier = [line for line, row in rows if row and row["step"] <= step]
        if invalid := sum(row is None for _, row in rows):
            say(f"{self.path}: dropped {invalid} invalid line{'s' * (invalid > 1)}")
        with staged(self.path, durable=False) as temporary:
            temporary.write_text("".join(line + "\n" for line in earlier), encoding="utf-8")
        self.file = self.path.open("a", encoding="utf-8")
        self.attempt("tensorboard", self.open_tensorboard, folder / "events", step, about or {})
        for name in dict.fromkeys(trackers):
            self.attempt(name, self.open, name, folder, about or {})

    def open_tensorboard(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        self.trackers["tensorboard"] = TensorBoard(folder, step, about)

    def open(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        self.trackers[name] = tracker = open_tracker(name, folder, about)
        self.say(f"{name}: {tracker.location}")

    def attempt(self, name: str, call: Callable[..., None], *args: Any) -> None:
        """Call a tracker; on any error, disable it and go on."""
        try:
            call(*args)
        except Exception as error:  # of any kind: libraries and networks raise their own
            self.trackers.pop(name, None)
            reason = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
            self.say(f"{name} failed and is disabled for the rest of the run: {reason}")

    def lines(self) -> list[str]:
        """The lines that an earlier process wrote, without a truncated last one."""
        if not self.path.exists():
            return []
        text = self.path.read_text(errors="replace", encoding="utf-8")
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]

    def write(self, step: int, *, passing: bool = False, **numbers: Any) -> None:
        """Write a row; of the passing rows, one per step, trackers get one per second.

        TensorBoard computes checksums in Python, which takes half a millisecond per number.
        """
        with naming(self.path):
            self.file.write(json.dumps({"step": step} | numbers) + "\n")
            self.file.flush()
        if passing and time.monotonic() - self.last_passing < TRACKER_INTERVAL:
            return
        self.last_passing = time.monotonic() if passing else self.last_passing
        values = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        for name, tracker in list(self.trackers.items()):
            self.attempt(name, tracker.log, step, values)

    def close(self, failed: bool = False) -> None:
        """Close the file and all trackers; further calls do nothing."""
        with naming(self.path):
            self.file.close()
        for name, tracker in list(self.trackers.items()):
            self.attempt(name, tracker.close, failed)
        self.trackers.clear()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


# --- trackers


def check_trackers(names: Iterable[str]) -> None:
    """Raise an error for an unknown or missing tracker, without importing or creating anything."""
    for name in names:
        if name not in TRACKERS:
            raise Error(f"unknown tracker {name!r}; known: {', '.join(TRACKERS)}", code="request.unknown")
        spec = importlib.util.find_spec(name)
        # A folder "wandb" in the working directory looks like a package, but has no origin.
        if spec is None or spec.origin is None:
            raise Error(
                f'the tracker {name} is not installed: pip install "vitkit[{name}]"',
                code="request.extra-missing",
            )


def open_tracker(name: str, folder: Path, about: Mapping[str, Any]) -> "BackgroundTracker":
    """Start a run in a tracker, or resume the one that this run folder had before."""
    tracker = TRACKERS[name]
    return BackgroundTracker(lambda: tracker(folder.resolve(), to_hparams(about)))


def to_hparams(about: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Hyperparameters as every tracker accepts them: numbers and strings as they are, the rest as str."""
    return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in about.items()}


def run_id_file(folder: Path, name: str) -> Path:
    """The file in a run folder that holds the run's id in a tracker."""
    (folder / "trackers").mkdir(exist_ok=True)
    return folder / "trackers" / name


class BackgroundTracker:
    """A tracker in a daemon thread, so that neither training nor the exit of the process waits for a network.

    Errors in the thread are raised at the next call. The data loader's forked workers exit with os._exit, so
    they run no exit hook of a tracker, and its threads do not exist in them.
    """

    def __init__(self, make: Callable[[], Any]):
        self.rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue()
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.failed, self.location = False, ""
        self.thread = threading.Thread(target=self.work, args=(make,), daemon=True)
        with contextlib.redirect_stdout(io.StringIO()):  # trackers print greetings; stdout is for results
            self.thread.start()
            if not self.ready.wait(START_SECONDS):
                self.failed = True
                self.rows.put(None)  # closes the tracker if it starts later
                raise TimeoutError(f"did not start within {START_SECONDS:.0f} s")
        self.check()

    def work(self, make: Callable[[], Any]) -> None:
        tracker = None
        try:
            tracker = make()
            self.location = tracker.location
            self.ready.set()
            while (row := self.rows.get()) is not None:
                tracker.log(*row)
            tracker.close(self.failed)
        except BaseException as error:  # also SystemExit, which some libraries raise
            self.error = error
            self.ready.set()
            if tracker is not None:
                with contextlib.suppress(BaseException):  # best effort: the tracker has already failed
                    tracker.close(failed=True)

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"{type(self.error).__name__}: {self.error}") from self.error

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.check()
        if self.rows.qsize() >= WAITING_ROWS:
            raise TimeoutError(f"{WAITING_ROWS} rows are still unsent")
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
    """TensorBoard event files. On resume, values after the step are purged and replaced by new ones."""

    def __init__(self, folder: Path, step: int, about: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # purge_step is the first step to purge. With the default flush interval of 120 s, a killed process
        # would leave a gap before its last checkpoint.
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0, flush_secs=5)
        self.end: Any = None
        if about:
            metrics: dict[str, Any] = dict.fromkeys(("loss", "val_top1", "test_top1"), 0)
            experiment, start, self.end = hparams(to_hparams(about), metrics)
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
    """Weights & Biases. A resumed run keeps its id; steps that were logged before appear twice.

    wandb drops rows whose step goes back, so the step is logged as a metric and used as the x axis.
    """

    def __init__(self, folder: Path, about: dict[str, Any]):
        import wandb

        id_file = run_id_file(folder, "wandb")
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        offline = "WANDB_MODE" not in os.environ and not wandb_login(wandb.setup().settings)
        settings = wandb.Settings(
            console="off", silent=True, init_timeout=START_SECONDS - 10, reinit="create_new",
            finish_timeout=CLOSE_SECONDS, finish_timeout_raises=True,
        )  # fmt: skip
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=folder.name,
            id=id_file.read_text(encoding="utf-8"), resume="allow", dir=folder, config=about,
            mode="offline" if offline else None, settings=settings,
        )  # fmt: skip
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        reason = "offline, no API key found" if offline else "offline"
        local = f"{reason}: in {folder / 'wandb'}; upload it with `wandb sync`"
        self.location = local if self.run.offline else self.run.url or "disabled"

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers | {"step": step})

    def close(self, failed: bool = False) -> None:
        self.run.finish(exit_code=int(failed))


def wandb_login(settings: Any) -> bool:
    """Whether wandb can log in without a prompt."""
    if settings.api_key or settings.identity_token_file:
        return True
    file = os.environ.get("NETRC") or Path("~/.netrc").expanduser()
    try:
        return netrc.netrc(file).authenticators(urllib.parse.urlsplit(settings.base_url).hostname) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MLflow:
    """MLflow. A resumed run keeps its id; steps that were logged before appear twice, the newer counts."""

    INTERVAL = 1.0  # seconds between two requests
    MAX_METRICS, MAX_PARAMS = 900, 100  # per request: limits of the protocol

    def __init__(self, folder: Path, about: dict[str, Any]):
        from mlflow import MlflowClient

        store, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not store:  # an SQLite file in the run folder needs no server
            (folder / "mlflow").mkdir(exist_ok=True)
            store = f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"
            artifacts = (folder / "mlflow" / "artifacts").as_uri()
        self.location = re.sub(r"//[^/@]*@", "//", store)  # without the password
        self.client = MlflowClient(tracking_uri=store)  # the functions of the module would set global state
        self.metrics: list[Any] = []
        self.last_sent = 0.0
        id_file = run_id_file(folder, "mlflow")
        if not (id_file.exists() and self.resume_run(id_file.read_text(encoding="utf-8"))):
            self.run = self.start_run(folder.name, artifacts, about)
            id_file.write_text(self.run, encoding="utf-8")

    def resume_run(self, run: str) -> bool:
        """Resume a run; False if it does not exist, as in another store than last time."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.update_run(run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        self.run = run
        return True

    def start_run(self, name: str, artifacts: str | None, about: dict[str, Any]) -> str:
        from mlflow.entities import Param

        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self.client.get_experiment_by_name(project)
        experiment = existing.experiment_id if existing else self.client.create_experiment(project, artifacts)
        run: str = self.client.create_run(experiment, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in about.items()]
        for i in range(0, len(params), self.MAX_PARAMS):
            self.client.log_batch(run, params=params[i : i + self.MAX_PARAMS], synchronous=True)
        return run

    def log(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.metrics += [Metric(name, value, now, step) for name, value in numbers.items()]
        if time.monotonic() - self.last_sent > self.INTERVAL or len(self.metrics) >= self.MAX_METRICS:
            self.send()

    def send(self) -> None:
        for i in range(0, len(self.metrics), self.MAX_METRICS):
            self.client.log_batch(self.run, metrics=self.metrics[i : i + self.MAX_METRICS], synchronous=True)
        self.metrics, self.last_sent = [], time.monotonic()

    def close(self, failed: bool = False) -> None:
        self.send()
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


class Trackio:
    """Trackio. A resumed run keeps its name; steps that were logged before appear twice."""

    def __init__(self, folder: Path, about: dict[str, Any]):
        import trackio

        id_file = run_id_file(folder, "trackio")
        if not id_file.exists():  # runs are identified by name, and another folder may have the same name
            names: set[str] = set()
            with contextlib.suppress(ValueError):  # the project does not exist yet
                names = {run.name for run in trackio.Api().runs(PROJECT)}
            id_file.write_text(
                folder.name + (f"-{uuid.uuid4().hex[:6]}" if folder.name in names else ""), encoding="utf-8"
            )
        self.run = trackio.init(
            PROJECT, name=id_file.read_text(encoding="utf-8"), config=about, resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self.location = f"view it with `trackio show --project {PROJECT}`"

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self, failed: bool = False) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip
