"""The table of docs/guides/many-gpus.md: memory of one GPU by the formula of vitkit/metrics/cost.py.

    python bench/memory_table.py
    python bench/memory_table.py --models ViT-L/16 --batch 1024 --gpus 1 8 --memory 141

Adam, bfloat16, 224 pixels, 1,000 classes. Nothing is allocated, so it runs anywhere.
"""

import argparse
from bisect import bisect_right

from vitkit.metrics.cost import Memory, training_memory
from vitkit.models.variants import Model, skeleton, variant

MODELS = ("ViT-B/16", "ViT-L/16", "ViT-H/14", "ViT-g/14", "ViT-G/14")
KINDS = (("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True))
USABLE = 0.92  # of a GPU's memory; the rest are its libraries and the allocator's gaps


def takes(model: Model, images: int, spread: str, recompute: bool, gpus: int) -> Memory:
    cut = gpus if spread == "fsdp" else 1
    return training_memory(model, images, half=True, slots=2, recompute=recompute, shards=cut)


def cell(model: Model, batch: int, spread: str, recompute: bool, gpus: int, limit: float) -> str:
    """Gigabytes for the whole share of a GPU; if they are too many, the images that fit at a time."""
    images = batch // gpus

    def total(count: int) -> int:
        return takes(model, count, spread, recompute, gpus).total

    needed = total(images)
    told = f"{needed / 1e9:.0f}" if needed >= 10e9 else f"{needed / 1e9:.1f}"
    fitting = bisect_right(range(1, images + 1), limit, key=total)
    return told if fitting == images else f"{told} ({fitting or '-'})"


def table(models: list[str], batch: int, gpus: list[int], memory: float) -> str:
    heads = [f"{n} GPUs, {batch // n} each" for n in gpus]
    lines = [f"| model | parallel | recompute | {' | '.join(heads)} |", "|---" * (3 + len(gpus)) + "|"]
    for name in models:
        model = skeleton(variant(name))
        for spread, recompute in KINDS:
            cells = [cell(model, batch, spread, recompute, n, USABLE * memory * 1e9) for n in gpus]
            lines.append(f"| {name} | {spread} | {'yes' if recompute else 'no'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--memory", type=float, default=80.0, help="GB of one GPU")
    options = parser.parse_args()
    print(table(options.models, options.batch, options.gpus, options.memory))


if __name__ == "__main__":
    main()
