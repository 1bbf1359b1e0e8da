"""Commands on a GPU from start to end: compiled, interrupted and resumed, and short of memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reference import CLASSIFY, command, losses_of

from vitkit.datasets.opening import open_data

pytestmark = pytest.mark.gpu
STEPS = 40
SHORT = (
    "import sys, torch; from vitkit.cli import main\n"
    "total = torch.cuda.get_device_properties(0).total_memory\n"
    "torch.cuda.set_per_process_memory_fraction(float(sys.argv.pop(1)) / total)\n"
    "main(sys.argv[1:])"
)


def test_a_compiled_run_ends_with_a_model_a_report_and_nearly_the_same_losses(tmp_path):
    for name, more in (("eager", ()), ("compiled", ("--compile",))):
        done = command(f"{CLASSIFY} --precision bf16", tmp_path / name, "--steps", str(STEPS), *more)
        assert done.returncode == 0, done.stderr[-2000:]
        for file in ("model.safetensors", "report.html", "result.json"):
            assert (tmp_path / name / file).exists()
    eager, compiled = losses_of(tmp_path / "eager"), losses_of(tmp_path / "compiled")
    assert len(compiled) == STEPS
    assert compiled == pytest.approx(eager, rel=0.03)
    answers = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("eager", "compiled")]
    assert answers[1]["test"]["loss"] == pytest.approx(answers[0]["test"]["loss"], rel=0.05)


@pytest.mark.parametrize("more", [(), ("--compile",)], ids=["cuda graph", "compiled"])
def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path, more):
    """Bit for bit, in a new process, with its CUDA graph captured anew."""
    words = f"{CLASSIFY} dropout=0.1 mixup=0.2 --precision bf16"
    more = ("--steps", "200", *more)
    assert command(words, tmp_path / "straight", *more).returncode == 0
    line = [sys.executable, "-m", "vitkit", *words.split(), "--out", str(tmp_path / "stopped")]
    stopped = subprocess.Popen([*line, "--device", "cuda", *more], stderr=subprocess.DEVNULL, env=os.environ)
    journal = tmp_path / "stopped" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (journal.exists() and len(journal.read_text().splitlines()) > 30):
        assert stopped.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(120) == 128 + signal.SIGTERM
    assert len(losses_of(tmp_path / "stopped")) < 200
    assert command(words, tmp_path / "stopped", *more).returncode == 0
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "straight")
    kept = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stopped", "straight")]
    assert kept[0] == kept[1]


def with_memory(size: float, words: str, out: Path, *more: str) -> subprocess.CompletedProcess:
    """The command where the GPU has so many bytes for it."""
    line = [
        sys.executable,
        "-c",
        SHORT,
        str(size),
        *words.split(),
        "--out",
        str(out),
        "--device",
        "cuda",
        *more,
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=os.environ)


@pytest.mark.parametrize("more", [(), ("--no-cuda-graph",)], ids=["cuda graph", "eager"])
def test_a_batch_that_does_not_fit_is_computed_in_smaller_pieces(tmp_path, more):
    """A real lack of memory: the allocator refuses, the batch is halved until it fits, the losses stay."""
    words = "finetune digits --model ViT-S/4 --image-size 64 --batch 256 --lr 0.0003 --recipe scratch"
    more = (*more, "--precision", "fp32", "--steps", "6", "--set", "evaluations=0", "mixup=0")
    enough = with_memory(120e9, words, tmp_path / "enough", *more)
    assert enough.returncode == 0, enough.stderr[-2000:]
    assert "out of memory" not in enough.stderr + enough.stdout
    scarce = with_memory(3e9, words, tmp_path / "scarce", *more)
    assert scarce.returncode == 0, scarce.stderr[-2000:]
    assert "out of memory" in scarce.stderr + scarce.stdout
    assert losses_of(tmp_path / "scarce") == pytest.approx(losses_of(tmp_path / "enough"), rel=1e-3)


def test_where_not_one_image_fits_the_run_ends_with_the_remedy(tmp_path):
    words = "finetune digits --model ViT-S/4 --image-size 128 --batch 64 --recipe scratch --steps 3"
    done = with_memory(150e6, words, tmp_path / "run", "--precision", "fp32")
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert "memory" in done.stderr and "Traceback" not in done.stderr


def test_predictions_of_the_graph_engine_are_those_of_float32(tmp_path):
    done = command(f"{CLASSIFY} --precision bf16", tmp_path / "run", "--steps", "200")
    assert done.returncode == 0, done.stderr[-2000:]
    digits = open_data("digits")["all"]
    (tmp_path / "images").mkdir()
    for i in range(100):
        Image.fromarray(np.ascontiguousarray(digits.fetch(i))).save(tmp_path / "images" / f"{i}.png")
    messages = {}
    for engine in ("torch", "graph", "graph-compiled"):
        line = [sys.executable, "-m", "vitkit", "predict", str(tmp_path / "run"), str(tmp_path / "images")]
        line += ["--engine", engine, "--device", "cuda", "--json"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=os.environ)
        assert done.returncode == 0, done.stderr[-2000:]
        messages[engine] = json.loads(done.stdout)
    for engine in ("graph", "graph-compiled"):
        pairs = [
            (a, b)
            for a, b in zip(messages["torch"], messages[engine], strict=True)
            if a["label"] == b["label"]
        ]
        assert len(pairs) >= 97
        assert max(abs(a["probability"] - b["probability"]) for a, b in pairs) < 0.05


def test_the_gpu_has_the_kernels_that_training_uses():
    from vitkit.ops.fused import AVAILABLE

    assert AVAILABLE and torch.cuda.is_bf16_supported()
