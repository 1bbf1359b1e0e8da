"""`vitkit finetune` without options beside the paper's recipe and a current AdamW recipe in timm.

    python bench/default_beside_peers.py WEIGHTS.npz FOLDER... --device cuda --seeds 3 --out results.json

Each FOLDER holds train/ and test/ with a folder for each class. FOLDER:20/class and FOLDER:5000 train on a
part of train. A file (.npz, .zip) is for the first two ways only and takes any part that vitkit knows, and
wrong labels: cifar10.npz:imbalanced=100, cifar10.npz:5000+noise=0.2.
The ways, in turn, by the wall clock of a process of its own from start to result:

- default: `vitkit finetune FOLDER --weights WEIGHTS`, nothing else;
- paper: SGD by Table 4 (`--recipe table4`) for as many images as the default has seen;
- timm: timm's model, loaders and layer decay with AdamW 5e-4, layer decay 0.75, weight decay 0.05, Mixup 0.2,
  smoothing 0.1, crops from 30 % of the area, a head that starts at zero, bfloat16 and torch.compile, 2,500
  steps of 512 images (fewer for less than 20,000 images: 25 epochs, in batches of at most 512 and an eighth
  of the images);
- fewshot: `vitkit fewshot`, closed-form least squares on frozen features, for FOLDER:N/class only.

Accuracy is over every image of test. `--figure FILE.svg` draws accuracy over seconds; with results in --out
that need no more runs, it only draws. docs/lab/default-beside-peers.json is such a file.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WAYS = ("default", "paper", "timm", "fewshot")
LABELS = {"default": "default", "paper": "Table 4", "timm": "timm", "fewshot": "few-shot"}
MODEL = "vit_tiny_patch16_224"


def part(folder: Path, amount: str, seed: int, where: Path) -> Path:
    """A folder of links to a random part of the training images, and to all test images."""
    rng = np.random.default_rng(seed)
    where.mkdir(parents=True)
    (where / "test").symlink_to((folder / "test").resolve())
    files = {c.name: sorted(p for p in c.iterdir()) for c in sorted((folder / "train").iterdir())}
    if amount.endswith("/class"):
        count = int(amount.removesuffix("/class"))
        chosen = {name: [ps[i] for i in rng.permutation(len(ps))[:count]] for name, ps in files.items()}
    else:
        every = [(name, p) for name, ps in files.items() for p in ps]
        picked = [every[i] for i in rng.permutation(len(every))[: int(amount)]]
        chosen = {name: [p for n, p in picked if n == name] for name in files}
    for name, paths in chosen.items():
        (where / "train" / name).mkdir(parents=True)
        for path in paths:
            (where / "train" / name / path.name).symlink_to(path.resolve())
    return where


def vitkit(folder: Path, weights: Path, seed: int, device: str, out: Path, *more: str) -> dict[str, Any]:
    line = [sys.executable, "-m", "vitkit", "finetune", folder, "--weights", weights, "--device", device]
    line += ["--seed", seed, "--out", out, "--json", *more]
    begun = time.monotonic()
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, line))}\n{done.stderr[-3000:]}")
    result = json.loads((out / "result.json").read_text())
    recipe = json.loads((out / "recipe.json").read_text())
    return {
        "top1": result["test"]["top1"], "images": result["test"]["images"], "seconds": seconds,
        "training_seconds": result["cost"]["seconds"], "steps": result["steps"], "batch": recipe["batch"],
    }  # fmt: skip


def timm_run(folder: Path, weights: Path, seed: int, device: str) -> dict[str, Any]:
    """The peer in a process of its own, so that its imports and its start count as ours do."""
    line = [sys.executable, __file__, "--timm", str(folder), str(weights), str(seed), device]
    begun = time.monotonic()
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.monotonic() - begun}


@dataclass(frozen=True)
class TimmRecipe:
    """A recipe for timm's model; the default is the AdamW recipe of this comparison."""

    optimizer: str = "adamw"
    lr: float = 5e-4
    weight_decay: float = 0.05
    layer_decay: float | None = 0.75
    mixup: float = 0.2
    smoothing: float = 0.1
    area: float = 0.3  # smallest share of the area of a crop
    interpolation: str = "bicubic"
    image_size: int = 224
    batch: int = 0  # 0: an eighth of the images, at most 512
    steps: int = 0  # 0: 25 epochs, and 2,500 from 20,000 images on
    transform: Callable[[Any], Any] | None = None  # of a training image, instead of timm's


