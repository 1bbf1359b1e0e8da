"""The command with a fault in it: run by harness.cold or crowd, which say in VITKIT_FAULT which and when."""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from harness import die, dying, operations  # noqa: E402
from switches import switch_off  # noqa: E402
from together import note_batches  # noqa: E402

from vitkit.data import loader  # noqa: E402
from vitkit.runs import batches, checkpointer, evaluation  # noqa: E402
from vitkit.runs import run as experiment  # noqa: E402
from vitkit.training import checkpoint  # noqa: E402

HELD: list[Any] = []  # what must stay as long as the process


def die_at_step(step: int) -> None:
    """Before anything of that step is written down."""
    watch = experiment.Trainer.watch

    def dying_watch(self: Any, state: Any, metrics: Any) -> bool:
        return die() if state.step == step else watch(self, state, metrics)  # type: ignore[return-value]

    experiment.Trainer.watch = dying_watch  # type: ignore[method-assign]


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

    made, seen = evaluation.local_batches, []

    def cut(*args: Any, **options: Any) -> Any:
        seen.append(1)
        for batch in made(*args, **options):
            yield batch
            if len(seen) == number:
                die()

    evaluation.local_batches = cut


def die_in_resume(number: int) -> None:
    """While a checkpoint is being read, after so many tensors."""
    from vitkit.training import checkpoint as parts

    copy, seen = parts.copy_rows, []

    def counted(*args: Any) -> None:
        copy(*args)
        seen.append(1)
        if len(seen) == number:
            die()

    parts.copy_rows = counted


def die_in_meeting() -> None:
    """When the processes of a start have said hello to each other, and before they are a group."""
    from vitkit.runtime import runtime

    runtime.dist.PrefixStore = lambda *args: die()  # type: ignore[assignment,misc]


def wait_for(path: Path, seconds: float, meanwhile: Callable[[], object] = bool) -> None:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        meanwhile()
        time.sleep(0.01)


def hold_in(what: str, step: int, folder: str, seconds: float = 60.0) -> None:
    """Wait in a save, an evaluation or the making of the data until told to go on.

    Says that we are there, and that a signal was heard there.
    """
    owner, name = {
        "save": (checkpoint.Saver, "attempt"), "evaluation": (experiment.Trainer, "validate"),
        "step": (experiment.Trainer, "watch"), "loader": (experiment.Trainer, "check_files"),
    }[what]  # fmt: skip
    real, folder_ = getattr(owner, name), Path(folder)

    def held(self: Any, *args: Any) -> Any:
        at = int(args[0].name[5:13]) if what == "save" else self.run.state.step
        if at >= step and not (folder_ / "there").exists():
            (folder_ / "there").touch()
            heard = folder_ / "heard"
            wait_for(folder_ / "go", seconds, lambda: getattr(self, "received", ()) and heard.touch())
        return real(self, *args)

    setattr(owner, name, held)


def start_over(proof: str) -> None:
    """Protection off: after a resume the data begins anew."""
    supply = batches.training_batches

    def anew(*args: Any, start: int, **options: Any) -> Any:
        return supply(*args, start=0, **options)

    switch_off("vitkit.runs.run.training_batches", anew, Path(proof))


def no_resume(proof: str) -> None:
    """Protection off: no checkpoint is ever found."""
    switch_off("vitkit.runs.run.latest", lambda folder: (None, []), Path(proof))


def other_dropout(proof: str) -> None:
    """Protection off: dropout goes on from wherever its generator is."""
    switch_off("vitkit.runs.run.seed_step", lambda *args: None, Path(proof))


def no_lock(proof: str) -> None:
    """Protection off: anybody may write into a run folder."""
    switch_off("vitkit.runs.folder.locked", lambda out, **_: nullcontext(), Path(proof))


def hold_data(step: int, folder: str, proof: str = "") -> None:
    """Data workers wait at that step until told to go on; with `proof` they answer signals sent to all."""
    make, folder_ = loader.Samples.__getitems__, Path(folder)

    def held(self: Any, places: Any) -> Any:
        if self.order and places[0][0] >= step:
            (folder_ / "there").touch()
            wait_for(folder_ / "go", 60.0)
        return make(self, places)

    loader.Samples.__getitems__ = held  # type: ignore[method-assign]
    if proof:
        switch_off("vitkit.data.loader.ignore_signals", lambda worker: None, Path(proof))


def main() -> None:
    output = json.loads(os.environ["VITKIT_FAULT"])
    start, rank = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    checkpointer.SAVE_SECONDS = output["save"]
    if fault := output["faults"].get(f"{start} {rank}"):
        name, *words = fault
        globals()[name](*words)
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else None
    if out:
        out.mkdir(parents=True, exist_ok=True)
        note_batches(int(rank), out)
    from vitkit.cli import verbs

    verbs.main()


if __name__ == "__main__":
    main()
