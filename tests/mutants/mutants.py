"""Mutation testing, `make mutants`: deliberate mistakes, one at a time, and whether the tests notice them.

    python tests/mutants/mutants.py [--jobs 2] [--sample 30] [--only TEXT] [--report]

Each mutant is written into a copy of the tree, and the tests near it (scope.py) run there with -x. What came
of it is kept in --results, so that the same command goes on where it was stopped. A mutant that was noticed
stays noticed; one that survived is tried again when its tests have changed. At the end docs/lab/mutants.md is
written.
"""

import argparse
import compileall
import hashlib
import json
import os
import py_compile
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutations import Mutant, generated
from scope import BY_HAND, LEFT_OUT, SCOPE, SEED

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "lab" / "mutants.md"
WHY = Path(__file__).parent / "survivors.json"  # name -> why it is not noticed
CPU_SECONDS, WALL_SECONDS = 240, 1800  # of one mutant's tests
COPIED = (
    "src",
    "tests",
    "docs",
    "bench",
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "mkdocs.yml",
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
)
GONE = ("killed", "hangs")  # the tests fail, or do not end


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests near it."""

    mutant: Mutant
    tests: tuple[str, ...]

    def mutated(self) -> str:
        return self.mutant.applied((ROOT / self.mutant.file).read_text())

    def key(self, outcome: str) -> str:
        """What an outcome depends on: the changed file and, where nothing was noticed, the tests."""
        parts = [self.mutated()]
        if outcome not in GONE:
            parts += [(ROOT / test.partition("::")[0]).read_text() for test in self.tests]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def all_trials() -> list[Trial]:
    made = []
    for name, pattern, old, new, tests in BY_HAND:
        files = [path for path in sorted(ROOT.glob(pattern)) if path.read_text().count(old) == 1]
        assert len(files) == 1, f"{name}: {old!r} stands once in {len(files)} files of {pattern}, not in one"
        file = str(files[0].relative_to(ROOT))
        made.append(Trial(Mutant(file, name, files[0].read_text().index(old), old, new), present(tests)))
    for file, (count, tests) in SCOPE.items():
        source = (ROOT / file).read_text()
        made += [Trial(mutant, present(tests)) for mutant in generated(file, source, count, SEED)]
    return made


def present(tests: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns as files; what is not there is left out."""
    files = []
    for test in tests:
        pattern, colons, name = test.partition("::")
        files += [str(path.relative_to(ROOT)) + colons + name for path in sorted(ROOT.glob(pattern))]
    return tuple(dict.fromkeys(files))


class Tree:
    """A copy of the repository in which mistakes are made."""

    def __init__(self, place: Path):
        self.place = place
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, place / name)
        checked = (
            py_compile.PycInvalidationMode.CHECKED_HASH
        )  # never of another content, whatever the clock says
        compileall.compile_dir(place / "src", quiet=2, invalidation_mode=checked)

    def outcome(self, file: str, content: str, tests: tuple[str, ...]) -> tuple[str, float]:
        path = self.place / file
        before = path.read_text()
        path.write_text(content)
        begun = time.monotonic()
        try:
            return self.tested(tests), round(time.monotonic() - begun, 1)
        finally:
            path.write_text(before)

    def tested(self, tests: tuple[str, ...]) -> str:
        """In a child process that has PyTorch imported already, and nothing of ours."""
        child = os.fork()
        if not child:
            os._exit(in_child(self.place, tests))
        end = time.monotonic() + WALL_SECONDS
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                end = float("inf")
            time.sleep(0.05)
        if os.WIFSIGNALED(status):
            return "hangs"
        return {0: "survived", 1: "killed", 2: "killed"}.get(os.waitstatus_to_exitcode(status), "no tests")


def in_child(place: Path, tests: tuple[str, ...]) -> int:
    import pytest

    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(place)}
    tempfile.tempdir = None
    sys.path.insert(0, str(place / "src"))
    os.chdir(place)
    try:
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                                "-m", "not slow and not faults and not gpu", *tests]))  # fmt: skip
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def lane(trials: list[Trial], results: Path, place: Path) -> None:
    """One mutant after the other; before the first with some tests, those tests must pass as things are."""
    import pytest  # noqa: F401
    import torch  # noqa: F401

    tree, sound = Tree(place), read(results)
    for trial in trials:
        tests, file = trial.tests, trial.mutant.file
        content = (ROOT / file).read_text()
        base = hashlib.sha256(
            "\0".join((content, *tests, *(read_test(t) for t in tests))).encode()
        ).hexdigest()[:16]
        if base not in sound:
            outcome, seconds = tree.outcome(file, content, tests)
            if outcome != "survived":
                sys.exit(f"{', '.join(tests)}: {outcome} without any mutant; see {place / 'log'}")
            sound[base] = record(results, {"key": base, "outcome": "sound", "name": file, "seconds": seconds})
        outcome, seconds = tree.outcome(file, trial.mutated(), tests)
        row = {"key": trial.key(outcome), "outcome": outcome, "name": trial.mutant.name, "seconds": seconds,
                 "date": date.today().isoformat()}  # fmt: skip
        record(results, row)
        print(f"{outcome:9} {seconds:6.1f} s  {trial.mutant.name}", flush=True)


