"""How cost grows: of a model with batch, resolution and depth; of a whole run with the images of its data.

    python bench/growth.py                                # on a CPU: ViT-Ti/16
    python bench/growth.py --only model --model ViT-B/16 --device cuda --precision bf16
    python bench/growth.py --only data --images 1000 100000 10000000

A model's times are medians over rounds in which all sizes take turns. "time" and "work" are a training step's
seconds and operations, relative to the first row of their table: time must not grow faster than work.
A run is the command `vitkit pretrain` on shards of real JPEGs, 50 steps and an evaluation of 100 images, as a
process of its own: once with validation and test images in the data, once with those that vitkit splits off.
Its memory is the most that it and its workers hold; mapped files are not counted.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import shard_index
import torch
from gpu import timed
from PIL import Image

from vitkit.metrics.cost import TRAINING, forward_flops
from vitkit.models.variants import fresh, variant
from vitkit.runtime.runtime import PRECISIONS, Runtime
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState, update

CLASSES, STEPS, HELD_OUT, HALF = 100, 50, 100, (0.5,) * 3
DEPTHS, PIXELS = (3, 6, 12, 24), (112, 224, 448)
Row = dict[str, Any]


# the model


def training(
    model: str, batch: int, pixels: int, depth: int, options: argparse.Namespace
) -> Callable[[], Any]:
    """What computes one training step of a model of this size."""
    config = replace(variant(model), image_size=(pixels, pixels), depth=depth, classes=CLASSES)
    runtime = Runtime(device=options.device, precision=options.precision)
    network = runtime.place(fresh(config, seed=0))
    images = torch.randint(0, 256, (batch, 3, pixels, pixels), dtype=torch.uint8)
    data = runtime.to_device({"image": images, "label": torch.arange(batch) % CLASSES})
    optimizer = OptimizerConfig(kind="adam", weight_decay=0.1, clip=1.0)
    state = TrainState.start(network, optimizer)
    loss = ClassificationLoss(classes=CLASSES, mean=HALF, std=HALF)
    call = runtime.wrap(network)
    return lambda: update(state, [data], loss, 1e-4, optimizer, call, runtime)


def model_table(axis: str, sizes: list[Row], options: argparse.Namespace) -> list[Row]:
    """The seconds of a step of each size, along one axis."""
    steps = [training(options.model, options=options, **size) for size in sizes]
    for step in steps:
        step()
        step()
    seconds: list[list[float]] = [[] for _ in sizes]
    for number in range(options.rounds):
        for i in list(range(len(sizes)))[:: -1 if number % 2 else 1]:
            seconds[i].append(timed(steps[i], options.device, 2))
    rows = []
    for size, taken in zip(sizes, seconds, strict=True):
        config = replace(
            variant(options.model), image_size=(size["pixels"],) * 2, depth=size["depth"], classes=CLASSES
        )
        work, time_taken = TRAINING * size["batch"] * forward_flops(config), statistics.median(taken)
        rows.append({"axis": axis, **size, "work": work, "seconds": time_taken,
                     "low": min(taken), "high": max(taken)})  # fmt: skip
    return rows


def model_tables(options: argparse.Namespace) -> list[list[Row]]:
    depth = variant(options.model).depth
    usual = {"batch": options.batches[0], "pixels": PIXELS[1], "depth": depth}
    axes = {
        "batch": [usual | {"batch": batch} for batch in options.batches],
        "pixels": [usual | {"pixels": pixels} for pixels in PIXELS],
        "depth": [usual | {"depth": depth} for depth in DEPTHS],
    }
    return [model_table(axis, sizes, options) for axis, sizes in axes.items()]


def model_text(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        f"| {first['axis']} | images/s | ms for a step (range) | time | work | time / work |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        grown, work = row["seconds"] / first["seconds"], row["work"] / first["work"]
        spread = f"{1e3 * row['seconds']:.0f} ({1e3 * row['low']:.0f} to {1e3 * row['high']:.0f})"
        pace = row["batch"] / row["seconds"]
        values = [
            str(row[row["axis"]]),
            f"{pace:.1f}",
            spread,
            f"{grown:.2f}",
            f"{work:.2f}",
            f"{grown / work:.2f}",
        ]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


# the images of a data set


def photograph() -> bytes:
    """A JPEG of 32 x 32 pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((32, 32)).save(file, "JPEG", quality=80)
    return file.getvalue()


def write_shards(folder: Path, images: int, held_out: int = 0) -> None:
    """Shards of so many equal JPEGs: one file under many names, so that ten million fit on a small disk."""
    shard_index.IMAGE, shard_index.CLASSES = photograph(), CLASSES
    shard_index.write(folder, images, several=False, held_out=held_out)
    first, *others = sorted(folder.glob("*.tar"))
    slot = bytes(512) + shard_index.IMAGE
    with first.open("wb") as file:
        for _ in range(shard_index.PER_SHARD):
            file.write(slot + bytes(2048 - len(slot)))
    for other in others:
        other.unlink()
        os.link(first, other)


def held(process: psutil.Process) -> int:
    """Bytes that a process and its children hold, without those of mapped files; shared ones count once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
            own = [line.split() for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
            total += sum(1024 * int(kilobytes) for _, kilobytes, _ in own)
    return total


def run(images: int, folder: Path | None, *, split: bool) -> Row:
    """The seconds and the memory of a whole command on a data set of so many images.

    split: whether vitkit splits validation and test images off; otherwise the data has them.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        data, out = Path(place) / "data", Path(place) / "run"
        data.mkdir()
        write_shards(data, images, 0 if split else HELD_OUT)
        share = HELD_OUT / images
        words = [
            sys.executable, "-m", "vitkit", "pretrain", str(data), "--out", str(out), "--model", "ViT-Ti/16",
            "--image-size", "32", "--steps", str(STEPS), "--batch", "64", "--workers", "1", "--device", "cpu",
            "--set", "evaluations=1", *((f"val={share}", f"test={share}") if split else ()),
        ]  # fmt: skip
        began, most = time.perf_counter(), 0
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                most = max(most, held(watched))
            except psutil.Error:
                break
            time.sleep(0.5)
        taken = time.perf_counter() - began
        if process.wait():
            assert process.stderr
            raise SystemExit(process.stderr.read().decode())
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = sum(record["seconds"] for record in records if "gradient_norm" in record)
    return {"images": images, "split": split, "seconds": taken, "steps": steps, "memory": most}


def data_text(rows: list[Row]) -> str:
    lines = [
        "| images | held-out images | seconds of the command | of its steps | most memory, MB |",
        "|---" * 5 + "|",
    ]
    for row in rows:
        held_out, memory = "split off" if row["split"] else "in the data", f"{row['memory'] / 1e6:,.0f}"
        lines.append(
            f"| {row['images']:,} | {held_out} | {row['seconds']:.1f} | {row['steps']:.1f} | {memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["model", "data"])
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--images", type=int, nargs="+", default=[10**n for n in range(3, 8)])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where shards are written (about 1.2 GB)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: Row = {"torch": torch.__version__, "device": options.device}
    if options.only != "data":
        result["model"] = model_tables(options)
        print(f"{options.model}\n\n" + "\n\n".join(map(model_text, result["model"])) + "\n")
    if options.only != "model":
        result["data"] = [
            run(images, options.folder, split=split) for split in (False, True) for images in options.images
        ]
        print(data_text(result["data"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
