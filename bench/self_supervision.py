"""Steps without labels: MAE beside supervised training, and DINO beside the structure of its reference code.

    python bench/self_supervision.py --device cuda --batch 256 --rounds 5 --out self-supervision.json
    python bench/self_supervision.py --device cpu --batch 8 --rounds 1 --smoke   # small models, to see it run

Both sides of a comparison take turns, round by round, in one process; the result is the median over rounds
of images per second, and the ratio of the medians. Only steps are timed: forward, backward and update, on a
batch that is on the device. vitkit's steps also normalise uint8 images; the reference gets float images.

The reference is plain PyTorch with a ViT of timm, in the structure of the official DINO code: a multi-crop
wrapper that concatenates crops of one size, a head with a weight-normalised last layer, a loss over pairs of
views, gradients clipped parameter by parameter with the norm read on the host, AdamW, autocast, a loop over
all parameters for the teacher, and the loss read in each step. Sizes and loss are those of the recipe `dino`.
Each round is printed, and --out is written after each comparison, so a run that is cut short has its part.
Without timm, the comparison of DINO is left out with a note.
"""

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.sources.source import Source
from vitkit.models.variants import Model, variant
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import ModelOptions
from vitkit.runs.build import build_model, open_splits
from vitkit.runs.estimates import Trial, seconds_an_image
from vitkit.runtime.runtime import Runtime, choose_runtime

SUPERVISED, MAE, DINO = "pretrain", "mae", "dino"
CLASSES = 1000
LARGE, SMALL_CROPS = 2, 8  # crops of an image
HIDDEN, BOTTLENECK, PROTOTYPES = 2048, 256, 65_536  # of DINO's head
STUDENT, TEACHER, CENTRE, MOMENTUM, CLIP = 0.1, 0.04, 0.9, 0.996, 3.0
Measure = Callable[[], float]  # seconds for an image


def train_source() -> Source:
    """A source with as many classes as ImageNet; its images are not read."""
    digits = open_splits(Recipe(name="bench", data="digits"))["train"]
    return replace(digits, classes=tuple(map(str, range(CLASSES))))


def at_size(name: str, model: str, pixels: int, batch: int, **changes: Any) -> Recipe:
    r = named_recipe(name)
    return replace(
        r, data="digits", model=model, image_size=(pixels, pixels), batch=batch, auto=(), **changes
    )


def own_step(recipe: Recipe, runtime: Runtime, timed: int) -> Measure:
    """vitkit's step of a recipe, with its CUDA graph on a GPU."""
    model: Model = build_model(recipe, train_source())
    before = WARMUP_CALLS + 2 if runtime.device.startswith("cuda") else 1
    return lambda: seconds_an_image(recipe, model, runtime, Trial(recipe.batch, before, timed))


class Head(nn.Module):
    """DINO's projection head: three layers, length 1, and a last layer with rows of length 1."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        layers = [nn.Linear(width, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(HIDDEN, BOTTLENECK))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(BOTTLENECK, outputs, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class MultiCrop(nn.Module):
    """Runs the backbone once for each size of crop, then the head on all outputs."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = [crop.shape[-1] for crop in crops]
        counts = [sizes.count(size) for size in dict.fromkeys(sizes)]
        outputs, start = [], 0
        for count in counts:
            outputs.append(self.backbone(torch.cat(crops[start : start + count])))
            start += count
        return self.head(torch.cat(outputs))


class Loss(nn.Module):
    """The cross-entropy between the teacher's large crops and the student's other ones."""

    centre: Tensor

    def __init__(self, outputs: int):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, outputs))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        answers = (student / STUDENT).chunk(LARGE + SMALL_CROPS)
        targets = F.softmax((teacher - self.centre) / TEACHER, dim=-1).detach().chunk(LARGE)
        total, terms = torch.zeros((), device=student.device), 0
        for i, target in enumerate(targets):
            for j, answer in enumerate(answers):
                if i != j:
                    total = total + torch.sum(-target * F.log_softmax(answer, dim=-1), dim=-1).mean()
                    terms += 1
        self.update_centre(teacher)
        return total / terms

    @torch.no_grad()
    def update_centre(self, teacher: Tensor) -> None:
        self.centre = self.centre * CENTRE + teacher.mean(0, keepdim=True) * (1 - CENTRE)


