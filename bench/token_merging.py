"""Token merging (ToMe): speed and accuracy side by side for several numbers of merged tokens per layer.

    python bench/token_merging.py Ti_16.npz imagenette.zip --count 300
    python bench/token_merging.py B_16.npz imagenet/val --device cuda --batch 128 --rounds 20
    python bench/token_merging.py B_16.npz imagenet/val --device cuda --batch 128 --engine graph

The data has the classes of the model, by name or WordNet ID; top-1 is over all classes of the model, on
`--count` images evenly spaced over one split. The numbers of merged tokens take turns: in each round, every
one of them computes one batch. Images per second are medians over the rounds, from pixels in memory to logits
on the host; decoding is not included. GFLOP are those of one image, a multiply-add counts as two.
`--match TEXT` keeps the images with this text in their names, of all splits. `--cpu-time` counts processor
time instead of the time on the clock, for a machine with other work.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import vitkit
from vitkit.commands.evaluate import match_classes
from vitkit.data.splits import join
from vitkit.data.views import apply
from vitkit.datasets.opening import open_data
from vitkit.inference.engines import choose_engine
from vitkit.inference.predict import evaluation_view, with_merging
from vitkit.metrics.cost import forward_flops
from vitkit.metrics.intervals import with_interval

Run = Callable[[Tensor], Tensor]


def sample(model, place: str, split: str, count: int, match: str = "") -> tuple[Tensor, Tensor]:
    """Images (N, 3, h, w) of the model's size and their classes, evenly spaced over the data."""
    splits = open_data(place)
    source = splits.get(split) or next(iter(splits.values()))
    if match:
        parts = list(splits.values())
        source = parts[0]
        for part in parts[1:]:
            source = join(source, part)
        source = source.take(np.array([i for i, key in enumerate(source.keys) if match in key]))
    source, _, _ = match_classes(source, model, place, "")
    chosen = np.unique(np.linspace(0, len(source) - 1, count).astype(int))
    view, rng = evaluation_view(model.preprocessing, model.config.image_size), np.random.default_rng(0)
    images = torch.stack([apply(source.fetch(int(i)), view, rng) for i in chosen])
    return images, torch.tensor([int(source.labels[i]) for i in chosen])


def correct(run: Run, images: Tensor, labels: Tensor, batch: int) -> int:
    parts = zip(images.split(batch), labels.split(batch), strict=True)
    return sum(int((run(part).argmax(1) == truth).sum()) for part, truth in parts)


def speeds(
    runs: dict[int, Run], images: Tensor, rounds: int, clock: Callable[[], float]
) -> dict[int, list[float]]:
    """Images per second of each, in turns, after one batch as a warm-up."""
    for run in runs.values():
        run(images)
    rates: dict[int, list[float]] = {count: [] for count in runs}
    for number in range(rounds):
        order = list(runs) if number % 2 == 0 else list(runs)[::-1]
        for count in order:
            start = clock()
            runs[count](images)
            rates[count].append(len(images) / (clock() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--merge", type=int, nargs="+", default=[0, 4, 8, 12, 16])
    parser.add_argument("--split", default="val")
    parser.add_argument("--match", default="")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    model = vitkit.load(options.model).to(options.device).eval()
    images, labels = sample(model, options.data, options.split, options.count, options.match)
    with tempfile.TemporaryDirectory() as folder:
        merging = {count: with_merging(model, count) for count in options.merge}
        runs: dict[int, Run] = {
            count: choose_engine(one, options.engine, batch=options.batch, folder=Path(folder))
            for count, one in merging.items()
        }
        right = {count: correct(run, images, labels, options.batch) for count, run in runs.items()}
        clock = time.process_time if options.cpu_time else time.perf_counter
        rates = speeds(runs, images[: options.batch], options.rounds, clock)
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    unit = "processor time" if options.cpu_time else "wall-clock time"
    print(f"{len(images)} images, batch {options.batch}, {options.rounds} rounds, {options.engine}, {unit}")
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| merged per layer | GFLOP | images/s (range) | speed-up | top-1 |\n" + "|---" * 5 + "|")
    first = statistics.median(rates[options.merge[0]])
    for count, one in merging.items():
        rate = statistics.median(rates[count])
        spread = f"{min(rates[count]):.1f} to {max(rates[count]):.1f}"
        top1 = with_interval(right[count] / len(images), len(images))
        gflop = forward_flops(one.config) / 1e9
        print(f"| {count} | {gflop:.2f} | {rate:.1f} ({spread}) | {rate / first:.2f} | {top1} |")


if __name__ == "__main__":
    main()
