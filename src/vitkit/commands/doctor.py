"""vitkit doctor and shard: a data set, or this machine, examined before training."""

import importlib.metadata
import re
import resource
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import vitkit
from vitkit.commands.shared import Emit, note_if_slow
from vitkit.data.doctor import examine
from vitkit.datasets.opening import open_data
from vitkit.datasets.opening import shard as write_shards
from vitkit.models.variants import skeleton, variant
from vitkit.planning.automatic import device_memory
from vitkit.report.terminal import Live, print_facts, print_table, say
from vitkit.runtime.runtime import cpu_cores, data_workers

STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def doctor(data: str, *, quick: bool = False, workers: int | None = None, emit: Emit = None) -> bool:
    """Whether nothing was found that would spoil a training."""
    with note_if_slow(f"listing the files of {data} ...", quiet=bool(emit)):
        splits = open_data(data)
    total = sum(len(part) for part in splits.values())
    with Live("looking", total, quiet=bool(emit) or quick) as live:
        report = examine(splits, deep=not quick, workers=data_workers(workers), advance=live.more)
    if emit:
        emit(report.to_json())
        return report.ok
    print_table([{"split": name, **split_row(row)} for name, row in report.to_json()["splits"].items()])
    for finding in report.findings:
        say(f"{finding.severity}: {finding.text} {finding.remedy}", style=STYLES[finding.severity])
    say("nothing that would spoil a training" if report.ok else "correct the errors before training")
    return report.ok


def shard(data: str, out: Path, *, seed: int, emit: Emit) -> None:
    """Write shards, and print how many of what."""
    total = sum(len(part) for part in open_data(data).values())
    with Live("packing", total, quiet=bool(emit)) as live:
        facts = write_shards(data, out, seed=seed, workers=data_workers(None), advance=live.more)
    if emit:
        return emit(facts)
    for key, why in facts["left_out"].items():
        say(f"left out: {key}: {why}")
    say(f"{facts['images']} images in {facts['shards']} shards, {facts['bytes'] / 1e6:,.1f} MB, in {out}")


def split_row(row: dict[str, Any]) -> dict[str, Any]:
    sizes = row["per_class"]
    fewest = {"fewest_in_a_class": sizes["min"], "median": sizes["median"], "most": sizes["max"]}
    return {"images": row["images"], "classes": row["classes"]} | fewest


LEAST = {"torch": "2.10", "numpy": "1.26", "pillow": "12.3", "safetensors": "0.5"}  # as in pyproject.toml
KEPT = 3  # checkpoints at a time: two that are kept and the one being written
OPEN_FILES = 1024
BATCH = 512 * 3 * 224 * 224  # bytes of the images of a usual step
AHEAD = 2  # batches that each data process prepares ahead


@dataclass(frozen=True)
class Machine:
    """What was read off; bytes where nothing else is said. None: there is no such thing."""

    out: str
    writable: bool
    disk_free: int
    disk_needed: int  # for the checkpoints of the model that was asked about
    memory_free: int
    memory_needed: int
    shared_memory: int | None
    data_processes: int
    open_files: int
    processors: int
    gpus: tuple[tuple[str, int, int], ...]  # name, free, total
    driver: bool  # whether there are signs of an NVIDIA GPU
    clock_late: float  # seconds by which the clock is behind this program's own files
    versions: dict[str, str]


@dataclass(frozen=True)
class Warned:
    """One thing that is wrong, and what to do about it."""

    severity: str
    text: str
    remedy: str