def read_test(test: str) -> str:
    return (ROOT / test.partition("::")[0]).read_text()


def record(results: Path, row: dict) -> dict:
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def read(results: Path) -> dict[str, dict]:
    if not results.exists():
        return {}
    return {row["key"]: row for row in map(json.loads, results.read_text().splitlines())}


def known(trial: Trial, rows: dict[str, dict]) -> str:
    """The outcome of a mutant, where it is known."""
    for outcome in ("killed", "survived"):
        if (row := rows.get(trial.key(outcome))) is not None:
            return row["outcome"]
    return ""


def report(trials: list[Trial], rows: dict[str, dict]) -> str:
    """docs/lab/mutants.md."""
    why = json.loads(WHY.read_text()) if WHY.exists() else {}
    outcomes = {trial.mutant.name: known(trial, rows) for trial in trials}
    tried = [name for name, outcome in outcomes.items() if outcome]
    gone = [name for name in tried if outcomes[name] in GONE]
    rest = (
        f"; {len(trials) - len(tried)} of {len(trials)} have not been tried"
        if len(tried) < len(trials)
        else ""
    )
    lines = [
        "# Mutation tests",
        "",
        "Do the tests notice deliberate mistakes? `make mutants` (tests/mutants) makes one small mistake",
        "in one file at a time (a mutant) and runs the tests near it.",
        f"{len(BY_HAND)} mutants are written by hand; the others are generated with seed {SEED}.",
        "",
        f"Tried {when(rows)} on the code of then.",
        "",
        f"**{len(gone)} of {len(tried)} mutants are detected ({len(gone) / max(1, len(tried)):.1%})**{rest}.",
        "",
        "| file | mutants | detected |",
        "|---|---:|---:|",
    ]
    for file in dict.fromkeys(trial.mutant.file for trial in trials):
        names = [t.mutant.name for t in trials if t.mutant.file == file and outcomes[t.mutant.name]]
        lines.append(
            f"| {file.removeprefix('src/vitkit/')} | {len(names)} | {sum(n in gone for n in names)} |"
        )
    lines += ["", "Written by hand:", "", "| mutant | outcome |", "|---|---|"]
    lines += [f"| {name} | {outcomes[name] or 'not tried'} |" for name, *_ in BY_HAND]
    lines += ["", "Survivors:", "", "| mutant | why |", "|---|---|"]
    survivors = [name for name in tried if name not in gone]
    cells = [
        (name.replace("|", "\\|"), why.get(name, "not looked at yet").replace("|", "\\|"))
        for name in survivors
    ]
    lines += [f"| {name} | {reason} |" for name, reason in cells]
    lines += ["", "Not mutated:", "", "| files | why |", "|---|---|"]
    lines += [f"| {files} | {reason} |" for files, reason in LEFT_OUT.items()]
    return "\n".join(lines) + "\n"


def when(rows: dict[str, dict]) -> str:
    """The days on which the mutants were tried."""
    days = sorted({row["date"] for row in rows.values() if "date" in row})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "on a day that was not recorded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--sample", type=int, default=0, help="only so many mutants, drawn with the seed")
    parser.add_argument("--only", default="", help="only mutants whose name contains this")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    trials, rows = all_trials(), read(options.results)
    wanted = [trial for trial in trials if options.only in trial.mutant.name]
    if options.sample:
        wanted = random.Random(SEED).sample(wanted, min(options.sample, len(wanted)))
    todo = [trial for trial in wanted if not known(trial, rows)]
    written = {name for name, *_ in BY_HAND}  # which come first
    todo.sort(key=lambda trial: (trial.mutant.name not in written, trial.tests, trial.mutant.file))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    if todo and not options.report:
        failed = lanes(todo, options)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(report(trials, read(options.results)))
    print(f"{len(trials)} mutants; see {PAGE.relative_to(ROOT)}")
    sys.exit(1 if failed else 0)


def lanes(todo: list[Trial], options: argparse.Namespace) -> bool:
    """Each job takes every n-th mutant in a copy of its own; whether one of them failed."""
    print(f"{len(todo)} mutants to try", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        jobs = []
        for number in range(options.jobs):
            job = os.fork()
            if not job:
                code = 1
                try:
                    lane(todo[number :: options.jobs], options.results, Path(place) / str(number))
                    code = 0
                except SystemExit as error:
                    print(error, file=sys.stderr, flush=True)
                finally:
                    os._exit(code)
            jobs.append(job)
        ended = [os.waitpid(job, 0)[1] for job in jobs]
        return any(ended)


if __name__ == "__main__":
    main()
