"""`vitkit doctor` and `vitkit shard`: check a data set or this machine, and write shards."""

import importlib.metadata
import re
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import vitkit
from vitkit.commands.shared import Emit, note_if_slow
from vitkit.commands.suspects import ModelLook
from vitkit.commands.target_samples import write_samples
from vitkit.data.doctor import Report, examine
from vitkit.datasets.opening import open_data
from vitkit.datasets.opening import shard as write_shards
from vitkit.io.system import open_file_limit
from vitkit.models.variants import skeleton, variant
from vitkit.planning.automatic import device_memory
from vitkit.report.terminal import Live, print_facts, print_table, say
from vitkit.runs.build import is_unlabelled, of_one_class, open_unlabelled
from vitkit.runtime.runtime import cpu_cores, data_workers

STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def doctor(
    data: str,
    *,
    quick: bool = False,
    model: str = "",
    out: Path | None = None,
    workers: int | None = None,
    device: str = "auto",
    emit: Emit = None,
) -> bool:
    """Check a data set and print the findings; returns whether there are no errors.

    model: also look for wrong labels, near-duplicates and outliers with its features, and write a page and a
    table of them into the folder `out`.
    """
    look = ModelLook.prepare(model, data, out, workers, device, quiet=bool(emit)) if model else None
    with note_if_slow(f"listing the files of {data} ...", quiet=bool(emit)):
        unlabelled = bool(model) and is_unlabelled(data)
        splits = open_unlabelled(Path(data)) if unlabelled else open_data(data)
    total = sum(len(part) for part in splits.values())
    with Live("checking", total, quiet=bool(emit) or quick) as live:
        report = examine(splits, deep=not quick, workers=data_workers(workers), advance=live.more)
    if unlabelled:  # one class is no fault of images without labels
        report = replace(report, findings=tuple(f for f in report.findings if f.kind != "one-class"))
    more: dict[str, Any] = {}
    if look:
        labelled = {s: of_one_class(part) if part.targets else part for s, part in splits.items()}
        report, more = look.examine(labelled, report)
    if report.targets and not quick:
        more["samples"] = str(write_samples(data, splits, report, out))
    if emit:
        emit(report.to_json() | more)
        return report.ok
    print_table(split_rows(report))
    for split, part in (report.targets or {}).items() if not quick else ():
        print_table([{split: name, **class_row(row)} for name, row in part["classes"].items()])
    for finding in report.findings:
        say(f"{finding.severity}: {finding.text} {finding.remedy}", style=STYLES[finding.severity])
    for note in more.get("notes", ()):
        say(f"note: {note}")
    if look:
        say(f"images to look at: {more['page']}; to correct: {more['manifest']}")
    if "samples" in more:
        say(f"samples with their masks or boxes: {more['samples']}")
    say("no problems that prevent training" if report.ok else "fix the errors before training")
    return report.ok


def shard(data: str, out: Path, *, seed: int, emit: Emit) -> None:
    """Write shards and print a summary."""
    total = sum(len(part) for part in open_data(data).values())
    with Live("packing", total, quiet=bool(emit)) as live:
        facts = write_shards(data, out, seed=seed, workers=data_workers(None), advance=live.more)
    if emit:
        return emit(facts)
    for key, reason in facts["left_out"].items():
        say(f"skipped: {key}: {reason}")
    say(f"{facts['images']} images in {facts['shards']} shards, {facts['bytes'] / 1e6:,.1f} MB, in {out}")


def split_rows(report: Report) -> list[dict[str, Any]]:
    return [{"split": name, **split_row(row)} for name, row in report.to_json()["splits"].items()]


def split_row(row: dict[str, Any]) -> dict[str, Any]:
    sizes = row["per_class"]
    if not sizes:  # annotations that were not read
        return {"images": row["images"]}
    fewest = {"fewest_in_a_class": sizes["min"], "median": sizes["median"], "most": sizes["max"]}
    return {"images": row["images"], "classes": row["classes"]} | fewest


def class_row(row: dict[str, Any]) -> dict[str, Any]:
    """The counts of a class for the terminal."""
    shown = {"images": row["images"]}
    if "pixels" in row:
        return shown | {"pixels": f"{100 * row['pixels']:.2f} %"}
    side = "-" if row["side"] is None else f"{row['side']:.0f} px"
    return shown | {"objects": row["objects"], "median_side_at_512": side}


LEAST = {"torch": "2.10", "numpy": "1.26", "pillow": "12.3", "safetensors": "0.5"}  # as in pyproject.toml
CHECKPOINTS = 3  # on disk at the same time: two kept and one being written
OPEN_FILES = 1024
BATCH = 512 * 3 * 224 * 224  # bytes of a typical batch of images
AHEAD = 2  # batches that each data loader worker prefetches


@dataclass(frozen=True)
class Machine:
    """Resources of this machine, in bytes unless noted; None if there is no such resource."""

    out: str
    writable: bool
    disk_free: int
    disk_needed: int  # for the checkpoints of the model
    memory_free: int
    memory_needed: int
    shared_memory: int | None
    data_processes: int
    open_files: int | None
    processors: int
    gpus: tuple[tuple[str, int, int], ...]  # name, free, total
    driver: bool  # whether an NVIDIA device file exists
    clock_late: float  # seconds by which the clock is behind the modification time of vitkit's files
    versions: dict[str, str]


@dataclass(frozen=True)
class Problem:
    """A problem of this machine and its remedy."""

    severity: str
    text: str
    remedy: str


