"""Four short trainings whose losses are stored in reference.json, to notice a change of any number."""

import json
import os
import subprocess
import sys
from pathlib import Path

PATH = Path(__file__).parent / "reference.json"
SEED, STEPS = 0, 50
MODEL = "model_options=width=64,depth=4,heads=4,hidden=128"
SIZES = "--model ViT-Ti/4 --image-size 16 --batch 64 --lr 0.001"
CLASSIFY = f"finetune digits {SIZES} --recipe scratch --patience 0 --keep last --set {MODEL}"
CONFIGURATIONS = {  # name -> words of the command
    "bf16": f"{CLASSIFY} dropout=0.1 mixup=0.2 --precision bf16",
    "bf16 compiled": f"{CLASSIFY} mixup=0.2 --precision bf16 --compile",
    "fp32": f"{CLASSIFY} mixup=0.2 --precision fp32 --no-cuda-graph",
    "masked": f"pretrain digits {SIZES} --recipe masked --precision bf16 --set {MODEL} schedule.warmup=5",
}


def command(words: str, out: Path, *more: str) -> subprocess.CompletedProcess:
    """The vitkit command in a process of its own."""
    line = [sys.executable, "-m", "vitkit", *words.split(), "--out", str(out), "--device", "cuda", *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=os.environ)


def losses_of(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def losses(name: str, out: Path) -> list[float]:
    """The losses of one configuration."""
    done = command(CONFIGURATIONS[name], out, "--steps", str(STEPS), "--seed", str(SEED), "--workers", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    return losses_of(out)
