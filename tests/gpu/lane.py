"""Runs every test that needs a GPU and writes a record of the run to docs/lab: the program behind `make gpu`.

    make gpu                               # all GPU tests, then docs/lab/gpu.json and gpu.md
    make gpu GPU_OPTIONS=--missing         # only those that have not passed with these source files
    make gpu GPU_OPTIONS=--reference       # first measure tests/gpu/reference.json, after an intended change

CI has no GPU. tests/gpu/test_gpu_record.py runs there and fails when a file of the GPU path has changed since
the record was made. The record names every test: those that passed, and those that are open, because they
failed or the run was cut short. A release needs a record without open tests. Why a test failed is in
failures.txt beside the record, as soon as it has failed.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FAILURES = "failures.txt"
RECORD, PAGE = ROOT / "docs/lab/gpu.json", ROOT / "docs/lab/gpu.md"
SOURCES = (  # what computes on a GPU and nowhere else, or captures it in a CUDA graph
    "inference/bf16.py", "inference/builders.py", "models/attention.py", "models/encoder.py",
    "ops/assignment_kernel.py", "ops/attention.py", "ops/batched_assignment.py",
    "ops/cublaslt.py", "ops/cuda_graph.py", "ops/custom_op.py", "ops/fused.py",
    "ops/low_precision.py", "ops/triton_kernels.py", "runtime/processes.py", "runtime/runtime.py",
    "training/loop.py", "training/optimizer.py", "training/step.py", "training/step_graph.py",
)  # fmt: skip
WITHOUT_TRAINING = (  # tests that import nothing of vitkit.training, as test_gpu_record.py checks
    "tests/gpu/test_gpu_service.py", "tests/evaluation/test_fewshot.py", "tests/inference/test_engines.py",
    "tests/models/test_fused.py",
)  # fmt: skip


def hashes() -> dict[str, str]:
    """SHA-256 of every source file of the GPU path, as it is now."""
    return {name: hashlib.sha256((ROOT / "src/vitkit" / name).read_bytes()).hexdigest() for name in SOURCES}


def marked() -> list[str]:
    """The files with tests that need a GPU; others may want libraries that a GPU machine does not have."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [str(path.relative_to(ROOT)) for path in files if "pytest.mark.gpu" in path.read_text()]
    return [name for name in named if not name.endswith("test_gpu_record.py")]


def tests() -> list[str]:
    """All tests that need a GPU, by the names that pytest takes."""
    line = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", *marked()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    return [name for name in done.stdout.splitlines() if "::" in name]


