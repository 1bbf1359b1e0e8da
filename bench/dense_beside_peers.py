"""Segmentation and detection beside timm and transformers: the same weights, images, steps and optimizer.

    python bench/dense_beside_peers.py --prepare small/ --data PACKS --weights ti16.npz
    python bench/dense_beside_peers.py --data small/ --weights small/ti16-half.npz --out dense.json
    python bench/dense_beside_peers.py --smoke  # drawn shapes and tiny models, on a CPU

PACKS holds camvid/ and bccd/ in layouts that vitkit reads. Parts, in this order unless --only names some:

segment  a linear segmenter from the ViT-Ti/16 beside timm's backbone with the same head: the same batches of
         training images, AdamW with the same groups, autocast; mean IoU of both on the test images, and
         images/s of steps on a batch that is on the device, round by round in turns
detect   vitkit's YOLOS beside transformers': the loss of the same batch and weights, and images/s of steps
runs     what `vitkit finetune` reaches by seed: CamVid (linear, EoMT; from the weights and from scratch) and
         BCCD (FCOS; from the weights and from scratch)

--out is written after each result, so a run that is cut short by --seconds has its part. The peer of
segment is measured by vitkit's evaluation: its weights are copied into vitkit's model.
"""

import argparse
import copy
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitkit
from vitkit.data.loader import BadFiles
from vitkit.data.sources.source import Source
from vitkit.models.variants import Model
from vitkit.ops.boxes import centres
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.recipe import Recipe, stages_of
from vitkit.runs.batches import training_batches, training_order
from vitkit.runs.build import build_model, open_splits
from vitkit.runs.estimates import Trial, seconds_an_image
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.schedule import Duration, stage_at

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import importable_peers  # noqa: F401

PARTS = ("segment", "detect", "runs")
SMALL = ("width=64", "depth=2", "heads=2", "hidden=128")
Measure = Callable[[], float]  # seconds for an image