def observe(out: Path, model: str) -> Machine:
    """This machine, for a training of a model into a folder."""
    parameters = sum(p.numel() for p in skeleton(variant(model)).parameters())
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    shm = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        gpus.append((torch.cuda.get_device_name(number), free, total))
    return Machine(
        out=str(out), writable=can_write(place), disk_free=shutil.disk_usage(place).free,
        disk_needed=KEPT * 12 * parameters + 4 * parameters,  # weights and Adam's two numbers; the model
        memory_free=device_memory("cpu"), memory_needed=16 * parameters,
        shared_memory=shutil.disk_usage(shm).free if shm.exists() else None,
        data_processes=data_workers(None), open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
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


def judge(m: Machine) -> list[Warned]:
    """What would spoil a run (errors), what may (warnings), what is only slow (notes); errors first."""
    found = [*storage(m), *memory(m), *devices(m)]
    if m.clock_late > 0:
        found.append(Warned("warning", f"The clock is behind vitkit's own files by {m.clock_late:,.0f} s",
                            "Set it (timedatectl set-ntp true): certificates are checked by it"))  # fmt: skip
    for name, least in LEAST.items():
        if number(m.versions[name]) < number(least):
            found.append(Warned("error", f"{name} {m.versions[name]} is older than {least}",
                                f"pip install --upgrade {name}"))  # fmt: skip
    return sorted(found, key=lambda one: ("error", "warning", "note").index(one.severity))


def storage(m: Machine) -> list[Warned]:
    found = []
    if not m.writable:
        found.append(Warned("error", f"{m.out} cannot be written to", "Give another --out, or its rights"))
    if m.disk_free < m.disk_needed:
        found.append(Warned("error", f"{gigabytes(m.disk_free)} are free at {m.out}, and the checkpoints of "
                            f"a run take {gigabytes(m.disk_needed)}",
                            "Free some, or give --out on another disk"))  # fmt: skip
    if m.open_files < OPEN_FILES:
        found.append(Warned("warning", f"A process may open {m.open_files} files",
                            f"ulimit -n {4 * OPEN_FILES}, before the command"))  # fmt: skip
    return found


def memory(m: Machine) -> list[Warned]:
    found = []
    wanted = AHEAD * m.data_processes * BATCH
    if m.shared_memory is not None and m.shared_memory < wanted:
        fits = m.shared_memory // (AHEAD * BATCH)
        found.append(Warned("warning", f"{gigabytes(m.shared_memory)} of shared memory (/dev/shm) are free, "
                            f"and {m.data_processes} data processes fill up to {gigabytes(wanted)}",
                            "Start the container with --shm-size 8g, or train with finetune "
                            f"--workers {fits}"))  # fmt: skip
    if not m.gpus and m.memory_free < m.memory_needed:
        found.append(Warned("error", f"{gigabytes(m.memory_free)} of memory are free, and weights, gradients "
                            f"and optimizer alone take {gigabytes(m.memory_needed)}",
                            "Take a smaller --model, or another machine"))  # fmt: skip
    return found


def devices(m: Machine) -> list[Warned]:
    if not m.gpus and m.driver:
        return [Warned("error", "There is an NVIDIA GPU, but PyTorch cannot use it",
                       "Install PyTorch for the driver's CUDA version, which nvidia-smi tells")]  # fmt: skip
    if not m.gpus:
        return [Warned("note", f"No GPU: {m.processors} processors do the training",
                       "Take a small model and images: "
                       "finetune --model ViT-Ti/16 --image-size 160")]  # fmt: skip
    return [
        Warned("warning", f"{name} (GPU {i}): only {gigabytes(free)} of {gigabytes(total)} are free",
               "Look who uses it (nvidia-smi), or train on another: finetune --device cuda:1")
        for i, (name, free, total) in enumerate(m.gpus) if free < 0.8 * total
    ]  # fmt: skip


def number(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def look(out: Path, model: str, *, emit: Emit) -> bool:
    """Whether nothing was found that would spoil a run."""
    m = observe(out, model)
    found = judge(m)
    ok = not any(one.severity == "error" for one in found)
    if emit:
        emit({"ok": ok, "machine": asdict(m), "findings": [asdict(one) for one in found]})
        return ok
    print_facts(print_warnings(m, model))
    for one in found:
        say(f"{one.severity}: {one.text}. {one.remedy}", style=STYLES[one.severity])
    say("nothing that would spoil a run" if ok else "mend the errors before a long run")
    return ok


def print_warnings(m: Machine, model: str) -> dict[str, Any]:
    return {
        "asked_for": f"{model} into {m.out}", "disk_free": gigabytes(m.disk_free),
        "checkpoints_take": gigabytes(m.disk_needed), "memory_free": gigabytes(m.memory_free),
        "shared_memory": "-" if m.shared_memory is None else gigabytes(m.shared_memory),
        "open_files": m.open_files, "processors": m.processors,
        "GPUs": [f"{name}, {gigabytes(free)} free" for name, free, _ in m.gpus], **m.versions,
    }  # fmt: skip
