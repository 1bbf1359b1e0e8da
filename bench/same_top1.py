"""Whether each engine names the class that float32 names: a real model on real images.

    python bench/same_top1.py Ti_16.npz imagenette.zip --count 1000
    python bench/same_top1.py Ti_16.npz imagenette.zip --device cuda

Random weights have labels that lie close to each other, so that rounding turns some; those of a trained model
do not. Given are the engines that can be had here, their share of the same top-1, by how much the turned ones
were ahead in float32 at the most, and the largest difference of a logit. int8 is calibrated on the first 128.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import vitkit
from vitkit.inference.agreement import sample_images
from vitkit.inference.builders import ENGINES, available
from vitkit.inference.engines import choose_engine, torch_engine

CALIBRATED = 128


def in_parts(run, images: torch.Tensor, batch: int) -> torch.Tensor:
    return torch.cat([run(part) for part in images.split(batch)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("images", nargs="+", help="files, folders, or a data set")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    model = vitkit.load(options.model).to(options.device).eval()
    images = sample_images(model, options.count, places=options.images)
    want = in_parts(torch_engine(model), images, options.batch)
    first = want.topk(2).values
    print(f"{len(images)} images; {options.device}, torch {torch.__version__}")
    print("| engine | same top-1 | of the others, ahead by at most | logits apart |\n" + "|---" * 4 + "|")
    for name in options.engines:
        if name == "torch" or available(name, calibrated=True, cpu=options.device == "cpu"):
            continue
        given = {"images": images[:8], "calibrate": images[:CALIBRATED]}
        with tempfile.TemporaryDirectory() as folder:
            try:
                engine = choose_engine(model, name, batch=options.batch, folder=Path(folder), **given)
            except ValueError as error:
                print(f"| `{name}` | {error} | | |", flush=True)
                continue
            result = in_parts(engine, images, options.batch)
        same = result.argmax(1) == want.argmax(1)
        ahead = (first[:, 0] - first[:, 1])[~same].max().item() if not same.all() else 0.0
        apart = (result - want).abs().max()
        print(f"| `{name}` | {int(same.sum())} of {len(same)} | {ahead:.2g} | {apart:.1e} |", flush=True)


if __name__ == "__main__":
    main()
