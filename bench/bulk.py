"""`vitkit predict --out` beside timm's inference script on the same folder of JPEGs, interleaved in one run.

    python bench/bulk.py --count 256 --rounds 5
    python bench/bulk.py --data photos/ --device cuda --engine graph --amp --workers 12

timm's script is no part of its package; `timm_inference` below has its loop: dataset, loader with its
prefetcher, model, softmax, top-k, one table at the end. Both load the same ViT from a file, decode, resize
without cropping, compute in batches and write a .csv with the top 5 of every image; all of it is timed.
"""

import argparse
import csv
import platform
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from forward import pair
from PIL import Image

import vitkit
from vitkit.commands.bulk import run_bulk
from vitkit.commands.bulk_request import BulkRequest
from vitkit.inference.agreement import clouds
from vitkit.weights.convert import timm_vit


def generate(folder: Path, count: int) -> None:
    """JPEGs of 500 x 375 pixels in two folders."""
    for number in range(count):
        path = folder / ("even", "odd")[number % 2] / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(clouds(number)).resize((500, 375)).save(path, quality=90)


def timm_inference(options, folder: Path, weights: Path, out: Path) -> dict[str, int]:
    """The loop of timm's inference.py; returns the best class of each image."""
    from timm.data import create_dataset, create_loader

    device = torch.device(options.device)
    model = timm_vit(vitkit.build(options.model, gelu="erf").config)
    model.load_state_dict(torch.load(weights, weights_only=True))
    model = model.to(device).eval()
    half = (0.5, 0.5, 0.5)
    data_config = {"input_size": (3, 224, 224), "interpolation": "bilinear", "mean": half, "std": half,
                   "crop_pct": 1.0, "crop_mode": "squash"}  # fmt: skip
    dataset = create_dataset("", root=str(folder))
    loader = create_loader(
        dataset, batch_size=options.batch, use_prefetcher=True, num_workers=options.workers, device=device,
        **data_config,
    )  # fmt: skip
    amp = torch.autocast(device.type, torch.bfloat16) if options.amp else nullcontext()
    indices, values = [], []
    with torch.inference_mode():
        for images, _ in loader:
            with amp:
                output = model(images)
            output, index = output.softmax(-1).topk(5)
            indices.append(index.cpu().numpy())
            values.append(output.float().cpu().numpy())
    names = loader.dataset.filenames(basename=False)
    rows = [row for part in indices for row in part.tolist()]
    chances = [row for part in values for row in part.tolist()]
    with out.open("w", newline="") as file:
        csv.writer(file).writerows(zip(names, rows, chances, strict=True))
    return {Path(name).name: row[0] for name, row in zip(names, rows, strict=True)}


def vitkit_predict(options, folder: Path, weights: Path, out: Path) -> dict[str, int]:
    request = BulkRequest(
        verb="predict", model=str(weights), places=(str(folder),), out=out, batch=options.batch,
        workers=options.workers, device=options.device, engine=options.engine,
    )  # fmt: skip
    run_bulk(request, quiet=True)
    with out.open(newline="") as file:
        return {Path(row["image"]).name: int(row["label"]) for row in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="A folder of class folders; generated if not given.")
    parser.add_argument("--count", type=int, default=256, help="Images to generate.")
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--amp", action="store_true", help="timm in bf16.")
    options = parser.parse_args()
    models, took = pair(options.model), {"timm": [], "vitkit": []}
    with tempfile.TemporaryDirectory() as spare:
        folder = options.data or Path(spare) / "photos"
        if options.data is None:
            generate(folder, options.count)
        weights = {"timm": Path(spare) / "timm.pth", "vitkit": Path(spare) / "vitkit.safetensors"}
        torch.save(models["timm"].state_dict(), weights["timm"])
        vitkit.save(models["vitkit"], weights["vitkit"])
        runs, best = {"timm": timm_inference, "vitkit": vitkit_predict}, {}
        for turn in range(
            options.rounds + 1
        ):  # the first is not counted: imports, and files into the page cache
            for name in sorted(runs, reverse=bool(turn % 2)):
                start = time.perf_counter()
                best[name] = runs[name](options, folder, weights[name], Path(spare) / f"{name}-{turn}.csv")
                took[name] += [time.perf_counter() - start] * bool(turn)
    same = sum(best["timm"][name] == label for name, label in best["vitkit"].items())
    count = len(best["vitkit"])
    print(
        f"{options.model}, {count} images, batch {options.batch}, {options.workers} workers, "
        f"{options.rounds} rounds, {options.device} ({platform.machine()}), "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; same top-1: {same} of {count}"
    )
    print("| | images/s: median | range | times timm (median of the rounds) |\n|---|---|---|---|")
    for name, seconds in took.items():
        rates = [count / t for t in seconds]
        ratio = statistics.median(a / b for a, b in zip(took["timm"], seconds, strict=True))
        middle, low, high = statistics.median(rates), min(rates), max(rates)
        print(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
