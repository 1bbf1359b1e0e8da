"""Images per second of one core from JPEG files to uint8 training batches: vitkit beside timm.

    python bench/input_beside_timm.py [FOLDER_OF_CLASSES] --rounds 5 --json input.json

Both crop by the inception rule to 224 pixels and flip. timm is measured at its best: the batches that its
workers make for its prefetcher (use_prefetcher=True), in bytes and before the prefetcher has normalised them.
One thread for each process, rounds interleaved; seconds are CPU seconds of this process and of its workers.
Without a folder, photographs of scikit-image and scikit-learn are cropped, resized and saved as JPEGs.
"decoded" is vitkit again, from the second pass on with --decoded: it reads pixels, and decodes nothing.
The last table compares pixels: for the same boxes, ours beside Pillow's full decode and antialiased resize.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import importable_peers  # noqa: F401
import timm
import timm.data

from vitkit.data.decoded_cache import decoded
from vitkit.data.loader import train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.views import View, apply, inception_box
from vitkit.datasets.opening import open_data

VIEW = View(size=(224, 224), crop="inception", flip=True)
CASES = {"500x375": (375, 500), "2000x1500": (1500, 2000)}


def photographs() -> list[np.ndarray]:
    try:
        from skimage import data
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise SystemExit(f"{error}: install scikit-image and scikit-learn, or give a folder") from None
    return [*load_sample_images().images, data.astronaut(), data.coffee(), data.chelsea(), data.rocket()]


def save_jpegs(folder: Path, size: tuple[int, int], count: int) -> None:
    """Random parts of photographs at quality 90, in four classes."""
    rng, photos, (height, width) = np.random.default_rng(0), photographs(), size
    for number in range(count):
        photo = photos[number % len(photos)]
        h = int(min(photo.shape[0], photo.shape[1] * height / width) * rng.uniform(0.6, 1))
        w = int(h * width / height)
        top, left = (int(rng.integers(spare + 1)) for spare in (photo.shape[0] - h, photo.shape[1] - w))
        part = Image.fromarray(photo[top : top + h, left : left + w])
        place = folder / f"class{number % 4}" / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        part.resize((width, height), Image.Resampling.LANCZOS).save(place, quality=90)


def with_vitkit(source: Source, batch: int, workers: int) -> Iterator[int]:
    order = Order(len(source), batch, seed=0)
    return (len(made["image"]) for made in train_batches(source, VIEW, order, workers=workers))


def with_timm(folder: Path, batch: int, workers: int) -> Iterator[int]:
    loader = timm.data.create_loader(
        timm.data.create_dataset("", root=str(folder), is_training=True), (3, 224, 224), batch,
        is_training=True, scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=None,
        interpolation="bilinear", num_workers=workers, device=torch.device("cpu"), use_prefetcher=True,
        persistent_workers=workers > 0,
    )  # fmt: skip
    while True:
        for images, _ in loader.loader:
            assert images.dtype == torch.uint8
            yield len(images)


def cpu_seconds(pids: list[int]) -> float:
    """Of this process and of those; a worker's are in /proc until it ends."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def speeds(made: dict[str, Callable[[], Iterator[int]]], batches: int, rounds: int) -> dict[str, list[dict]]:
    """Images per CPU second and per second; the loaders run in turns, and wait while another is measured."""
    result: dict[str, list[dict]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, make in made.items():
            before = children()
            stream = make()
            next(stream)  # starts the workers
            pids = sorted(children() - before)
            cpu, start = cpu_seconds(pids), time.perf_counter()
            images = sum(islice(stream, batches))
            wall, cpu = time.perf_counter() - start, cpu_seconds(pids) - cpu
            result[name].append({"per_cpu_second": images / cpu, "per_second": images / wall})
            stream.close()  # type: ignore[attr-defined]
            del stream
    return result


def differences(source: Source, count: int) -> dict[str, float]:
    """Levels between our pixels and those of Pillow's full decode and resize, over the same boxes."""
    view, gaps = View(size=VIEW.size, crop="inception"), []
    for index in range(min(count, len(source))):
        data = source.fetch(index)
        assert isinstance(data, bytes), "images in files are wanted"
        image = Image.open(BytesIO(data)).convert("RGB")
        top, left, h, w = inception_box(image.height, image.width, np.random.default_rng(index))
        part = image.crop((left, top, left + w, top + h)).resize((224, 224), Image.Resampling.BILINEAR)
        ours = apply(data, view, np.random.default_rng(index)).permute(1, 2, 0).numpy()
        gaps.append(np.abs(ours.astype(int) - np.asarray(part)))
    return {"mean": float(np.mean(gaps)), "max": int(np.max(gaps)), "images": len(gaps)}


def measure(name: str, folder: Path, options: argparse.Namespace, cache: Path) -> dict:
    source = open_data(folder)["all"]
    if len(source) < options.batch:
        raise SystemExit(
            f"{folder}: {len(source)} images do not fill a batch of {options.batch}; see --batch"
        )
    kept, rows = decoded(source, cache, max(1, *options.workers), log=print), []
    batches = max(2, (options.images if name != "2000x1500" else options.images // 3) // options.batch)
    for workers in options.workers:
        result = speeds(
            {
                "vitkit": lambda w=workers: with_vitkit(source, options.batch, w),  # type: ignore[misc]
                "decoded": lambda w=workers: with_vitkit(kept, options.batch, w),  # type: ignore[misc]
                "timm": lambda w=workers: with_timm(folder, options.batch, w),  # type: ignore[misc]
            },
            batches,
            options.rounds,
        )
        for unit in ("per_cpu_second", "per_second"):
            runs = {who: [run[unit] for run in result[who]] for who in result}
            ratios = {
                who: statistics.median(a / b for a, b in zip(runs[who], runs["timm"], strict=True))
                for who in ("vitkit", "decoded")
            }
            rows.append({"workers": workers, "unit": unit, **runs, "ratios": ratios})
            told = [
                f"{w} {statistics.median(v):6.0f} ({min(v):.0f} to {max(v):.0f})" for w, v in runs.items()
            ]
            print(f"{name:10} {workers} workers, images {unit:15} {', '.join(told)}; to timm: vitkit "
                  f"{ratios['vitkit']:.2f}, decoded {ratios['decoded']:.2f}", flush=True)  # fmt: skip
    gap = differences(source, 100)
    print(f"{name:10} pixels beside Pillow's: mean {gap['mean']:.3f}, max {gap['max']} levels of 255")
    return {"name": name, "speeds": rows, "difference": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="class/image.jpg; else made here, in two sizes")
    parser.add_argument("--images", type=int, default=250, help="in each round; a third of them large")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folders = {"given": options.folder} if options.folder else {case: Path(made) / case for case in CASES}
        if not options.folder:
            for case, size in CASES.items():
                save_jpegs(folders[case], size, max(options.batch, min(options.images, 200)))
        results = [measure(name, folder, options, Path(made)) for name, folder in folders.items()]
    if options.json:
        options.json.write_text(json.dumps({"timm": timm.__version__, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
