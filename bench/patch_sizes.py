"""Accuracy and speed of one checkpoint over patch sizes: the patch embedding resized by FlexiViT's method.

    python bench/patch_sizes.py Ti_16.npz imagenette.zip --count 500
    python bench/patch_sizes.py flexivit_b_i1k.npz imagenet/val --sizes 8 10 12 15 16 20 24 30 40 48
    python bench/patch_sizes.py runs/flexi photos/ --device cuda

Each row is `adapt(model, patch=P)`: the embedding by the pseudo-inverse of a bilinear resize, positions
interpolated to the new grid, the image size as before. Pixels outside whole patches are dropped. Top-1 is
over all classes of the model, as in bench/token_merging.py; images per second are those of one pass over the
sample, by the clock or, with `--cpu-time`, in processor time.
"""

import argparse
import platform
import time

import torch
from token_merging import correct, sample

import vitkit
from vitkit.inference.engines import torch_engine
from vitkit.metrics.cost import forward_flops
from vitkit.metrics.intervals import with_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 10, 12, 14, 16, 18, 20, 24, 28, 32])
    parser.add_argument("--split", default="val")
    parser.add_argument("--match", default="")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    model = vitkit.load(options.model).to(options.device).eval()
    images, labels = sample(model, options.data, options.split, options.count, options.match)
    clock = time.process_time if options.cpu_time else time.perf_counter
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    print(f"{len(images)} images of {images.shape[2]}x{images.shape[3]} pixels, batch {options.batch}")
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| patch | grid | GFLOP | images/s | top-1 |\n" + "|---" * 5 + "|")
    for patch in options.sizes:
        resized = vitkit.adapt(model, patch=patch)
        run = torch_engine(resized)
        run(images[: options.batch])
        start = clock()
        right = correct(run, images, labels, options.batch)
        rate = len(images) / (clock() - start)
        h, w = resized.config.grid
        top1 = with_interval(right / len(images), len(images))
        print(
            f"| {patch} | {h}x{w} | {forward_flops(resized.config) / 1e9:.2f} | {rate:.1f} | {top1} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
