"""Small images enlarged for a ViT: what each part of the data pipeline is worth, beside timm.

    python bench/small_images.py WEIGHTS.npz FOLDER --steps 1000 --batch 512 --seeds 3 --device cuda

FOLDER holds train/ and test/ with a folder for each class, of images of, say, 32 pixels. SGD with momentum
0.9, clipping at norm 1, cosine decay: first timm with its own crops, then timm's model and loop with vitkit's
crops, then `vitkit finetune --recipe table4` with one change after the other, each with those before it.
The differences between neighbouring rows say what a change is worth. Accuracy is over every image of test.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import importable_peers  # noqa: F401
from default_beside_peers import TimmRecipe, train_timm, vitkit

AREA = 0.05
CHANGES = {  # recipe fields of vitkit, each row with those of the rows above it
    "vitkit": [],
    "... with all training images (val=0)": ["val=0", "keep=last"],
    "... with crops by RandomResizedCrop": ["crop=resized", f"crop_area={AREA}"],
    "... bicubic": ["interpolation=bicubic"],
    "... crops of 30 % of the area or more": ["crop_area=0.3"],
}


@dataclass
class Crops:
    """vitkit's transform of a training image, as timm's loaders call it."""

    crop: str
    interpolation: str
    size: int

    def __call__(self, image: Any) -> np.ndarray:
        from vitkit.data.views import View, transform

        view = View(
            size=(self.size, self.size),
            crop=self.crop,
            area=AREA,
            flip=True,
            interpolation=self.interpolation,
        )
        rng = np.random.default_rng(np.random.randint(2**31))
        return np.ascontiguousarray(transform(np.asarray(image), view, rng).transpose(2, 0, 1))


def ways(options: argparse.Namespace) -> dict[str, Any]:
    """A function from a seed to top-1 for each row."""
    common = (options.folder, options.weights)
    sgd = TimmRecipe(
        optimizer="sgd", lr=options.lr, weight_decay=0.0, layer_decay=None, mixup=0.0, smoothing=0.0,
        area=AREA, image_size=options.image_size, batch=options.batch, steps=options.steps,
    )  # fmt: skip
    peers = {"timm": sgd, "timm, bilinear": replace(sgd, interpolation="bilinear")} | {
        f"timm with vitkit's crops: {crop}, {method}": replace(
            sgd, transform=Crops(crop, method, options.image_size)
        )
        for crop, method in (("resized", "bicubic"), ("inception", "bilinear"))
    }
    rows: dict[str, Any] = {
        name: lambda seed, recipe=recipe: train_timm(*common, seed, options.device, recipe)
        for name, recipe in peers.items()
    }
    common_words = [
        "--recipe",
        "table4",
        "--steps",
        options.steps,
        "--batch",
        options.batch,
        "--lr",
        options.lr,
    ]
    common_words += ["--image-size", options.image_size]
    fields: list[str] = []
    for name, change in CHANGES.items():
        fields = [*fields, *change]
        words = [*common_words, *(["--set", *fields] if fields else [])]
        rows[name] = lambda seed, words=tuple(words): run(*common, seed, options.device, words)
    return rows


def run(folder: Path, weights: Path, seed: int, device: str, words: tuple[Any, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        return vitkit(folder, weights, seed, device, Path(scratch, "run"), *map(str, words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=[], help="numbers of rows, from 0")
    parser.add_argument("--out", type=Path, default=Path("small_images.json"))
    options = parser.parse_args()
    results: dict[str, list[float]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed in range(options.seeds):
        for number, (name, way) in enumerate(ways(options).items()):
            scores = results.setdefault(name, [])
            if len(scores) > seed or (options.only and str(number) not in options.only):
                continue
            scores.append(100 * way(seed)["top1"])
            options.out.write_text(json.dumps(results, indent=1))
            print(name, seed, scores[-1], flush=True)
    print("| | top-1, % | runs |\n|---|---|---|")
    for name, scores in results.items():
        if scores:
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            print(f"| {name} | {statistics.mean(scores):.2f} ± {spread:.2f} | {len(scores)} |")


if __name__ == "__main__":
    main()
