"""The command with a fault in it: run by harness.cold or crowd, which say in VITKIT_FAULT which and when."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from crew import note_batches  # noqa: E402
from harness import die, dying, operations  # noqa: E402

from vitkit.data import batches  # noqa: E402
from vitkit.experiment import run as experiment  # noqa: E402
from vitkit.training import checkpoint  # noqa: E402

HELD: list[Any] = []  # what must stay as long as the process


def die_at_step(step: int) -> None:
    """Before anything of that step is written down."""
    watch = experiment.Work.watch

    def dying_watch(self: Any, state: Any, metrics: Any) -> bool:
        return die() if state.step == step else watch(self, state, metrics)  # type: ignore[return-value]

    experiment.Work.watch = dying_watch  # type: ignore[method-assign]


def die_in_save(step: int, number: int, torn: bool = False) -> None:
    """At an operation of the save of that step."""
    now = {"step": -1}
    attempt = checkpoint.Saver.attempt

    def noted(self: Any, partial: Path, *args: Any) -> None:
        now["step"] = int(partial.name[5:13])
        attempt(self, partial, *args)
        now["step"] = -1

    checkpoint.Saver.attempt = noted  # type: ignore[method-assign]
    HELD.append(context := operations(dying(number, torn=torn, when=lambda: now["step"] == step)))
    context.__enter__()


def die_in_evaluation(number: int) -> None:
    """In the number-th evaluation of this process, after its first batch."""
    from vitkit.experiment import measure

    made, seen = measure.evaluation_batches, []

    def cut(*args: Any, **options: Any) -> Any:
        seen.append(1)
        for batch in made(*args, **options):
            yield batch
            if len(seen) == number:
                die()

    measure.evaluation_batches = cut


def die_in_resume(number: int) -> None:
    """While a checkpoint is being read, after so many tensors."""
    from vitkit.training import parts

    copy, seen = parts.copy_rows, []

    def counted(*args: Any) -> None:
        copy(*args)
        seen.append(1)
        if len(seen) == number:
            die()

    parts.copy_rows = counted


def die_in_meeting() -> None:
    """When the processes of a start have said hello to each other, and before they are a group."""
    from vitkit.training import runtime

    runtime.dist.PrefixStore = lambda *args: die()  # type: ignore[assignment,misc]


def slow_steps(seconds: float) -> None:
    watch = experiment.Work.watch

    def slow(self: Any, state: Any, metrics: Any) -> bool:
        time.sleep(seconds)
        return watch(self, state, metrics)

    experiment.Work.watch = slow  # type: ignore[method-assign]


def hold_in(what: str, step: int, folder: str, seconds: float = 60.0) -> None:
    """Wait in a save, an evaluation or the making of the data until told to go on; say that we are there."""
    owner, name = {
        "save": (checkpoint.Saver, "attempt"), "evaluation": (experiment.Work, "validate"),
        "step": (experiment.Work, "watch"), "loader": (experiment.Work, "look_ahead"),
    }[what]  # fmt: skip
    real, folder_ = getattr(owner, name), Path(folder)

    def held(self: Any, *args: Any) -> Any:
        at = int(args[0].name[5:13]) if what == "save" else self.state.step
        if at >= step and not (folder_ / "there").exists():
            (folder_ / "there").touch()
            end = time.monotonic() + seconds
            while not (folder_ / "go").exists() and time.monotonic() < end:
                time.sleep(0.01)
        return real(self, *args)

    setattr(owner, name, held)


def start_over() -> None:
    """Protection off: after a resume the data begins anew."""
    supply = experiment.supply
    experiment.supply = lambda *args, start, **options: supply(*args, start=0, **options)


def no_resume() -> None:
    """Protection off: no checkpoint is ever found."""
    experiment.latest = lambda folder: (None, [])


def other_dropout() -> None:
    """Protection off: dropout goes on from wherever its generator is."""
    experiment.seed_step = lambda *args: None


def no_lock() -> None:
    """Protection off: anybody may write into a run folder."""
    from vitkit.experiment import folder

    folder.fcntl.flock = lambda *args: None


def slow_data(seconds: float, protected: bool) -> None:
    """Every batch takes a while; without protection data workers answer the signals that are sent to all."""
    make = batches.Samples.__getitems__

    def slow(self: Any, places: Any) -> Any:
        time.sleep(seconds)
        return make(self, places)

    batches.Samples.__getitems__ = slow  # type: ignore[method-assign]
    if not protected:
        batches.stay = lambda worker: None


def main() -> None:
    told = json.loads(os.environ["VITKIT_FAULT"])
    start, rank = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    experiment.SAVE_SECONDS = told["save"]
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else None
    if out:
        out.mkdir(parents=True, exist_ok=True)
        note_batches(int(rank), out)
    if fault := told["faults"].get(f"{start} {rank}"):
        name, *words = fault
        globals()[name](*words)
    from vitkit import cli

    cli.main()


if __name__ == "__main__":
    main()