class Keeper:
    """A pytest plugin that writes the record after every test: a run that is cut short has its part."""

    def __init__(self, record: dict[str, Any], out: Path) -> None:
        self.record, self.out, self.began = record, out, time.monotonic()
        self.before = record["seconds"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            note(self.record, report.nodeid, report.outcome)
            self.record["seconds"] = round(self.before + time.monotonic() - self.began, 1)
            write(self.record, self.out)
            if report.failed:
                with open(self.out / FAILURES, "a", encoding="utf-8") as file:
                    file.write(f"== {report.nodeid} ({report.when})\n{report.longreprtext}\n")


def note(record: dict[str, Any], name: str, outcome: str) -> None:
    """A test has passed, or stays open; once it has failed in setup or call, its teardown changes nothing."""
    if outcome == "passed":
        record["tests"][name] = outcome
        record["open"].pop(name, None)
    else:
        record["tests"].pop(name, None)
        record["open"][name] = outcome


def write(record: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / RECORD.name).write_text(json.dumps(record, indent=1) + "\n")
    (out / PAGE.name).write_text(page(record))


def kept() -> tuple[dict[str, str], dict[str, Any]]:
    """The tests that have passed on such a machine with the files that they use, and their record."""
    if not RECORD.exists():
        return {}, {}
    old = json.loads(RECORD.read_text())
    passed = {name: end for name, end in old["tests"].items() if end == "passed"}
    return (valid(passed, old["files"]), old) if old["machine"] == machine() else ({}, old)


def valid(passed: dict[str, str], files: dict[str, str]) -> dict[str, str]:
    """Those of some tests that use no file which has changed; files: their hashes when the tests passed."""
    changed = [name for name, digest in hashes().items() if files.get(name) != digest]
    if all(name.startswith("training/") for name in changed):
        chosen = WITHOUT_TRAINING if changed else ("",)
        return {name: end for name, end in passed.items() if name.startswith(chosen)}
    return {}


def earlier(done: dict[str, str], old: dict[str, Any]) -> list[dict[str, Any]]:
    """When tests passed that were not run again: commit, date and their names."""
    before = [entry | {"tests": [n for n in entry["tests"] if n in done]} for entry in old.get("earlier", [])]
    others = {name for entry in before for name in entry["tests"]}
    last = {"commit": old["commit"], "date": old["date"], "tests": [n for n in done if n not in others]}
    return [entry for entry in (*before, last) if entry["tests"]]


def machine() -> dict[str, str]:
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def page(record: dict[str, Any]) -> str:
    """The record for a reader."""
    ends = [*record["tests"].values(), *record["open"].values()]
    counts = {kind: ends.count(kind) for kind in ("passed", "failed", "not run")}
    files: dict[str, int] = {}
    for test in record["tests"]:
        files[test.partition("::")[0]] = files.get(test.partition("::")[0], 0) + 1
    where = record["machine"]
    lines = [
        "# GPU tests", "",
        "Written by `make gpu` (tests/gpu/lane.py). CI has no GPU, so `make test` checks that no source file",
        "of the GPU path has changed since this record.", "",
        f"- Date: {record['date']}", f"- Commit: {record['commit']}",
        f"- Machine: {where['gpu']}, torch {where['torch']}, CUDA {where['cuda']}, Python {where['python']}",
        f"- Result: {counts['passed']} passed, {counts['failed']} failed, {counts['not run']} not run, in "
        f"{record['seconds']:.0f} s",
        *(
            f"- {len(entry['tests'])} of them passed on {entry['date']} at commit {entry['commit'][:12]}; no "
            "file that they use has changed since"
            for entry in record.get("earlier", [])
        ), "",
        "| tests | number |", "|---|---|",
        *(f"| `{name}` | {number} |" for name, number in sorted(files.items())), "",
        *open_lines(record["open"]),
        "## Reference losses", "",
        "Loss after 1, 10, 25 and 50 steps of `tests/gpu/reference.json`:", "",
        "| configuration | 1 | 10 | 25 | 50 |", "|---|---|---|---|---|",
        *(
            f"| {name} | " + " | ".join(f"{losses[step - 1]:.4f}" for step in (1, 10, 25, 50)) + " |"
            for name, losses in record["reference"]["losses"].items()
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def open_lines(left: dict[str, str]) -> list[str]:
    """The section on tests that have not passed with these files; none if all have."""
    if not left:
        return []
    lines = [
        "## Open",
        "",
        "These have not passed with these files; `make gpu GPU_OPTIONS=--missing` runs them.",
        "",
    ]
    lines += [f"- `{name}`: {end}" for name, end in sorted(left.items()) if end != "not run"]
    rows: dict[str, int] = {}
    for name in (name for name, end in left.items() if end == "not run"):
        rows[name.partition("::")[0]] = rows.get(name.partition("::")[0], 0) + 1
    return [*lines, *(f"- `{name}`: {number} not run" for name, number in sorted(rows.items())), ""]


def measure_reference(at: str) -> None:
    from reference import CONFIGURATIONS, PATH, SEED, losses

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        result = dict(pool.map(lambda name: (name, losses(name, Path(folder, name))), CONFIGURATIONS))
    text = json.dumps({"commit": at, "seed": SEED, "machine": machine(), "losses": result}, indent=1)
    PATH.write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="", help="the commit under test, where git cannot tell it")
    parser.add_argument("--reference", action="store_true", help="measure the reference losses anew")
    parser.add_argument("--missing", action="store_true", help="only tests that have not passed yet")
    parser.add_argument("--only", nargs="*", default=[], help="only tests with these words in their names")
    parser.add_argument("--out", type=Path, default=RECORD.parent, help="the folder for the record")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("make gpu needs an NVIDIA GPU; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    sys.path[:0] = [str(HERE), str(ROOT / "src")]
    at = options.commit or commit()
    if options.reference:
        measure_reference(at)
    os.chdir(ROOT)
    done, old = kept() if options.missing else ({}, {})
    record = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": at, "machine": machine(),
        "seconds": 0.0, "files": hashes(), "earlier": earlier(done, old) if done else [],
        "tests": done, "reference": json.loads((HERE / "reference.json").read_text()),
    }  # fmt: skip
    every = tests()
    record["open"] = {name: "not run" for name in every if name not in done}
    left = [name for name in every if name not in done and all(word in name for word in options.only)]
    print(f"{len(left)} tests to run, {len(done)} have passed before", flush=True)
    if not left:
        return 0
    processes = max(1, min(8, (os.cpu_count() or 1) // 2))  # most of the time is start-up and compilation
    several = ["-n", str(processes)] if importlib.util.find_spec("xdist") else []
    words = ["-v", "--durations", "12", *several, *left]
    return int(pytest.main(words, plugins=[Keeper(record, options.out)]))


if __name__ == "__main__":
    sys.exit(main())
