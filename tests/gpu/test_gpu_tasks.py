"""Tasks with a teacher, a decoder or several views on a GPU: graphs, stops and repetitions change no bit.

VITKIT_TASKS_ON=cpu runs the same functions without a GPU, where a step is never captured.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sigterm import sigterm_at
from together import losses

from vitkit.models.variants import build
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime
from vitkit.training.checkpoint import complete
from vitkit.training.step_graph import StepGraph
from vitkit.weights.save import save

DEVICE = os.environ.get("VITKIT_TASKS_ON", "cuda")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
STEPS, STOP, FIRST = 12, 6, 4
SHAPE = {"width": 64, "depth": 2, "heads": 2, "hidden": 128}
DATA = ("data=digits", "subset=200", "test=0.02", "val=0.02", "model=ViT-Ti/8", "image_size=32", "batch=16")
LENGTH = ("length.epochs=none", f"length.steps={STEPS}", "schedule.warmup=2", "schedule.rate=0.001")
LITTLE = ("evaluations=0", "patience=0", "fewshot=none", "dropout=0.1", "stochastic_depth=0.1")
SURE = ("dropout=0", "stochastic_depth=0")  # random draws of a GPU are not those of a CPU
CROPS = {"prototypes": 256, "hidden": 128, "bottleneck": 64, "local_crops": 2}
TASKS = {  # name of the task: its recipe, and small sizes for what it adds to the model
    "mae": ("mae", {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2}),
    "simmim": ("simmim", {}),
    "dino": ("dino", CROPS),
    "ibot": ("ibot", CROPS),
    "contrastive": ("contrastive", {"hidden": 128, "key_width": 32}),
    "distill": ("distill", {}),
    "distill_labels": ("deit-distilled", {"kind": "soft"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder for the runs of this file, with a random classifier of the digits as a teacher."""
    path = tmp_path_factory.mktemp("tasks")
    teacher = build("ViT-Ti/8", seed=1, image_size=24, classes=10, **SHAPE)
    torch.nn.init.normal_(teacher.head.weight, generator=torch.Generator().manual_seed(1))
    teacher.labels = tuple("0123456789")
    save(teacher, path / "teacher.safetensors")
    return path


def short(task: str, folder: Path, *changes: str) -> Recipe:
    """Twelve steps of a task on some digits."""
    name, sizes = TASKS[task]
    teacher = {"teacher": str(folder / "teacher.safetensors")} if task.startswith("distill") else {}
    shape = "model_options=" + ",".join(f"{key}={value}" for key, value in SHAPE.items())
    own = [f"{task}.{key}={value}" for key, value in (sizes | teacher).items()]
    return override(recipe(name), [*DATA, shape, *LENGTH, *LITTLE, *own, *changes])


def go(
    r: Recipe, out: Path, *, cuda_graph: bool = True, device: str = DEVICE, precision: str = "bf16"
) -> int:
    """Train into a folder; returns the number of steps that were replayed from a CUDA graph."""
    replay, replayed = StepGraph.replay, []

    def counted(self, *args):
        result = replay(self, *args)
        replayed.append(result is not None)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraph, "replay", counted)
        runtime = Runtime(device, precision, cuda_graph=cuda_graph)
        run(r, out, runtime, RunOptions(workers=0, quiet=True, report=False))
    return sum(replayed)


def state_of(out: Path) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint: weights, teacher, statistics, optimizer."""
    return load_file(complete(out / "checkpoints")[-1] / "state-00000.safetensors")


def check_same(one: Path, other: Path) -> None:
    """Two runs have the same losses and end in the same state, bit for bit."""
    assert losses(one) == losses(other) and len(losses(one)) == STEPS
    a, b = state_of(one), state_of(other)
    assert a.keys() == b.keys() and [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module", params=TASKS)
def task(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def straight(task, folder) -> Path:
    """An undisturbed run of a task in bf16, whose steps are replayed from a CUDA graph."""
    replayed = go(short(task, folder), folder / task)
    assert replayed >= STEPS - FIRST or DEVICE == "cpu"
    return folder / task


def test_a_step_from_a_cuda_graph_is_the_eager_one(task, straight, folder, tmp_path):
    assert go(short(task, folder), tmp_path, cuda_graph=False) == 0
    check_same(straight, tmp_path)


def test_a_stopped_run_ends_like_the_straight_one(task, straight, folder, tmp_path):
    with sigterm_at(STOP), pytest.raises(Interrupted):
        go(short(task, folder), tmp_path)
    assert STOP <= len(losses(tmp_path)) < STEPS
    go(short(task, folder), tmp_path)
    check_same(straight, tmp_path)


def test_a_repeated_run_is_the_same_and_another_seed_is_not(task, straight, folder, tmp_path):
    go(short(task, folder), tmp_path / "again")
    check_same(straight, tmp_path / "again")
    go(short(task, folder, "seed=1"), tmp_path / "other")
    assert losses(tmp_path / "other") != losses(straight)


def test_the_first_losses_in_float32_are_those_of_a_cpu(task, folder, tmp_path):
    r = short(task, folder, *SURE, f"length.steps={FIRST}")
    go(r, tmp_path / "cpu", device="cpu", precision="fp32")
    go(r, tmp_path / "here", precision="fp32")
    expected = losses(tmp_path / "cpu")
    assert len(expected) == FIRST and losses(tmp_path / "here") == pytest.approx(expected, rel=1e-3)