def backbone(model: str, pixels: int, drop: float) -> nn.Module:
    """timm's ViT of the size of one of vitkit's, which takes images of other sizes too."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import importable_peers  # noqa: F401
    from timm.models.vision_transformer import VisionTransformer

    c: Any = variant(model)
    return VisionTransformer(
        img_size=pixels, patch_size=c.patch, embed_dim=c.width, depth=c.depth, num_heads=c.heads,
        mlp_ratio=c.hidden / c.width, num_classes=0, drop_path_rate=drop, dynamic_img_size=True,
    )  # fmt: skip


def groups(student: nn.Module) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: biases and 1-D tensors have none."""
    named = [(n, p) for n, p in student.named_parameters() if p.requires_grad]
    plain = [p for n, p in named if n.endswith(".bias") or p.ndim == 1]
    decayed = [p for n, p in named if not (n.endswith(".bias") or p.ndim == 1)]
    return [{"params": decayed, "weight_decay": 0.04}, {"params": plain, "weight_decay": 0.0}]


def clip_gradients(student: nn.Module) -> None:
    """Each gradient by itself, with its norm read on the host."""
    for p in student.parameters():
        if p.grad is not None:
            coefficient = CLIP / (p.grad.data.norm(2) + 1e-6)
            if coefficient < 1:
                p.grad.data.mul_(coefficient)


def reference_step(recipe: Recipe, runtime: Runtime, timed: int, outputs: int) -> Measure:
    """A step in the structure of the official code."""
    device, pixels, count = runtime.device, recipe.image_size[0], recipe.batch
    small = small_side(recipe)
    networks = [
        MultiCrop(backbone(recipe.model, pixels, drop), Head(variant(recipe.model).width, outputs))
        for drop in (recipe.stochastic_depth, 0.0)
    ]
    student, teacher = (network.to(device) for network in networks)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    loss_of, optimizer = Loss(outputs).to(device), torch.optim.AdamW(groups(student), lr=0.0)
    sizes = [pixels] * LARGE + [small] * SMALL_CROPS
    crops = [torch.randn(count, 3, size, size, device=device) for size in sizes]
    half = runtime.precision == "bf16"

    def step() -> None:
        with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16, enabled=half):
            targets = teacher(crops[:LARGE])
            loss = loss_of(student(crops).float(), targets.float())
        if not math.isfinite(loss.item()):
            raise SystemExit("the loss of the reference is not finite")
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(student)
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(MOMENTUM).add_((1 - MOMENTUM) * q.detach().data)
        synchronize(device)

    def measure() -> float:
        step()
        start = time.monotonic()
        for _ in range(timed):
            step()
        return (time.monotonic() - start) / timed / count

    return measure


