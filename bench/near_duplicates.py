"""Share of altered copies that the features of a model find, beside the comparison of pixels.

    python bench/near_duplicates.py MODEL DATA --copies 100

Adds altered copies of some training images to the training images, one kind of alteration at a time, and
counts those in a group with their original: by features as in `vitkit doctor --model`, and by the difference
hash of `vitkit doctor`. Groups without added copies are for the eye: data sets have near-duplicates.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance

from vitkit.data.decode import decode
from vitkit.data.doctor import NEAR, difference_hash
from vitkit.data.sources.source import from_rows
from vitkit.datasets.opening import open_data
from vitkit.inference.predict import load_model
from vitkit.metrics.feature_neighbours import near_duplicates, nearest_neighbours
from vitkit.runs.features import Extractor


def jpeg(image: Image.Image, quality: int = 90) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def cropped(part: int) -> Callable[[Image.Image], bytes]:
    def crop(image: Image.Image) -> bytes:
        w, h = image.size
        return jpeg(image.crop((w // part, h // part, w - w // part, h - h // part)))

    return crop


ALTERATIONS: dict[str, Callable[[Image.Image], bytes]] = {
    "JPEG of quality 30": lambda image: jpeg(image, 30),
    "half the size": lambda image: jpeg(image.resize((image.width // 2, image.height // 2))),
    "central 90 %": cropped(20),
    "central 75 %": cropped(8),
    "mirrored": lambda image: jpeg(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
    "brighter by 30 %": lambda image: jpeg(ImageEnhance.Brightness(image).enhance(1.3)),
}


def pixels(content: bytes | np.ndarray) -> np.ndarray:
    return decode(content) if isinstance(content, bytes) else content


def same_hash(first: np.ndarray, second: np.ndarray) -> bool:
    a, b = (np.frombuffer(difference_hash(image), np.uint8) for image in (first, second))
    return bool(len(a) and len(b) and np.unpackbits(a ^ b).sum() <= NEAR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--cache", type=Path, default=None)
    options = parser.parse_args()
    extractor = Extractor(model=load_model(options.model, "cpu"), cache=options.cache, quiet=False)
    source = next(part for key, part in open_data(options.data).items() if key in ("train", "all"))
    rows = np.random.default_rng(0).permutation(len(source))[: options.copies]
    originals = [pixels(source.fetch(int(row))) for row in rows]
    files = {f"{name}/{row}": alter(Image.fromarray(original))
             for row, original in zip(rows, originals, strict=True)
             for name, alter in ALTERATIONS.items()}  # fmt: skip
    copies = from_rows("copies", [(key, key.split("/")[0]) for key in files], files.__getitem__)
    x, altered = extractor.features(source).x, extractor.features(copies).x
    natural = near_duplicates(nearest_neighbours(x))
    print(f"without copies: {len(natural)} groups among {len(x):,} images")
    print("| copy | features | pixels |")
    for place, name in enumerate(ALTERATIONS):
        mine = slice(place, None, len(ALTERATIONS))
        groups = near_duplicates(nearest_neighbours(torch.cat([x, altered[mine]])))
        group_of = {int(row): number for number, group in enumerate(groups) for row in group}
        together = [group_of.get(int(row), -1) == group_of.get(len(x) + i, -2) for i, row in enumerate(rows)]
        alike = [same_hash(a, decode(b)) for a, b in zip(originals, list(files.values())[mine], strict=True)]
        print(f"| {name} | {np.mean(together):.0%} | {np.mean(alike):.0%} |", flush=True)


if __name__ == "__main__":
    main()
