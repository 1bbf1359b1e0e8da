"""`vitkit finetune` without options beside few-shot least squares, on the same few training images.

    python bench/few_images.py WEIGHTS.npz DATA... --shots 1 5 9 --draws 3 --test 300 --image-size 224

For each data set, number of images per class and draw: random training images and one random test set, both
written to a folder. Then, on this folder,

- default: `vitkit finetune FOLDER --weights WEIGHTS --image-size N`, nothing else;
- least squares: `vitkit fewshot WEIGHTS FOLDER`, the paper's evaluation of frozen features, at the same
  image size.

Both train on the same images and are tested on the same ones, so the table has the mean of the differences
over the draws, and its standard error. Results are kept in --out; a repeated command adds what is missing.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitkit
from vitkit.data.sources.source import Source
from vitkit.datasets.opening import open_data
from vitkit.metrics.frozen_features import choose_shots, fewshot
from vitkit.runs.features import Extractor, labels_of, open_frozen


def write_images(source: Source, indices: np.ndarray, folder: Path) -> None:
    """The images as files in a folder for each class."""
    for index in indices.tolist():
        content = source.fetch(index)
        where = folder / source.classes[source.labels[index]]
        where.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (where / f"{index}{Path(source.keys[index]).suffix}").write_bytes(content)
        else:
            Image.fromarray(content).save(where / f"{index}.png")


def draws(place: str, shots: int, count: int, tests: int) -> Iterator[tuple[int, Path]]:
    """A folder with train/ and test/ for each draw; the test images are the same in all of them."""
    opened = open_data(place)
    train, test = opened["train"], opened.get("test") or opened["val"]
    tested = np.random.default_rng(0).permutation(len(test))[:tests]
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            chosen = choose_shots(train.labels, shots, seed=seed, names=train.classes)
            write_images(train, chosen.flatten(), Path(folder) / "train")
            write_images(test, tested, Path(folder) / "test")
            yield seed, Path(folder)


def default(folder: Path, weights: str, size: int, seed: int) -> dict[str, Any]:
    begun = time.monotonic()
    run = vitkit.finetune(
        folder, weights=weights, image_size=size, seed=seed, out=folder / "run", device="cpu", workers=0
    )
    return {
        "default": run.metrics["top1"], "seconds": time.monotonic() - begun,
        "chosen": "ridge" if run.recipe.head_init == "least-squares" else "training",
    }  # fmt: skip


def least_squares(folder: Path, weights: str, size: int) -> dict[str, Any]:
    extractor = Extractor(model=vitkit.adapt(vitkit.load(weights), image_size=size))
    train, test = open_frozen(str(folder))
    seen, unseen = extractor.features(train), extractor.features(test)
    top1 = fewshot(seen.x, labels_of(train, seen), unseen.x, labels_of(test, unseen))
    return {"least squares": top1, "images": len(unseen.index)}


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| data | images per class | default | least squares | difference | trained |")
    print("|---|---|---|---|---|---|")
    for data, shots in dict.fromkeys((row["data"], row["shots"]) for row in rows):
        cell = [row for row in rows if (row["data"], row["shots"]) == (data, shots)]
        mean = {way: 100 * statistics.mean(r[way] for r in cell) for way in ("default", "least squares")}
        gains = [100 * (row["default"] - row["least squares"]) for row in cell]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        trained = sum(row["chosen"] == "training" for row in cell)
        print(f"| {data} | {shots} | {mean['default']:.1f} % | {mean['least squares']:.1f} % | "
              f"{statistics.mean(gains):+.1f} ± {error:.1f} | {trained} of {len(cell)} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("data", nargs="*", help="none: only print the results in --out")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5, 9], help="images per class")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--test", type=int, default=300, help="test images")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--out", type=Path, default=Path("few-images.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    for place in options.data:
        for shots in options.shots:
            name = f"{Path(place).name}, {options.image_size} px"
            known = {row["seed"] for row in rows if (row["data"], row["shots"]) == (name, shots)}
            for seed, folder in draws(place, shots, options.draws, options.test):
                if seed in known:
                    continue
                row = {"data": name, "shots": shots, "seed": seed}
                row |= least_squares(folder, options.weights, options.image_size)
                row |= default(folder, options.weights, options.image_size, seed)
                rows.append(row)
                options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                print(json.dumps(row), flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()