def small_side(recipe: Recipe) -> int:
    """Pixels of a small crop, as vitkit's task makes it."""
    from vitkit.runs.batches import training_view

    views = dict(recipe.task.more_views(training_view(recipe)))
    return int(views["local"][0].size[0])


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def in_turns(sides: dict[str, Measure], options: argparse.Namespace) -> dict[str, list[float]]:
    """Images per second of each side in each round; no round starts that would end after --seconds."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    longest = 0.0
    for number in range(options.rounds):
        begun = time.monotonic()
        if number and begun + longest > options.until:
            print(f"--seconds are used up after {number} of {options.rounds} rounds", flush=True)
            break
        for name, measure in sides.items():
            rates[name].append(1 / measure())
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - begun)
        rounds = ", ".join(f"{name} {values[-1]:,.1f} images/s" for name, values in rates.items())
        print(f"round {number + 1}: {rounds} ({time.monotonic() - begun:.1f} s)", flush=True)
    return rates


def comparison(
    what: str, sides: dict[str, Measure], options: argparse.Namespace, batch: int
) -> dict[str, Any]:
    print(f"{what}, batch {batch}", flush=True)
    rates = in_turns(sides, options)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    first, second = medians.values()
    return {
        "what": what,
        "batch": batch,
        "images_per_second": medians,
        "rounds": rates,
        "ratio": first / second,
    }


def compare_mae(
    model: str, pixels: int, parts: int, runtime: Runtime, options: argparse.Namespace
) -> dict[str, Any]:
    """parts: the batch is divided by this, so that a large model fits into memory."""
    batch = options.batch // parts
    plain: dict[str, Any] = {"randaugment": (), "mixup": 0.0, "model_options": ModelOptions()}
    sides = {
        "MAE": own_step(at_size(MAE, model, pixels, batch), runtime, options.steps),
        "supervised": own_step(at_size(SUPERVISED, model, pixels, batch, **plain), runtime, options.steps),
    }
    return comparison(f"{model} at {pixels} px: MAE beside supervised", sides, options, batch)


def compare_dino(model: str, pixels: int, runtime: Runtime, options: argparse.Namespace) -> dict[str, Any]:
    batch, outputs = options.dino_batch or options.batch, 1024 if options.smoke else PROTOTYPES
    recipe = at_size(DINO, model, pixels, batch)
    recipe = replace(recipe, task_options={**recipe.task_options, f"{DINO}.prototypes": outputs})
    sides = {
        "vitkit": own_step(recipe, runtime, options.steps),
        "reference structure": reference_step(recipe, runtime, options.steps, outputs),
    }
    return comparison(f"{model} at {pixels} px: DINO beside the reference structure", sides, options, batch)


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| step | batch | images/s | images/s of the other | times as fast |", "|---|---|---|---|---|"]
    for row in results:
        first, second = row["images_per_second"].values()
        lines.append(
            f"| {row['what']} | {row['batch']} | {first:,.1f} | {second:,.1f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", action="store_true", help="vitkit's steps by torch.compile")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dino-batch", type=int, help="of the comparison of DINO; default: --batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a round")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no round ends after this, but the first"
    )
    parser.add_argument("--only", choices=(MAE, DINO))
    parser.add_argument("--smoke", action="store_true", help="ViT-Ti/4 of 32 pixels and a small head")
    parser.add_argument("--out", type=Path, help="results as JSON")
    options = parser.parse_args()
    runtime = choose_runtime(options.device, options.precision, options.compile)
    small = options.smoke or not runtime.device.startswith("cuda")
    options.smoke = small
    options.steps = 2 if small else options.steps
    options.until = time.monotonic() + options.seconds
    results: list[dict[str, Any]] = []
    for compare in comparisons(options, small):
        results.append(compare(runtime, options))
        content = {"machine": runtime.describe(), "compiled": options.compile, "results": results}
        if options.out:
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    if not options.out:
        print(json.dumps(content, indent=1))


Compare = Callable[[Runtime, argparse.Namespace], dict[str, Any]]


def comparisons(options: argparse.Namespace, small: bool) -> list[Compare]:
    """The comparisons that --only asks for and that this version and machine can make."""
    chosen: list[Compare] = []
    if options.only != DINO:
        large = (("ViT-B/16", 224, 1), ("ViT-L/16", 224, 1), ("ViT-H/14", 224, 2))
        models = (("ViT-Ti/4", 32, 1),) if small else large
        chosen += [partial(compare_mae, *model) for model in models]
    if options.only != MAE:
        if importlib.util.find_spec("timm"):
            chosen.append(partial(compare_dino, *(("ViT-Ti/4", 32) if small else ("ViT-S/16", 224))))
        else:
            print("left out: DINO, whose reference needs timm")
    return chosen


if __name__ == "__main__":
    main()
