"""Images per second from JPEG files to optimiser steps on one machine: vitkit beside timm.

    python bench/files_to_steps.py [FOLDER_OF_CLASSES] --json steps.json
    python bench/files_to_steps.py --device cpu --model ViT-Ti/16 --size 64 --batch 8 --steps 3 --images 32

Both take inception crops with flips and nothing else and train by AdamW with clipping; on a GPU it is fused,
the model compiled and in bf16. timm: its loader with pinned memory and prefetcher, and the step of
bench/gpu.py. vitkit: its own step with its checks, fed as a run is fed; "decoded" is the same with
pixels decoded before, as by --decoded. Timed are steps on one batch that stays on the device (the most that
a loader can reach; timm's is normalised already), the loaders alone, and files to steps. The page cache holds
the files; timm's list of them is repeated so that no epoch ends in the run, as vitkit has no gap there.

All sides are in one process and take turns; their workers live on. Before one is timed, the workers of all
have filled their queues and sleep, and its own queue is emptied, which else would feed a whole round. Workers
make a batch each and are ready at about the same time: a round is so many turns of all of them.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice, product, repeat
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

try:
    import input_beside_timm as jpegs  # which makes timm importable beside a CPU build of torch
    import timm
except ImportError as error:
    raise SystemExit(f"{error}: vitkit is measured beside timm; install timm and torchvision") from None

from vitkit.data.decoded_cache import decoded
from vitkit.data.loader import AHEAD, BadFiles
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.datasets.opening import open_data
from vitkit.models.card import Preprocessing
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes.recipe import Recipe
from vitkit.runs.batches import training_batches
from vitkit.runtime.runtime import Runtime, cpu_cores, seed_step
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import Stepper, TrainState

NAMES = {"ViT-Ti/16": "tiny", "ViT-S/16": "small", "ViT-B/16": "base", "ViT-L/16": "large"}
CLASSES, HEIGHT, WIDTH = 10, 375, 500
WHATS = ("one batch on the device", "loader alone", "files to steps")
RATE, DECAY, CLIP = 1e-4, 0.1, 1.0
BEFORE, SPARE = 2, 4  # steps before the clock starts; batches on their way beside those of the workers
PATIENCE = 30.0  # seconds for workers to fill their queues
Learn = Callable[[Iterator[Any], int], None]  # so many steps on these batches


@dataclass(frozen=True)
class Row:
    """One line of the table: what is timed, of whom, and the batches it takes, if they come from a loader."""

    what: str
    side: str
    advance: Callable[[int], None]
    batches: Iterator[Any] = iter(())


def clouds(count: int = 6) -> list[np.ndarray]:
    """Pictures where there are no photographs: noise at all scales, strong where it is coarse."""
    rng, pictures = np.random.default_rng(0), np.full((count, 480, 640, 3), 128.0)
    for number, scale in product(range(count), range(1, 9)):
        noise = Image.fromarray(rng.integers(0, 256, (2**scale, 2**scale, 3), dtype=np.uint8))
        pictures[number] += (np.asarray(noise.resize((640, 480))) - 128.0) * 2 ** (-scale / 2)
    return list(pictures.clip(0, 255).astype(np.uint8))


def save_part(folder: Path, pictures: list[np.ndarray], numbers: range) -> None:
    """Random parts of pictures at quality 90."""
    for number in numbers:
        rng, picture = np.random.default_rng(number), pictures[number % len(pictures)]
        h = int(min(picture.shape[0], picture.shape[1] * HEIGHT / WIDTH) * rng.uniform(0.6, 1))
        w = int(h * WIDTH / HEIGHT)
        top, left = (int(rng.integers(spare + 1)) for spare in (picture.shape[0] - h, picture.shape[1] - w))
        part = Image.fromarray(picture[top : top + h, left : left + w])
        place = folder / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        part.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(place, quality=90)


def save_jpegs(folder: Path, count: int) -> None:
    """In ten classes, made by all cores."""
    pictures, kind = clouds(), "noise, since scikit-image or scikit-learn is not here"
    if find_spec("skimage") and find_spec("sklearn"):
        pictures, kind = jpegs.photographs(), "photographs"
    for name in range(CLASSES):
        (folder / f"class{name}").mkdir(parents=True)
    parts = [range(count)[at : at + 50] for at in range(0, count, 50)]
    with ProcessPoolExecutor(cpu_cores()) as pool:
        list(pool.map(partial(save_part, folder, pictures), parts))
    size = statistics.mean(path.stat().st_size for path in folder.glob("*/*.jpg"))
    print(f"{count} JPEGs of {WIDTH}x{HEIGHT}, {size / 1e3:.0f} kB each, of {kind}", flush=True)


def timm_batches(options: argparse.Namespace, folder: Path, images: int) -> Iterator[Any]:
    """Those of timm's loader; the list of files is repeated until it is longer than the run."""
    dataset = timm.data.create_dataset("", root=str(folder), is_training=True)
    wanted = 2 * (options.rounds + 1) * (options.steps + BEFORE + in_queue(options.workers))
    dataset.reader.samples *= 1 + wanted * options.batch // images
    loader = timm.data.create_loader(
        dataset, (3, options.size, options.size), options.batch, is_training=True, scale=(0.05, 1.0),
        ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=None, interpolation="bilinear", mean=(0.5,) * 3,
        std=(0.5,) * 3, num_workers=options.workers, pin_memory=options.device == "cuda",
        device=torch.device(options.device), use_prefetcher=True, persistent_workers=options.workers > 0,
    )  # fmt: skip
    while True:
        yield from loader


