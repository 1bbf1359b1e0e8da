"""JPEG files decoded and cropped on the GPU (nvJPEG, by torchvision), beside cores that do the same.

    python bench/decode_on_gpu.py --count 2048 --batch 512

Files are read from the page cache; a crop is an inception box, resized with antialiasing as ours is. Told are
images a second of decoding alone, of decoding and cropping, and of our workers on all cores, and how far the
pixels of the two decoders are apart.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from files_to_steps import save_jpegs
from torchvision.io import ImageReadMode, decode_jpeg

from vitkit.data.decode import decode
from vitkit.data.loader import train_batches
from vitkit.data.order import Order
from vitkit.data.views import View, inception_box
from vitkit.datasets.opening import open_data
from vitkit.runtime.runtime import cpu_cores

SIZE = 224


def decoded(contents: list[bytes]) -> list[torch.Tensor]:
    bits = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    return decode_jpeg(bits, mode=ImageReadMode.RGB, device="cuda")


def cropped(images: list[torch.Tensor], rng: np.random.Generator) -> torch.Tensor:
    crops = []
    for image in images:
        top, left, height, width = inception_box(*image.shape[1:], rng)
        part = image[None, :, top : top + height, left : left + width].float()
        crops.append(F.interpolate(part, (SIZE, SIZE), mode="bilinear", antialias=True))
    return torch.cat(crops).round_().byte()


def rate(run, images: int) -> float:
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return images / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        save_jpegs(Path(folder, "jpegs"), options.count)
        files = sorted(Path(folder, "jpegs").glob("*/*.jpg"))
        contents = [path.read_bytes() for path in files]
        parts = [contents[at : at + options.batch] for at in range(0, len(contents), options.batch)]
        theirs = decoded(contents[:1])[0].permute(1, 2, 0).cpu().numpy()
        apart = np.abs(theirs.astype(int) - decode(contents[0]))
        print(f"pixels of one image: {apart.mean():.3f} levels apart, at most {apart.max()}", flush=True)
        source = open_data(Path(folder, "jpegs"))["all"]
        view = View(size=(SIZE, SIZE), crop="inception", flip=True)
        ours = train_batches(source, view, Order(len(source), options.batch, seed=0), workers=cpu_cores())
        for _ in range(cpu_cores() + 4):
            next(ours)
        result: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            alone = rate(lambda: [decoded(part) for part in parts], len(files))
            result.setdefault("decoded on the GPU", []).append(alone)
            both = rate(lambda: [cropped(decoded(part), rng) for part in parts], len(files))
            result.setdefault("decoded and cropped there", []).append(both)
            time.sleep(1)
            workers = rate(
                lambda: [next(ours) for _ in range(2 * cpu_cores())], 2 * cpu_cores() * options.batch
            )
            result.setdefault("by workers", []).append(workers)
    for name, rates in result.items():
        print(f"{name}: {statistics.median(rates):,.0f} images/s ({min(rates):,.0f} to {max(rates):,.0f})")


if __name__ == "__main__":
    main()
