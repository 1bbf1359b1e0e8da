"""The memory formula beside what the device counts, for training steps of ViTs, hybrids and ResNets.

    python bench/memory.py --device cuda

Each row: the bytes that `vitkit.metrics.cost` foretells, the peak that torch counts over three steps,
and their ratio.
"""

import argparse
import gc

import torch

from vitkit.metrics.cost import training_memory
from vitkit.models.variants import fresh, skeleton, variant
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState, update

CASES = [  # model, images, kind of optimizer, precision, recompute
    ("ViT-B/16", 64, "adam", "bf16", False), ("ViT-B/16", 256, "adam", "bf16", False),
    ("ViT-B/16", 256, "sgd", "bf16", False), ("ViT-B/16", 256, "adam", "bf16", True),
    ("ViT-B/16", 64, "adam", "fp32", False), ("ViT-L/16", 64, "adam", "bf16", False),
    ("ViT-L/16", 256, "adam", "bf16", False), ("ViT-L/16", 256, "adam", "bf16", True),
    ("ViT-H/14", 64, "adam", "bf16", False), ("ViT-H/14", 256, "adam", "bf16", True),
    ("R50+ViT-B/16", 64, "adam", "bf16", False), ("R50+ViT-B/16", 64, "adam", "fp32", False),
    ("BiT-R50x1", 128, "sgd", "bf16", False), ("BiT-R50x1", 128, "sgd", "fp32", False),
    ("BiT-R50x1", 128, "sgd", "bf16", True), ("BiT-R152x2", 32, "sgd", "bf16", False),
]  # fmt: skip


def measured(name: str, images: int, kind: str, precision: str, recompute: bool, device: str) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runtime = Runtime(device, precision, recompute=recompute)
    model = runtime.place(fresh(variant(name), seed=0))
    config = OptimizerConfig(kind=kind, clip=1.0)
    state = TrainState.start(model, config)
    side = model.config.image_size
    batch = {
        "image": torch.zeros(images, 3, *side, dtype=torch.uint8, device=device),
        "label": torch.zeros(images, dtype=torch.long, device=device),
    }
    for _ in range(3):
        update(state, [batch], ClassificationLoss(classes=model.config.classes), 1e-6, config, model, runtime)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| model | images | optimizer | precision | recompute | formula, GB | counted, GB | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, images, kind, precision, recompute in CASES:
        slots = 2 if kind == "adam" else 1
        told = training_memory(
            skeleton(variant(name)), images, half=precision == "bf16", slots=slots, recompute=recompute
        )
        try:
            real = measured(name, images, kind, precision, recompute, options.device)
        except torch.cuda.OutOfMemoryError:
            print(
                f"| {name} | {images} | {kind} | {precision} | {recompute} | {told.total / 1e9:.2f} | none |"
            )
            continue
        print(
            f"| {name} | {images} | {kind} | {precision} | {'yes' if recompute else 'no'} | "
            f"{told.total / 1e9:.2f} | {real / 1e9:.2f} | {told.total / real:.2f} |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
