"""What `vitkit finetune --plan` says of memory and time, beside what the run then takes.

    python bench/plan_beside_run.py DATA --models ViT-B/16 ViT-L/16 --batch 128 --steps 60
    python bench/plan_beside_run.py MASKS --models ViT-Ti/16 --steps 200 --more --task segment

The plan is asked for in a process of its own, as a user would; then the same command runs. Time is the steps'
own (the first ones are slower and count too), memory the most that PyTorch held at once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
import json, sys, torch
from vitkit.cli import main
main(sys.argv[1:])
print(json.dumps({"peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None}))
"""


def told(*command: str) -> list[dict]:
    """The JSON values that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    text, values, reader = done.stdout.strip(), [], json.JSONDecoder()
    while text:
        value, end = reader.raw_decode(text)
        values.append(value)
        text = text[end:].strip()
    return values


def compare(data: str, model: str, options: argparse.Namespace, out: str) -> dict:
    words = ["finetune", data, "--model", model, "--steps", str(options.steps), "--out", out, "--json"]
    if not options.more:
        words += ["--image-size", str(options.image_size), "--batch", str(options.batch)]
    words += [*options.more, "--set", "evaluations=0", "test=0.002", *options.set]
    [plan] = told(sys.executable, "-m", "vitkit", *words, "--plan")
    result, memory = told(sys.executable, "-c", RUN, *words)
    seconds, peak = result["cost"]["seconds"], memory["peak"]
    return {
        "model": model, "batch": plan["batch"], "more": options.more,
        "planned_s": plan["seconds"], "seconds": seconds,
        "time_ratio": plan["seconds"] / seconds, "planned_GB": plan["memory_GB"],
        "GB": peak and peak / 1e9, "memory_ratio": peak and plan["memory_GB"] * 1e9 / peak,
        "largest_batch": plan["largest_batch_at_once"], "cost": result["cost"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--models", nargs="+", default=["ViT-B/16", "ViT-L/16"])
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", nargs="*", default=[])
    more = "further options, such as --task segment; batch and size are then the command's own choice"
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help=more)
    options = parser.parse_args()
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            row = compare(options.data, model, options, str(Path(folder) / "run"))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
