"""A short fine-tuning run from the command to the result, beside the time of its steps.

    python bench/start.py model.safetensors photos/ --rounds 3

Starts `vitkit finetune` (500 steps of 64 images by default) and `vitkit predict` as new processes and prints
the wall-clock seconds of each, those of the steps (cost.seconds of result.json, without evaluations), those
of `import torch` and of a first product on the GPU, and how the run compares with the bound of 1.3 times its
steps plus 6 s. The first round fills the caches of the system and is not counted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PRODUCT = "import torch; x = torch.ones(9, 9, device='cuda' if torch.cuda.is_available() else 'cpu'); x @ x"
FACTOR, CONSTANT = 1.3, 6.0  # the bound: FACTOR * steps + CONSTANT seconds


def seconds(*command: str) -> float:
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return time.perf_counter() - begun


def one_round(options: argparse.Namespace, picture: Path) -> dict[str, float]:
    vitkit = (sys.executable, "-m", "vitkit")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        row = {"import torch": seconds(sys.executable, "-c", "import torch")}
        row["a product on the device"] = seconds(sys.executable, "-c", PRODUCT)
        row["finetune"] = seconds(
            *vitkit, "finetune", options.data, "--weights", options.weights, "--out", str(out),
            "--steps", str(options.steps), "--set", f"batch={options.batch}", "patience=0", *options.set,
        )  # fmt: skip
        row["steps"] = json.loads((out / "result.json").read_text())["cost"]["seconds"]
        row["first prediction"] = seconds(*vitkit, "predict", str(out), str(picture))
        row["first prediction on the CPU"] = seconds(
            *vitkit, "predict", str(out), str(picture), "--device", "cpu"
        )
    bound = FACTOR * row["steps"] + CONSTANT
    return row | {"bound": bound, "finetune / bound": row["finetune"] / bound}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", help="a model file, or the name of published weights")
    parser.add_argument("data", help="a folder of images")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other recipe fields")
    options = parser.parse_args()
    suffixes = (".jpg", ".jpeg", ".png", ".webp")
    picture = next(path for path in sorted(Path(options.data).rglob("*")) if path.suffix.lower() in suffixes)
    rounds = [one_round(options, picture) for _ in range(options.rounds + 1)][1:]
    print(f"{options.steps} steps of {options.batch} images; median (least to most) of {options.rounds}\n")
    print("| | |\n|---|---|")
    for name in rounds[0]:
        of = [row[name] for row in rounds]
        unit = "" if "/" in name else " s"
        print(f"| {name} | {statistics.median(of):.2f}{unit} ({min(of):.2f} to {max(of):.2f}) |")


if __name__ == "__main__":
    main()