def base(task: str, options: argparse.Namespace, **changes: Any) -> Recipe:
    """The recipe of a task at the size of the bench, without choices by the data."""
    data = "shapes" if options.smoke else str(options.data / {"segment": "camvid", "detect": "bccd"}[task])
    size = (96, 96) if options.smoke else {"segment": (384, 480), "detect": (480, 640)}[task]
    batch = 4 if options.smoke else 16
    r = named_recipe(task)
    r = replace(r, data=data, image_size=size, batch=batch, auto=(), length=Duration(steps=options.steps))
    r = replace(r, schedule=replace(r.schedule, warmup=options.steps // 10), stochastic_depth=0.0)
    start: dict[str, Any] = {"weights": str(options.weights)} if options.weights else {"model": "ViT-Ti/16"}
    if options.smoke:
        start = {"model": "ViT-Ti/8", "model_options": SMALL}
    return replace(r, **(start | changes))


# segmentation beside timm


class TimmSegmenter(nn.Module):
    """timm's ViT with a copy of the head of vitkit's linear segmenter."""

    def __init__(self, model: Any, folder: Path):
        super().__init__()
        from timm.models.vision_transformer import VisionTransformer

        c = model.config.vit
        self.vit = VisionTransformer(
            img_size=c.image_size, patch_size=c.patch, embed_dim=c.width, depth=c.depth, num_heads=c.heads,
            mlp_ratio=c.hidden / c.width, num_classes=0, global_pool="token",
            act_layer=nn.GELU if c.gelu == "erf" else (lambda: nn.GELU(approximate="tanh")),
        )  # fmt: skip
        vitkit.save(model_of(model.vit), folder / "timm.pth", "timm")
        state = torch.load(folder / "timm.pth", weights_only=True)
        self.vit.load_state_dict({name: t for name, t in state.items() if not name.startswith("head.")})
        self.norm, self.upscale = copy.deepcopy(model.norm), copy.deepcopy(model.upscale)
        self.classifier, self.grid = copy.deepcopy(model.classifier), c.grid

    def forward(self, images: Tensor) -> Tensor:
        patches = self.vit.forward_features(images)[:, 1:]
        maps = patches.transpose(1, 2).unflatten(2, self.grid)
        maps = self.norm(maps)
        for block in self.upscale:
            maps = block(maps)
        return self.classifier(maps)


def model_of(vit: Any) -> Any:
    """A ViT that can be saved by itself."""
    vit.labels = ()
    return vit


def copied_back(peer: TimmSegmenter, model: Any, folder: Path) -> Any:
    """vitkit's model with the weights of the peer."""
    torch.save({n: t.cpu() for n, t in peer.vit.state_dict().items()}, folder / "back.pth")
    c = model.config.vit
    vit = vitkit.load(folder / "back.pth", heads=c.heads, image_size=c.image_size, gelu=c.gelu)
    state = {f"vit.{name}": t for name, t in vit.state_dict().items()}
    state |= {n: t.cpu() for n, t in peer.state_dict().items() if not n.startswith("vit.")}
    new = copy.deepcopy(model).cpu()
    new.load_state_dict(new.state_dict() | state)
    return new.eval()


def groups(module: nn.Module, recipe: Recipe, depth: int) -> list[dict[str, Any]]:
    """Parameters by their layer and whether they are decayed, with the rates of vitkit's layer decay."""
    table: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, p in module.named_parameters():
        block = re.match(r"vit\.blocks\.(\d+)\.", name)
        below = name.startswith(("vit.patch_embed", "vit.pos_embed", "vit.cls_token"))
        layer = int(block[1]) + 1 if block else 0 if below else depth + 1
        decayed = p.ndim > 1 and not name.endswith(("pos_embed", "cls_token"))
        table.setdefault((layer, decayed), []).append(p)
    o = recipe.optimizer
    return [
        {"params": list(params), "scale": o.layer_decay ** (depth + 1 - layer),
         "weight_decay": o.weight_decay if decayed else 0.0}
        for (layer, decayed), params in table.items()
    ]  # fmt: skip


def prepared(images: Tensor, model: Any) -> Tensor:
    """Normalised float images from uint8 ones."""
    p = model.preprocessing
    mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (p.mean, p.std))
    return (images.float() / 255 - mean) / std


def peer_step(
    peer: Any, model: Any, recipe: Recipe, runtime: Runtime
) -> Callable[[dict[str, Tensor], float], None]:
    """A step of the peer on a batch, at a rate: forward, backward, clipping and AdamW."""
    depth = model.config.vit.depth
    parameters = groups(peer, recipe, depth)
    fused = runtime.device.startswith("cuda")
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=recipe.optimizer.betas, fused=fused)
    call = torch.compile(peer) if fused else peer
    half = runtime.precision == "bf16"

    def step(batch: dict[str, Tensor], rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        with torch.autocast(runtime.device.partition(":")[0], dtype=torch.bfloat16, enabled=half):
            logits = call(prepared(batch["image"], model))
        size = batch["mask"].shape[-2:]
        logits = F.interpolate(logits.float(), size, mode="bilinear", align_corners=False)
        F.cross_entropy(logits, batch["mask"].long(), ignore_index=255).backward()
        nn.utils.clip_grad_norm_(peer.parameters(), recipe.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def batches_of(recipe: Recipe, train: Source, model: Any, runtime: Runtime, workers: int) -> Iterator[Any]:
    """The training batches of a recipe, as its run has them."""
    return training_batches(
        recipe, train, training_order(recipe, train), model.preprocessing, runtime, start=0,
        stop=recipe.length.steps, workers=workers, bad=BadFiles(), waited=lambda seconds: None,
    )  # fmt: skip


def segment(options: argparse.Namespace, runtime: Runtime) -> dict[str, Any]:
    recipe = base("segment", options)
    splits = open_splits(recipe)
    train = splits["train"]
    model: Any = build_model(recipe, train).to(runtime.device)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        peer = TimmSegmenter(model, folder).to(runtime.device)
        sample = torch.randn(2, 3, *recipe.image_size, device=runtime.device)
        with torch.no_grad():
            outputs = model.eval()(sample)
            difference = ((outputs - peer.eval()(sample)).abs().max() / outputs.abs().max()).item()
        stages = stages_of(recipe, len(train))
        peer.train()
        step, started = peer_step(peer, model, recipe, runtime), time.monotonic()
        with closing(batches_of(recipe, train, model, runtime, options.workers)) as batches:  # type: ignore[type-var]
            for number, (batch,) in enumerate(batches):
                step(batch, stage_at(stages, number).rate(number))
        seconds = time.monotonic() - started
        back = copied_back(peer, model, folder)
        back.labels, back.task, back.preprocessing = model.labels, "segment", model.preprocessing
        vitkit.save(back, folder / "peer.safetensors")
        peer_test = evaluated(folder / "peer.safetensors", recipe, options)
        own = run_once(recipe, 0, options, folder / "own", evaluations=0)
        count = recipe.batch
        shape, classes = recipe.image_size, len(train.classes)
        batch = {
            "image": torch.randint(0, 256, (count, 3, *shape)).byte().to(runtime.device),
            "mask": torch.randint(0, classes, (count, *shape)).byte().to(runtime.device),
        }  # fmt: skip
        sides = {
            "vitkit": own_measure(recipe, model.cpu(), train, runtime, options),
            "timm": timed(lambda: step(batch, 0.0), count, runtime, options),
        }
        rates = in_turns(sides, options)
    return {
        "what": "segment beside timm", "outputs_differ_by": difference, "timm_miou": peer_test["miou"],
        "vitkit_miou": own["miou"], "timm_training_seconds": seconds, **rates,
    }  # fmt: skip


def evaluated(path: Path, recipe: Recipe, options: argparse.Namespace) -> dict[str, Any]:
    metrics = vitkit.evaluate(path, recipe.data, split="test", device=options.device)
    return metrics.to_json() if hasattr(metrics, "to_json") else dict(metrics)


# detection beside transformers


def detect(options: argparse.Namespace, runtime: Runtime) -> dict[str, Any]:
    from transformers import YolosForObjectDetection

    recipe = base(
        "detect", options, task_options={"detect.head": "yolos"}, optimizer=named_recipe("segment").optimizer
    )
    own = {"position_resize": "hf", "gelu": "erf", "norm_eps": 1e-12}  # as transformers computes
    sizes = {k: int(v) for k, v in (option.split("=") for option in SMALL)} if options.smoke else {}
    recipe = replace(
        recipe, weights="", model=recipe.model or "ViT-Ti/16", model_options={**sizes, **own},
        optimizer=replace(recipe.optimizer, layer_decay=1.0),
    )  # fmt: skip
    train = open_splits(recipe)["train"]
    model: Any = build_model(recipe, train)
    count, (height, width) = recipe.batch, recipe.image_size
    with tempfile.TemporaryDirectory() as place:
        vitkit.save(model, Path(place) / "hf", "hf")
        peer = YolosForObjectDetection.from_pretrained(Path(place) / "hf").to(runtime.device).train()
        (batch,) = next(batches_of(recipe, train, model, runtime, 0))
        model = model.to(runtime.device).train()
        own_loss = float(recipe.task.objective(model)(call_train(model), batch)["loss"])
        labels = targets_of(batch, height, width)
        images = prepared(batch["image"], model)
        peer_loss = float(peer(pixel_values=images, labels=labels).loss)
        optimizer = torch.optim.AdamW(peer.parameters(), lr=0.0, fused=runtime.device.startswith("cuda"))
        half = runtime.precision == "bf16"

        def step() -> None:
            with torch.autocast(runtime.device.partition(":")[0], dtype=torch.bfloat16, enabled=half):
                loss = peer(pixel_values=images, labels=labels).loss
            loss.backward()
            nn.utils.clip_grad_norm_(peer.parameters(), recipe.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()

        sides = {
            "vitkit": own_measure(recipe, model.cpu(), train, runtime, options),
            "transformers": timed(step, count, runtime, options),
        }
        rates = in_turns(sides, options)
    return {"what": "YOLOS beside transformers", "losses": [own_loss, peer_loss], **rates}


def call_train(model: Any) -> Any:
    """The module as the training loop calls it."""
    return lambda images, train=True: model.train_outputs(images)


def targets_of(batch: dict[str, Tensor], height: int, width: int) -> list[dict[str, Tensor]]:
    """Annotations as transformers takes them: centre, width and height as shares of the image."""
    sides = torch.tensor([width, height, width, height], device=batch["boxes"].device)
    rows = zip(batch["boxes"], batch["classes"], strict=True)
    return [
        {"class_labels": classes[classes >= 0], "boxes": centres(boxes[classes >= 0] / sides)}
        for boxes, classes in rows
    ]


# what runs reach


def runs(options: argparse.Namespace, runtime: Runtime) -> Iterator[dict[str, Any]]:
    scratch = {"weights": "", "model": "ViT-Ti/8" if options.smoke else "ViT-Ti/16",
               "optimizer": replace(named_recipe("segment").optimizer, layer_decay=1.0)}  # fmt: skip
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("segment", "linear, weights", {}), ("segment", "linear, scratch", scratch),
        ("segment", "EoMT, weights", {"task_options": {"segment.head": "eomt"}}),
        ("detect", "FCOS, weights", {}), ("detect", "FCOS, scratch", scratch),
    ]  # fmt: skip
    for seed in range(options.seeds):
        for task, what, changes in rows:
            if time.monotonic() > options.until:
                print("--seconds are used up", flush=True)
                return
            with tempfile.TemporaryDirectory() as place:
                recipe = base(task, options, **changes)
                test = run_once(recipe, seed, options, Path(place) / "run", evaluations=0)
            keys = ("miou", "pixel_accuracy") if task == "segment" else ("ap", "ap50")
            yield {
                "what": f"{task}: {what}",
                "seed": seed,
                **{key: test[key] for key in keys},
                "cost": test["cost"],
            }


def run_once(
    recipe: Recipe, seed: int, options: argparse.Namespace, out: Path, **changes: Any
) -> dict[str, Any]:
    """The test metrics of a run of vitkit, with what it cost."""
    from vitkit.runs.folder import RunOptions
    from vitkit.runs.run import run

    runtime = choose_runtime(options.device, compile=False)
    with runtime.process_group():
        result = run(
            replace(recipe, seed=seed, **changes),
            out,
            runtime,
            RunOptions(quiet=True, workers=options.workers),
        )
    content = result.to_json()
    cost = {name: content["cost"].get(name) for name in ("seconds", "images_per_second")}
    return content["test"] | {"cost": cost}


# time


def own_measure(
    recipe: Recipe, model: Model, train: Source, runtime: Runtime, options: argparse.Namespace
) -> Measure:
    """vitkit's step, with its CUDA graph on a GPU."""
    before = WARMUP_CALLS + 2 if runtime.device.startswith("cuda") else 1
    trial = Trial(recipe.batch, before, options.timed)
    return lambda: seconds_an_image(recipe, model, runtime, trial, source=train)


def timed(step: Callable[[], None], images: int, runtime: Runtime, options: argparse.Namespace) -> Measure:
    def synchronize() -> None:
        if runtime.device.startswith("cuda"):
            torch.cuda.synchronize()

    def measure() -> float:
        for _ in range(3):  # compiles at first
            step()
        synchronize()
        start = time.monotonic()
        for _ in range(options.timed):
            step()
        synchronize()
        return (time.monotonic() - start) / options.timed / images

    return measure


def in_turns(sides: dict[str, Measure], options: argparse.Namespace) -> dict[str, Any]:
    """Images/s of each side by round, their medians and the ratio of the first to the second."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        if number and time.monotonic() > options.until:
            break
        for name, measure in sides.items():
            rates[name].append(1 / measure())
        print(", ".join(f"{name} {values[-1]:,.1f} images/s" for name, values in rates.items()), flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    first, second = medians.values()
    return {"images_per_second": medians, "rounds": rates, "ratio": first / second}


# smaller copies


def prepare(folder: Path, data: Path, weights: Path) -> None:
    """The packs as they are and the weights in half precision, which fit into 64 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("camvid", "bccd"):
        shutil.copytree(data / name, folder / name, dirs_exist_ok=True)
    with np.load(weights) as arrays:
        half = {name: arrays[name].astype(np.float16) for name in arrays.files}
    np.savez(folder / "ti16-half.npz", **half)  # type: ignore[arg-type]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")


def in_float32(path: Path, folder: Path) -> Path:
    """Weights in half precision as a float32 file, which vitkit reads."""
    with np.load(path) as arrays:
        if all(arrays[name].dtype != np.float16 for name in arrays.files):
            return path
        np.savez(folder / "weights.npz", **{name: arrays[name].astype(np.float32) for name in arrays.files})  # type: ignore[arg-type]
    return folder / "weights.npz"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with camvid/ and bccd/")
    parser.add_argument("--weights", type=Path, help="an official .npz of ViT-Ti/16")
    parser.add_argument("--prepare", type=Path, help="write smaller copies to this folder, and stop")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timed", type=int, default=10, help="timed steps of a round")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing new is started after this")
    parser.add_argument("--smoke", action="store_true", help="drawn shapes and tiny models on a CPU")
    parser.add_argument("--out", type=Path, default=Path("dense-beside-peers.json"))
    options = parser.parse_args()
    if options.smoke:
        options.device, options.steps, options.seeds, options.rounds = "cpu", 3, 1, 1
        options.timed, options.workers = 2, 0
    elif options.data is None or options.weights is None:
        parser.error("--data and --weights are needed without --smoke")
    options.until = time.monotonic() + options.seconds
    return options


def main() -> None:
    options = parse()
    if options.prepare:
        return prepare(options.prepare, options.data, options.weights)
    runtime = choose_runtime(options.device, compile=not options.smoke and torch.cuda.is_available())
    results: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        results.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "rounds"}), flush=True)
        content = {"machine": runtime.describe(), "steps": options.steps, "results": results}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as place:
        if options.weights:
            options.weights = in_float32(options.weights, Path(place))
        for part in options.only:
            if part == "runs":
                for row in runs(options, runtime):
                    add(row)
            else:
                add({"segment": segment, "detect": detect}[part](options, runtime))


if __name__ == "__main__":
    main()