def read_machine(out: Path, model: str) -> Machine:
    """The resources of this machine for training a model into a folder."""
    parameters = sum(p.numel() for p in skeleton(variant(model)).parameters())
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    shm = Path("/dev/shm")  # noqa: S108 - only read
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append((torch.cuda.get_device_name(index), free, total))
    return Machine(
        out=str(out), writable=can_write(existing), disk_free=shutil.disk_usage(existing).free,
        disk_needed=CHECKPOINTS * 12 * parameters + 4 * parameters,  # weights and Adam state; the model
        memory_free=device_memory("cpu"), memory_needed=16 * parameters,
        shared_memory=shutil.disk_usage(shm).free if shm.exists() else None,
        data_processes=data_workers(None), open_files=open_file_limit(),
        processors=cpu_cores(),
        gpus=tuple(gpus), driver=Path("/dev/nvidia0").exists(),
        clock_late=Path(vitkit.__file__).stat().st_mtime - time.time(),
        versions={name: importlib.metadata.version(name) for name in LEAST},
    )  # fmt: skip


def can_write(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def find_problems(m: Machine) -> list[Problem]:
    """Errors that prevent a run, warnings and notes, in this order."""
    problems = [*storage(m), *memory(m), *devices(m)]
    if m.clock_late > 0:
        problems.append(Problem("warning", f"The clock is {m.clock_late:,.0f} s behind the files of vitkit",
                                "Set it (timedatectl set-ntp true); TLS needs it"))  # fmt: skip
    for name, least in LEAST.items():
        if version_tuple(m.versions[name]) < version_tuple(least):
            problems.append(Problem("error", f"{name} {m.versions[name]} is older than {least}",
                                    f"pip install --upgrade {name}"))  # fmt: skip
    return sorted(problems, key=lambda problem: list(STYLES).index(problem.severity))


def storage(m: Machine) -> list[Problem]:
    problems = []
    if not m.writable:
        problems.append(
            Problem("error", f"{m.out} is not writable", "Use another --out, or change its permissions")
        )
    if m.disk_free < m.disk_needed:
        problems.append(Problem("error", f"{gigabytes(m.disk_free)} are free at {m.out}, but the checkpoints "
                                f"of a run need {gigabytes(m.disk_needed)}",
                                "Free disk space, or use --out on another disk"))  # fmt: skip
    if m.open_files is not None and m.open_files < OPEN_FILES:
        problems.append(Problem("warning", f"The limit of open files is {m.open_files} files per process",
                                f"Run ulimit -n {4 * OPEN_FILES} first"))  # fmt: skip
    return problems


def memory(m: Machine) -> list[Problem]:
    problems = []
    needed = AHEAD * m.data_processes * BATCH
    if m.shared_memory is not None and m.shared_memory < needed:
        fits = m.shared_memory // (AHEAD * BATCH)
        problems.append(Problem("warning", f"{gigabytes(m.shared_memory)} of shared memory (/dev/shm) are "
                                f"free, but {m.data_processes} data loader workers use up to "
                                f"{gigabytes(needed)}",
                                "Start the container with --shm-size 8g, or train with finetune "
                                f"--workers {fits}"))  # fmt: skip
    if not m.gpus and m.memory_free < m.memory_needed:
        problems.append(Problem("error", f"{gigabytes(m.memory_free)} of memory are free, but weights, "
                                f"gradients and optimizer state alone need {gigabytes(m.memory_needed)}",
                                "Use a smaller --model, or another machine"))  # fmt: skip
    return problems


def devices(m: Machine) -> list[Problem]:
    if not m.gpus and m.driver:
        return [Problem("error", "There is an NVIDIA GPU, but PyTorch cannot use it",
                        "Install PyTorch for the CUDA version that nvidia-smi shows")]  # fmt: skip
    if not m.gpus:
        return [Problem("note", f"No GPU: training runs on {m.processors} processors",
                        "Use a small model and small images: "
                        "finetune --model ViT-Ti/16 --image-size 160")]  # fmt: skip
    return [
        Problem("warning", f"{name} (GPU {i}): only {gigabytes(free)} of {gigabytes(total)} are free",
                "Check which process uses it (nvidia-smi), or train on another: finetune --device cuda:1")
        for i, (name, free, total) in enumerate(m.gpus) if free < 0.8 * total
    ]  # fmt: skip


def version_tuple(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def check_machine(out: Path, model: str, *, emit: Emit) -> bool:
    """Check this machine and print the problems; returns whether there are no errors."""
    m = read_machine(out, model)
    problems = find_problems(m)
    ok = not any(problem.severity == "error" for problem in problems)
    if emit:
        emit({"ok": ok, "machine": asdict(m), "findings": [asdict(problem) for problem in problems]})
        return ok
    print_facts(machine_facts(m, model))
    for problem in problems:
        say(f"{problem.severity}: {problem.text}. {problem.remedy}", style=STYLES[problem.severity])
    say("no problems that prevent a run" if ok else "fix the errors before a long run")
    return ok


def machine_facts(m: Machine, model: str) -> dict[str, Any]:
    return {
        "training": f"{model} into {m.out}", "disk_free": gigabytes(m.disk_free),
        "checkpoints_need": gigabytes(m.disk_needed), "memory_free": gigabytes(m.memory_free),
        "shared_memory": "-" if m.shared_memory is None else gigabytes(m.shared_memory),
        "open_files": "-" if m.open_files is None else m.open_files, "processors": m.processors,
        "GPUs": [f"{name}, {gigabytes(free)} free" for name, free, _ in m.gpus], **m.versions,
    }  # fmt: skip
