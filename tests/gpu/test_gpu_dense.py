"""Segmentation and detection on a GPU: graphs, stops and repetitions change no bit.

VITKIT_TASKS_ON=cpu runs the same functions without a GPU, where a step is never captured.
"""

from pathlib import Path

import pytest
from sigterm import sigterm_at
from test_gpu_tasks import DEVICE, FIRST, LITTLE, STEPS, STOP, SURE, check_same, go
from together import losses

from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.folder import Interrupted

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SHAPE = "model_options=width=64,depth=2,heads=2,hidden=128"
DATA = ("data=shapes", "subset=64", "model=ViT-Ti/8", "image_size=48,64", "batch=8", SHAPE)
LENGTH = ("length.epochs=none", f"length.steps={STEPS}", "schedule.warmup=2", "schedule.rate=0.001")
HEADS = {  # recipe, its options, and whether its steps are replayed from a CUDA graph
    "linear": ("segment", ("segment.head=linear",), True),
    "eomt": ("segment", ("segment.head=eomt", "segment.queries=8", "segment.points=256"), True),
    "fcos": ("detect", ("detect.head=fcos",), True),
    "yolos": ("detect", ("detect.head=yolos", "detect.detections=10"), True),
    "rf-detr": ("detect", ("detect.head=rf-detr",), True),
    "instances": ("instances", ("instances.queries=16", "instances.points=256"), True),
}


def short(head: str, *changes: str) -> Recipe:
    """Twelve steps on some drawn shapes."""
    name, own, _ = HEADS[head]
    return override(recipe(name), [*DATA, *LENGTH, *LITTLE, *own, *changes])


@pytest.fixture(scope="module", params=HEADS)
def head(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def straight(head, tmp_path_factory) -> Path:
    """An undisturbed run in bf16, whose steps are replayed from a CUDA graph where the head allows it."""
    out = tmp_path_factory.mktemp("dense") / head
    replayed = go(short(head), out)
    if HEADS[head][2]:
        assert replayed >= STEPS - FIRST or DEVICE == "cpu"
    return out


def test_a_step_from_a_cuda_graph_is_the_eager_one(head, straight, tmp_path):
    assert go(short(head), tmp_path, cuda_graph=False) == 0
    check_same(straight, tmp_path)


def test_a_stopped_run_ends_like_the_straight_one(head, straight, tmp_path):
    with sigterm_at(STOP), pytest.raises(Interrupted):
        go(short(head), tmp_path)
    assert STOP <= len(losses(tmp_path)) < STEPS
    go(short(head), tmp_path)
    check_same(straight, tmp_path)


def test_the_first_losses_in_float32_are_those_of_a_cpu(head, tmp_path):
    r = short(head, *SURE, f"length.steps={FIRST}")
    go(r, tmp_path / "cpu", device="cpu", precision="fp32")
    go(r, tmp_path / "here", precision="fp32")
    expected = losses(tmp_path / "cpu")
    tolerance = (
        1e-2 if head in ("eomt", "instances") else 1e-3
    )  # which points are uncertain is decided by rounding
    assert len(expected) == FIRST and losses(tmp_path / "here") == pytest.approx(expected, rel=tolerance)