def train_timm(
    folder: Path, weights: Path, seed: int, device: str, recipe: TimmRecipe = TimmRecipe()
) -> dict[str, Any]:
    """Fine-tune timm's model by a recipe, with nothing of vitkit."""
    import timm
    import timm.data
    import timm.optim
    import torch
    from timm.data.readers.img_extensions import add_img_extensions

    add_img_extensions(".webp")
    torch.manual_seed(seed)
    on_gpu = device.startswith("cuda")
    workers = min(16, os.cpu_count() or 1)
    train = timm.data.create_dataset("", root=str(folder / "train"), is_training=True)
    test = timm.data.create_dataset("", root=str(folder / "test"))
    classes = len(train.reader.class_to_idx)
    batch = recipe.batch or max(8, min(512, 2 ** (max(1, len(train) // 8).bit_length() - 1)))
    steps = recipe.steps or (2500 if len(train) >= 20_000 else max(20, 25 * len(train) // batch))
    common = {
        "input_size": (3, recipe.image_size, recipe.image_size), "num_workers": workers,
        "mean": (0.5,) * 3, "std": (0.5,) * 3, "device": torch.device(device),
        "interpolation": recipe.interpolation,
    }  # fmt: skip
    training = timm.data.create_loader(
        train, batch_size=batch, is_training=True, scale=(recipe.area, 1.0), hflip=0.5, color_jitter=None,
        persistent_workers=workers > 0, **common,
    )  # fmt: skip
    train.transform = recipe.transform or train.transform
    testing = timm.data.create_loader(test, batch_size=256, is_training=False, crop_pct=1.0, **common)
    mixup = timm.data.Mixup(
        mixup_alpha=recipe.mixup, label_smoothing=recipe.smoothing, num_classes=classes,
        prob=float(recipe.mixup > 0),
    )  # fmt: skip
    model = timm.create_model(MODEL, num_classes=classes, img_size=recipe.image_size)
    model.load_pretrained(str(weights))  # but the head, which is new
    torch.nn.init.zeros_(model.head.weight)  # as the paper has it; timm's own initial head is worse
    model.to(device).train()
    optimizer = timm.optim.create_optimizer_v2(
        model, recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay, momentum=0.9,
    )  # fmt: skip
    shares = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
    call = torch.compile(model) if on_gpu else model
    warmup, step, kind = max(1, steps // 20), 0, torch.device(device).type
    while step < steps:
        for images, labels in training:
            if len(images) % 2:
                images, labels = images[1:], labels[1:]
            images, targets = mixup(images, labels)
            scale = min(1.0, (step + 1) / warmup) * 0.5 * (1 + np.cos(np.pi * step / steps))
            for group, share in zip(optimizer.param_groups, shares, strict=True):
                group["lr"] = recipe.lr * scale * share
            with torch.autocast(kind, torch.bfloat16, enabled=on_gpu):
                loss = -(targets * call(images).float().log_softmax(1)).sum(1).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == steps:
                break
    model.eval()
    right = seen = 0
    with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=on_gpu):
        for images, labels in testing:
            right += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
    return {"top1": right / seen, "images": seen, "steps": steps, "batch": batch}


def part_of_file(amount: str) -> list[str]:
    """The options of vitkit for a part of a file: 5000, imbalanced=100, noise=0.2, or several joined by +."""
    words: list[str] = []
    for one in filter(None, amount.split("+")):
        noise = one.startswith("noise=")
        words += ["--set", f"label_{one}"] if noise else ["--subset", one]
    return words


def one_round(
    folder: Path, options: argparse.Namespace, seed: int, scratch: Path, shots: int, more: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    common = (folder, options.weights, seed, options.device)
    if "default" in options.ways:
        results["default"] = vitkit(*common, scratch / "default", *more)
    if "paper" in options.ways:
        like = results["default"]
        same = ["--recipe", options.paper, "--batch", str(like["batch"])]
        if like["steps"] > 1:  # else the default has fitted a head and trained nothing
            same += ["--steps", str(like["steps"])]
        results["paper"] = vitkit(*common, scratch / "paper", *same, *more)
    if "timm" in options.ways:
        results["timm"] = timm_run(*common)
    if "fewshot" in options.ways and shots:
        results["fewshot"] = fewshot(*common[:2], shots, options.device)
    return results


def fewshot(folder: Path, weights: Path, shots: int, device: str) -> dict[str, Any]:
    line = [sys.executable, "-m", "vitkit", "fewshot", weights, folder, "--shots", shots, "--seeds", 1]
    line += ["--device", device, "--json"]
    begun = time.monotonic()
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    table = json.loads(done.stdout)
    return {"top1": table["shots"][str(shots)]["mean"], "seconds": time.monotonic() - begun}


def draw(results: dict[str, Any], file: Path) -> None:
    """Accuracy over seconds, one panel for each data set; several runs are their mean with the range."""
    from matplotlib.figure import Figure

    from vitkit.report.figure_style import MARKERS, render, styled
    from vitkit.report.palette import SERIES

    @styled
    def panels() -> Figure:
        figure = Figure(figsize=(2.3 * len(results), 2.3), layout="constrained")
        axes = figure.subplots(1, len(results), squeeze=False)[0]
        for axis, (name, rounds) in zip(axes, results.items(), strict=True):
            for number, way in enumerate(WAYS):
                runs = [r[way] for r in rounds if way in r and "seconds" in r[way]]
                if not runs:
                    continue
                x, y = ([r[key] for r in runs] for key in ("seconds", "top1"))
                y = [100 * value for value in y]
                colour, mean = SERIES[number], statistics.mean(y)
                axis.errorbar(
                    statistics.mean(x), mean, [[mean - min(y)], [max(y) - mean]], color=colour,
                    fmt=MARKERS[number], markersize=5,
                )  # fmt: skip
                place = (statistics.mean(x), mean)
                axis.annotate(LABELS[way], place, (6, -3), textcoords="offset points", color=colour)
            longest = max(run["seconds"] for r in rounds for run in r.values())
            axis.set(title=name, xlabel="seconds to the result", xlim=(0, 1.7 * longest))
            axis.margins(y=0.25)
            axis.grid(axis="y")
        axes[0].set_ylabel("top-1, %")
        return figure

    file.write_bytes(render(panels(), "svg"))


def main() -> None:
    if sys.argv[1:2] == ["--timm"]:
        folder, weights, seed, device = sys.argv[2:]
        return print(json.dumps(train_timm(Path(folder), Path(weights), int(seed), device)))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("folders", nargs="*", help="none: only print and draw the results in --out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--paper", default="table4", help="the recipe of the paper's optimizer")
    parser.add_argument("--out", type=Path, default=Path("default_beside_peers.json"))
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for place in options.folders:
        path, _, amount = place.partition(":")
        rounds = results.setdefault(f"{Path(path).name}{amount and ':' + amount}", [])
        for seed in range(len(rounds), options.seeds):
            scratch = Path(tempfile.mkdtemp())
            folder, more = Path(path), part_of_file(amount) if Path(path).is_file() else []
            if folder.is_file() and not set(options.ways) <= {"default", "paper"}:
                raise SystemExit(f"{folder} is a file: add --ways default paper")
            if amount and not more:
                folder = part(folder, amount, seed, scratch / "data")
            shots = int(amount.removesuffix("/class")) if amount.endswith("/class") else 0
            rounds.append(one_round(folder, options, seed, scratch, shots, more))
            shutil.rmtree(scratch)
            options.out.write_text(json.dumps(results, indent=1))
            print(place, seed, json.dumps(rounds[-1]), flush=True)
    for name, rounds in results.items():
        for way in options.ways:
            runs = [r[way] for r in rounds if way in r]
            if not runs:
                continue
            scores, times = [r["top1"] for r in runs], [r["seconds"] for r in runs]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            print(f"| {name} | {way} | {100 * statistics.mean(scores):.2f} ± {100 * spread:.2f} | "
                  f"{statistics.median(times):.1f} s | n = {len(scores)} |")  # fmt: skip
    if options.figure:
        draw(results, options.figure)


if __name__ == "__main__":
    main()
