"""The same weights fine-tuned by vitkit and by timm: the same images, steps, rate and optimizer.

    python bench/finetune_beside_timm.py CHECKPOINT.npz DATA_FOLDER --steps 400 --seeds 3 --device cuda

DATA_FOLDER holds train/ and val/ with a folder for each class. Both read the files from disk with their own
loaders, crop by the inception rule to 224 pixels, flip, and train with SGD, momentum 0.9, clipping at norm 1,
linear warm-up and cosine decay. Accuracy is over every image of val; images per second are over the second
half of the steps, loading included.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import importable_peers  # noqa: F401

from vitkit.recipes import recipe
from vitkit.runs.run import run
from vitkit.runtime.runtime import choose_runtime
from vitkit.training.schedule import Duration, Schedule

WARMUP = 50


def with_vitkit(options: argparse.Namespace, seed: int) -> dict[str, float]:
    r = replace(
        recipe("finetune"), data=str(options.data), weights=str(options.checkpoint), batch=options.batch,
        length=Duration(steps=options.steps), schedule=Schedule(rate=options.rate, warmup=WARMUP),
        evaluations=0, seed=seed, val=0.01,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        result = run(r, Path(out), choose_runtime(options.device), workers=options.workers, quiet=True)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in rows if "seconds" in row][options.steps // 2 :]
    speed = sum(row["images"] for row in timed) / sum(row["seconds"] for row in timed)
    return {"top1": result.test["top1"], "images": result.test["images"], "images_per_second": speed}


def timm_loaders(options: argparse.Namespace):
    import timm.data

    common = {"input_size": (3, 224, 224), "batch_size": options.batch, "num_workers": options.workers,
              "mean": (0.5,) * 3, "std": (0.5,) * 3, "device": torch.device(options.device)}  # fmt: skip
    train = timm.data.create_dataset("", root=str(options.data / "train"), is_training=True)
    held = timm.data.create_dataset("", root=str(options.data / "val"))
    training = timm.data.create_loader(
        train, is_training=True, scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=None,
        interpolation="bilinear", persistent_workers=True, **common,
    )  # fmt: skip
    testing = timm.data.create_loader(
        held, is_training=False, interpolation="bilinear", crop_pct=0.875, **common
    )
    return training, testing


def with_timm(options: argparse.Namespace, seed: int) -> dict[str, float]:
    import timm

    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224")
    model.load_pretrained(str(options.checkpoint))
    training, testing = timm_loaders(options)
    model.reset_classifier(len(training.dataset.reader.class_to_idx))
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    model.to(options.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    schedule, step, half = Schedule(rate=options.rate, warmup=WARMUP), 0, 0.0
    kind = torch.device(options.device).type
    while step < options.steps:
        for images, labels in training:
            for group in optimizer.param_groups:
                group["lr"] = schedule.at(step, options.steps)
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            float(loss)
            step += 1
            if step == options.steps // 2:
                half = time.monotonic()
            if step == options.steps:
                break
    speed = options.batch * (options.steps - options.steps // 2) / (time.monotonic() - half)
    model.eval()
    right = seen = 0
    with torch.inference_mode():
        for images, labels in testing:
            right += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
    return {"top1": right / seen, "images": seen, "images_per_second": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    actual: dict[str, list[dict[str, float]]] = {"vitkit": [], "timm": []}
    for seed in range(options.seeds):
        for name, one in (("vitkit", with_vitkit), ("timm", with_timm)):
            actual[name].append(one(options, seed))
            print(name, seed, actual[name][-1], flush=True)
    for name, runs in actual.items():
        accuracies, speeds = [r["top1"] for r in runs], [r["images_per_second"] for r in runs]
        spread = statistics.stdev(accuracies) if len(runs) > 1 else 0.0
        print(f"{name}: top-1 {statistics.mean(accuracies):.4f} +- {spread:.4f} (n = {len(runs)}, "
              f"{runs[0]['images']} images), {statistics.median(speeds):.0f} images/s")  # fmt: skip


if __name__ == "__main__":
    main()
