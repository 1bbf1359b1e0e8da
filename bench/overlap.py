"""Whether processes begin to send while there is still something to compute: DDP's overlap, FSDP2's prefetch.

    python bench/overlap.py
    python bench/overlap.py --model ViT-S/16 --image-size 224 --images 2

Two processes (gloo, CPU) take four steps as the training loop does; the last is profiled. Told is
the order of events in process 0, not their length: a CPU computes and sends with the same cores.
"""

import argparse
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from together import together

from vitkit.models.variants import configure, fresh
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import BACKOFF_STEPS, Stepper, TrainState

CLASSES = 10
SMALL = 1000  # numbers; what the loop itself adds up over processes is fewer
NODE = "autograd::engine::evaluate_function"  # how the profiler calls a piece of the backward pass


@dataclass(frozen=True)
class Event:
    """Microseconds at which something began and ended; the numbers that it was given."""

    name: str
    begun: float
    ended: float
    numbers: int


def profiled(runtime: Runtime, name: str, image_size: int, images: int) -> list[Event]:
    """The events of one training step; those before it settle DDP's buckets and what fits into memory."""
    model = fresh(configure(name, classes=CLASSES, image_size=image_size), seed=0)
    model = runtime.place(model).train()
    call, config = runtime.wrap(model), OptimizerConfig(kind="adam")
    step = Stepper(
        TrainState.start(model, config), ClassificationLoss(classes=CLASSES), config, call, runtime
    )
    batch = {
        "image": torch.zeros(images, 3, image_size, image_size, dtype=torch.uint8),
        "label": torch.arange(images) % CLASSES,
    }
    for _ in range(BACKOFF_STEPS + 1):
        step([batch], 1e-4)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step([batch], 1e-4)
    return [
        Event(e.name, e.time_range.start, e.time_range.end, sum(map(numbers, e.input_shapes or [])))
        for e in seen.events()
    ]


def numbers(shape: object) -> int:
    """How many a tensor of this shape has; a list of tensors is flattened."""
    if not isinstance(shape, list) or not shape:
        return 0
    if isinstance(shape[0], list):
        return sum(map(numbers, shape))
    return int(torch.Size(shape).numel())


def overlap(events: list[Event]) -> dict[str, float]:
    """Of DDP's buckets: how many are on their way before the last gradient is computed; when the first is."""
    pieces = [e for e in events if e.name.startswith(NODE)]
    begun, last = min(e.begun for e in pieces), max(e.begun for e in pieces if "AccumulateGrad" in e.name)
    buckets = [e for e in events if e.name == "gloo:all_reduce" and e.numbers >= SMALL]
    early = [e for e in buckets if e.begun < last]
    return {
        "buckets": len(buckets),
        "early": len(early),
        "early_share": sum(e.numbers for e in early) / sum(e.numbers for e in buckets),
        "first_at": (min(e.begun for e in buckets) - begun) / (last - begun),
    }


def prefetch(events: list[Event], blocks: int) -> dict[str, int]:
    """Of FSDP2's gathers: how many are asked for before the block that needs its weights earlier is done."""

    def times(what: str, block: int) -> list[float]:
        return sorted(e.begun for e in events if e.name == f"FSDP::{what} (encoder.blocks.{block})")

    forward = backward = 0
    for lower, upper in pairwise(range(blocks)):
        forward += times("all_gather", upper)[0] < times("post_forward", lower)[0]
        backward += times("all_gather", lower)[1] < times("post_backward_accumulate", upper)[0]
    return {"blocks": blocks, "forward": forward, "backward": backward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=2, help="of each process")
    options = parser.parse_args()
    words = options.model, options.image_size, options.images
    print(f"{options.model}, two processes, torch {torch.__version__}")
    d = overlap(together(2, profiled, *words, parallel="ddp")[0])
    print(
        f"ddp: {d['early']} of {d['buckets']} buckets ({d['early_share']:.0%} of the gradients) are on their "
        f"way before the last gradient is computed, the first after {d['first_at']:.0%} of the backward pass"
    )
    blocks = configure(options.model).depth
    f = prefetch(together(2, profiled, *words, parallel="fsdp")[0], blocks)
    print(
        f"fsdp: the next block's weights are asked for before a block is done in {f['forward']} of "
        f"{blocks - 1} cases in the forward pass, in {f['backward']} of {blocks - 1} in the backward pass"
    )


if __name__ == "__main__":
    main()
