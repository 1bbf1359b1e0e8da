"""The run folder: one recipe, one run at a time, and a way to be stopped without losing work."""

import fcntl
import os
import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from vitkit.data.archives import naming
from vitkit.data.batches import SIGNALS
from vitkit.recipes.recipe import Recipe, read_recipe, to_json
from vitkit.training.checkpoint import complete
from vitkit.weights.save import replace_file

MAY_CHANGE = {  # fields with which a run may go on otherwise than it began: none decides what it comes to
    "about": "a text",
    "evaluations": "how often val is looked at; not where the best weights are kept, or patience stops by it",
    "micro_batch": "images in memory at a time: the same sums in another order, equal to rounding",
    "rates": "those that the protocol tries, each in a folder of its own",
    "convolution_rates": "the same for ResNets and hybrids",
    "fewshot": "data on which few-shot accuracy is told as the run goes",
    "shots": "images of each class for that",
    "draws": "choices of those images, of which the mean is told",
    "fewshot_when": "how often",
}


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, number: int, step: int):
        super().__init__(
            f"stopped by {signal.Signals(number).name} at step {step}; the same command goes on from there"
        )
        self.number = number


@contextmanager
def stopping(out: Path) -> Iterator[None]:
    """Inside, Ctrl-C at any moment is answered with what was kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if str(stop):
            raise
        raise KeyboardInterrupt(f"stopped; {remains(out)}") from None


def remains(out: Path) -> str:
    """What the same command would do after a run has ended early."""
    if kept := complete(out / "checkpoints"):
        return f"the same command goes on from step {int(kept[-1].name.removeprefix('step-'))}"
    if any(complete(part) for part in out.glob("*/checkpoints")):
        return f"the same command goes on with what was kept in {out}"
    return "nothing was kept yet, so the same command starts from the beginning"


def claim(out: Path, recipe: Recipe) -> None:
    """The folder belongs to one recipe: a changed one is refused, with what changed and what may."""
    path = out / "recipe.json"
    old = read_recipe(path) if path.exists() else None
    if old:
        check_recipe(out, old, recipe)
        if old == recipe:
            return
    replace_file(path, lambda beside: beside.write_text(to_json(recipe) + "\n"))


def check_recipe(out: Path, old: Recipe, new: Recipe) -> None:
    """Refuse a recipe with which the run in the folder cannot go on."""
    fixed = {"evaluations"} if new.patience or new.keeps_best else set()
    may = [name for name in MAY_CHANGE if name not in fixed]
    before, after = asdict(old), asdict(new)
    changed = [f"{k}: {before[k]} -> {after[k]}" for k in after if before[k] != after[k] and k not in may]
    if changed:
        raise ValueError(
            f"{out} holds a run of another recipe ({'; '.join(changed)}); give another --out. "
            f"A run may go on with another {', '.join(may)}"
        )


def take(out: Path, recipe: Recipe, held: ExitStack) -> None:
    """The folder for this run alone, as long as `held` is."""
    out.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(out))
    claim(out, recipe)


HELD: set[IO[str]] = set()  # locks of this process


def let_go() -> None:
    """In a process forked from this one: data workers that outlive it must not keep its folder."""
    while HELD:
        HELD.pop().close()


os.register_at_fork(after_in_child=let_go)


class locked:
    """One process a run folder."""

    def __init__(self, out: Path):
        self.path = out / ".lock"

    def __enter__(self) -> None:
        self.file = self.path.open("a+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            holder = self.file.read().strip()
            self.file.close()
            raise ValueError(f"{self.path.parent} is in use by process {holder}") from None
        HELD.add(self.file)
        with naming(self.path):
            self.file.truncate(0)
            self.file.write(f"{os.getpid()} on {platform.node()}")
            self.file.flush()

    def __exit__(self, *_: object) -> None:
        HELD.discard(self.file)
        self.file.close()


def news(damaged: Sequence[str], before: Any, now: dict[str, Any]) -> Iterator[str]:
    """What is to be said as a run goes on: which checkpoints were no good, and what is another machine's."""
    for name in damaged:
        yield f"{name} is damaged and was passed over"
    for name in before:
        if name in now and name != "python" and before[name] != now[name]:
            yield f"{name}: {before[name]} until here, now {now[name]}; from here on equal to rounding only"


class signals:
    """Inside, SIGTERM, SIGINT and SIGUSR1 are noted in a list and end nothing; a second SIGINT does.

    A second SIGTERM does not: a job manager sends one to every process, and torchrun one more to its own.
    """

    def __enter__(self) -> list[int]:
        self.asked: list[int] = []
        self.before: dict[int, Any] = {}
        for number in SIGNALS:
            self.before[number] = signal.signal(number, self.note)
        return self.asked

    def note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in self.asked:
            raise KeyboardInterrupt
        self.asked.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
