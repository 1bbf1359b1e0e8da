"""A training step with LayerNorm in one kernel each way, and with PyTorch's, in turns; not compiled.

    python bench/layer_norm.py --rounds 2
    python bench/layer_norm.py --smoke   # on a CPU, where both are the same

Supervised steps and steps of MAE in bf16 from a CUDA graph, on random images that are on the device.
"""

import argparse
import statistics

import torch
from self_supervision import MAE, SUPERVISED, at_size, train_source
from torch import nn

from vitkit.models.norm import LayerNorm
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes.values import ModelOptions
from vitkit.runs.build import build_model
from vitkit.runs.estimates import Trial, seconds_an_image
from vitkit.runtime.runtime import choose_runtime

STEPS = (  # model, recipe, batch
    ("ViT-Ti/16", SUPERVISED, 512), ("ViT-B/16", SUPERVISED, 256), ("ViT-L/16", SUPERVISED, 256),
    ("ViT-H/14", SUPERVISED, 128), ("ViT-B/16", MAE, 256), ("ViT-L/16", MAE, 256), ("ViT-H/14", MAE, 128),
)  # fmt: skip
SMALL = (("ViT-Ti/16", SUPERVISED, 2), ("ViT-Ti/16", MAE, 2))
FORWARD = {"one kernel": LayerNorm.forward, "PyTorch": nn.LayerNorm.forward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    runtime = choose_runtime("cpu" if options.smoke else "cuda")
    trial = (1, 1) if options.smoke else (WARMUP_CALLS + 2, 8)  # steps before, and timed
    for name, recipe_name, batch in SMALL if options.smoke else STEPS:
        plain = {"randaugment": (), "mixup": 0.0, "model_options": ModelOptions()}
        pixels = 32 if options.smoke else 224
        recipe = at_size(recipe_name, name, pixels, batch, **(plain if recipe_name == SUPERVISED else {}))
        model = build_model(recipe, train_source())
        rates: dict[str, list[float]] = {kind: [] for kind in FORWARD}
        for _ in range(options.rounds):
            for kind, forward in FORWARD.items():
                LayerNorm.forward = forward  # type: ignore[method-assign]
                rates[kind].append(1 / seconds_an_image(recipe, model, runtime, Trial(batch, *trial)))
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        new, old = (statistics.median(values) for values in rates.values())
        rounds = "; ".join(
            f"{kind} {', '.join(f'{v:,.0f}' for v in values)}" for kind, values in rates.items()
        )
        print(
            f"{name} {recipe_name}, batch {batch}: {new:,.0f} and {old:,.0f} images/s, "
            f"{new / old:.2f} times as fast ({rounds})", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
