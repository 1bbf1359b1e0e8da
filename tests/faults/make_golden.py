"""Writes tests/faults/golden: a run folder and a model in every format, as this version has them.

Done once for a version whose files must be read for ever; never to make a failing test pass.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

import vitkit
from vitkit.recipes import recipe as named
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs.folder import RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime
from vitkit.training.schedule import Duration

GOLDEN = Path(__file__).parent / "golden"
SIZES = {"width": 16, "depth": 1, "heads": 2, "hidden": 16, "image_size": 8, "classes": 3, "gelu": "erf"}
FILES = {  # by format: what is written, and what must be said to read it
    "vitkit": ("own.safetensors", {}), "official": ("official.npz", {}), "hf": ("hf", {}),
    "timm": ("timm.pth", {"heads": 2}), "torchvision": ("torchvision.pth", {"heads": 2}),
}  # fmt: skip


def tiny() -> Recipe:
    base = override(named("scratch"), ["image_size=8", "batch=8", "schedule.warmup=1", "evaluations=1"])
    options = ("width=16", "depth=1", "heads=2", "hidden=16")
    more = {"mixup": 0.2, "randaugment": (1, 5), "subset": "40", "length": Duration(steps=6)}
    return replace(base, data="digits", model="ViT-Ti/4", model_options=options, **more)


def images() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin()


@torch.inference_mode()
def logits(path: Path, **options) -> list[list[float]]:
    return vitkit.load(path, **options).eval()(images()).tolist()


def randomise(model) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def main() -> None:
    from vitkit.runs import run as experiment
    from vitkit.runs.folder import Interrupted

    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    model = vitkit.build("ViT-Ti/4", **SIZES)
    model.labels = ("a", "b", "c")
    randomise(model)
    output = {}
    for format, (name, options) in FILES.items():
        vitkit.save(model, GOLDEN / name, format=format)
        output[format] = logits(GOLDEN / name, **options)
    whole = GOLDEN.parent / "golden-whole"
    output["run"] = run(tiny(), whole, Runtime(), RunOptions(workers=0, quiet=True)).test["loss"]
    output["trained"] = logits(whole / "model.safetensors")
    shutil.rmtree(whole)
    watch = experiment.Trainer.watch

    def stopping(self, state, metrics):
        self.received += [15] if state.step == 3 else []
        return watch(self, state, metrics)

    experiment.Trainer.watch = stopping
    with suppress(Interrupted):
        run(tiny(), GOLDEN / "run", Runtime(), RunOptions(workers=0, quiet=True))
    for path in (GOLDEN / "run").iterdir():
        if path.name not in ("recipe.json", "metrics.jsonl", "checkpoints"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (GOLDEN / "told.json").write_text(json.dumps(output))


if __name__ == "__main__":
    main()