def timm_learner(options: argparse.Namespace) -> Learn:
    """The step of bench/gpu.py, on batches that come."""
    name, cuda = f"vit_{NAMES[options.model]}_patch16_224", options.device == "cuda"
    model = timm.create_model(name, num_classes=gpu.CLASSES, img_size=options.size).to(options.device).train()
    call: Any = torch.compile(model) if cuda else model
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=cuda)

    def learn(batches: Iterator[Any], steps: int) -> None:
        for images, labels in islice(batches, steps):
            with torch.autocast(options.device, torch.bfloat16, enabled=cuda):
                logits = call(images)
            F.cross_entropy(logits.float(), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            adam.step()
            adam.zero_grad()

    return learn


def our_recipe(options: argparse.Namespace) -> tuple[Recipe, Runtime]:
    cuda, size = options.device == "cuda", (options.size, options.size)
    adam = OptimizerConfig(kind="adam", weight_decay=DECAY, clip=CLIP)
    recipe = Recipe(name="files-to-steps", image_size=size, batch=options.batch, optimizer=adam)
    return recipe, Runtime(device=options.device, precision="bf16" if cuda else "fp32", compile=cuda)


def our_batches(options: argparse.Namespace, source: Source) -> Iterator[Any]:
    """Micro-batches on the device, as a run is fed."""
    recipe, runtime = our_recipe(options)
    given = (recipe, source, Order(len(source), recipe.batch, recipe.seed), Preprocessing(), runtime)
    return training_batches(
        *given, start=0, workers=options.workers, bad=BadFiles(), waited=lambda seconds: None
    )


def our_learner(options: argparse.Namespace) -> Learn:
    """What the training loop does, as long as it goes on: a step is recorded once for all rounds."""
    recipe, runtime = our_recipe(options)
    model = runtime.place(gpu.our_model(gpu.Row(options.model[4:-3], pixels=options.size)))  # S of ViT-S/16
    state = TrainState.start(model, recipe.optimizer)
    call = runtime.wrap(model.train())
    step = gpu.stepping(
        Stepper(state, ClassificationLoss(classes=gpu.CLASSES), recipe.optimizer, call, runtime)
    )

    def learn(batches: Iterator[Any], steps: int) -> None:
        for micro_batches in islice(batches, steps):
            seed_step(recipe.seed, state.step)
            step(micro_batches)
            state.step += 1

    return learn


def take(batches: Iterator[Any], count: int) -> None:
    for _ in islice(batches, count):
        pass


def in_queue(workers: int) -> int:
    """The most batches that a loader has ready or in hand; timm's workers make as many ahead as ours."""
    return AHEAD * workers + SPARE


def rows_of(options: argparse.Namespace, streams: dict[str, Iterator[Any]]) -> list[Row]:
    """All that is timed; the first steps of each model, which compile it, are taken here."""
    fixed = {side: next(stream) for side, stream in streams.items()}  # forks the workers, before all else
    rows, learners = [], {}
    for side, make in (("timm", timm_learner), ("vitkit", our_learner)):
        begun = time.perf_counter()
        learn = learners[side] = make(options)
        learn(repeat(fixed[side]), WARMUP_CALLS + 1)  # the last of which ours records
        gpu.wait(options.device)
        print(
            f"{side}: the first {WARMUP_CALLS + 1} steps took {time.perf_counter() - begun:.1f} s", flush=True
        )
        rows.append(Row(WHATS[0], side, partial(learn, repeat(fixed[side]))))
    for what in WHATS[1:]:
        for side, stream in streams.items():
            learn = take if what == "loader alone" else learners[side.partition(",")[0]]
            rows.append(Row(what, side, partial(learn, stream), stream))
    return [row for row in rows if row.what in options.only]


def until_quiet() -> None:
    """Wait until the workers of all loaders have filled their queues and sleep."""
    pids, end = sorted(jpegs.children()), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        before = jpegs.cpu_seconds(pids) - time.process_time()
        time.sleep(0.5)
        if jpegs.cpu_seconds(pids) - time.process_time() - before < 0.1:
            return
    print(f"workers still busy after {PATIENCE:g} s; what comes next is timed beside them", flush=True)


def speeds(rows: list[Row], options: argparse.Namespace) -> list[list[float]]:
    """Images per second of each row in each round; every second round begins with the last row."""
    result: list[list[float]] = [[] for _ in rows]
    for turn in range(options.rounds):
        for number, row in list(enumerate(rows))[:: -1 if turn % 2 else 1]:
            until_quiet()
            take(row.batches, in_queue(options.workers))
            row.advance(BEFORE)
            seconds = gpu.timed(partial(row.advance, options.steps), options.device, 1)
            result[number].append(options.batch * options.steps / seconds)
        print(f"round {turn + 1}: {', '.join(f'{speed[-1]:,.0f}' for speed in result)} images/s", flush=True)
    return result


def summary(rows: list[Row], result: list[list[float]]) -> list[dict[str, Any]]:
    """Ratios are medians over the rounds."""
    peers = {row.what: speed for row, speed in zip(rows, result, strict=True) if row.side == "timm"}
    return [
        {"what": row.what, "side": row.side, "images_per_second": statistics.median(speed),
         "spread": (max(speed) - min(speed)) / statistics.median(speed), "rounds": speed,
         "to_timm": statistics.median(a / b for a, b in zip(speed, peers[row.what], strict=True))}
        for row, speed in zip(rows, result, strict=True)
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    form = "| {what} | {side} | {images_per_second:,.0f} | {spread:.1%} | {to_timm:.2f} |"
    head = ["| timed | side | images/s | spread | to timm |", "|---" * 5 + "|"]
    return "\n".join(head + [form.format(**row) for row in rows])


def check_room(options: argparse.Namespace) -> None:
    """Workers hand batches over in shared memory; where that is full, they die of it."""
    needed = 3 * in_queue(options.workers) * options.batch * 3 * options.size**2
    free = shutil.disk_usage("/dev/shm").free
    if options.workers and free < needed:
        told = f"/dev/shm has {free / 1e9:.1f} GB free, the queues of three loaders take {needed / 1e9:.1f}"
        raise SystemExit(f"{told}; mount it larger, or give fewer --workers or a smaller --batch")


def measure(options: argparse.Namespace, made: Path) -> dict[str, Any]:
    folder = options.folder or made / "files"
    if not options.folder:
        save_jpegs(folder, options.images)
    source, begun = open_data(folder)["all"], time.perf_counter()
    kept = decoded(source, made / "pixels", options.workers)
    spent = time.perf_counter() - begun
    print(f"{len(source)} images decoded: {spent:.1f} s, {len(source) / spent:,.0f} images/s", flush=True)
    streams = {"timm": timm_batches(options, folder, len(source)), "vitkit": our_batches(options, source),
               "vitkit, decoded": our_batches(options, kept)}  # fmt: skip
    rows = summary(timed := rows_of(options, streams), speeds(timed, options))
    print(table(rows), flush=True)
    return {"images": len(source), "decoding_seconds": spent, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="class/image.jpg; else made here")
    parser.add_argument("--images", type=int, default=4000, help="to make")
    parser.add_argument("--model", choices=NAMES, default="ViT-S/16")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32, help="in a round, and up to whole turns of workers")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=cpu_cores(), help="of each loader")
    parser.add_argument("--only", nargs="+", choices=WHATS, default=WHATS, help="Time these alone.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.steps += -options.steps % max(1, options.workers)
    check_room(options)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    about = {"machine": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
             "cores": cpu_cores(), "torch": torch.__version__, "timm": timm.__version__}  # fmt: skip
    about |= {key: getattr(options, key) for key in ("model", "size", "batch", "steps", "workers")}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    with tempfile.TemporaryDirectory() as made:
        result = measure(options, Path(made))
    if options.json:
        options.json.write_text(json.dumps(about | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
