"""A cold `vitkit predict` of one image beside the least that does it: import torch, load, one forward.

    python bench/cold_predict.py --models ViT-Ti/16 ViT-B/16 --rounds 7

Both start new processes, in turn, with the same file of weights and the same picture; given are medians of
the wall-clock seconds, the range, and the median of each round's ratio.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.models.variants import build
from vitkit.weights.save import save

BARE = """
import sys, torch
from PIL import Image
import numpy as np
from vitkit.weights.load import load
model = load(sys.argv[1]).eval()
pixels = np.asarray(Image.open(sys.argv[2]).resize((224, 224))).transpose(2, 0, 1).copy()
with torch.inference_mode():
    model(torch.from_numpy(pixels)[None].float() / 127.5 - 1).softmax(-1)
"""


def seconds(*command: str) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["ViT-Ti/16", "ViT-B/16"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| model | the least, s | `vitkit predict`, s | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        picture, file = str(Path(folder, "picture.png")), str(Path(folder, "model.safetensors"))
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)).save(picture)
        for name in options.models:
            save(build(name), Path(file))
            commands = {
                "least": (sys.executable, "-c", BARE, file, picture),
                "vitkit": (sys.executable, "-m", "vitkit", "predict", file, picture),
            }
            for command in commands.values():  # files into the cache of the system
                seconds(*command)
            rounds = [{side: seconds(*c) for side, c in commands.items()} for _ in range(options.rounds)]
            told = []
            for side in commands:
                of = [r[side] for r in rounds]
                told.append(f"{statistics.median(of):.2f} ({min(of):.2f} to {max(of):.2f})")
            ratio = statistics.median(r["vitkit"] / r["least"] for r in rounds)
            print(f"| {name} | {told[0]} | {told[1]} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
