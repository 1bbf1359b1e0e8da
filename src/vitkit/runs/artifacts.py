"""What a run keeps for its report: machine, data, mistakes, and its first training batch."""

# N images, B of them looked at; H, W pixels
# B images that are shown; H, W pixels; C classes

import base64
import csv
import io
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import vitkit
from vitkit.data.decode import BadImage
from vitkit.data.doctor import examine
from vitkit.data.loader import Batch, Samples
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.views import apply, normalise
from vitkit.inference.predict import evaluation_view
from vitkit.inspection.attention import attention_rollout
from vitkit.io.files import replace_file
from vitkit.metrics.classification import BINS, Accuracy
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, in_patches
from vitkit.recipes.recipe import Recipe
from vitkit.report.overlay import overlay
from vitkit.report.terminal import csv_cell
from vitkit.runs.batches import mixup_batch, training_view
from vitkit.runs.page import BATCH, MISTAKES, write_run_page, write_shown
from vitkit.runs.page import FILE as SHOWN
from vitkit.runs.page import read as read_json
from vitkit.runs.provenance.predictions import PREDICTIONS, write_predictions
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import one_hot
from vitkit.tasks.task import Metrics, Task

KEPT = 24  # mistakes of each kind
SIDE = 192  # pixels of a small picture
LEAST = 12  # images of which the model is least sure
PAIRS, FILES, NAMES = 100, 100, 20  # confusions, unusable files and files of a finding that are named
LOOKED = 1_000_000  # images up to which names and counts are gone through as a run begins
Say = Callable[[str], None]
Unusable = Mapping[str, Mapping[str, str]]  # by split: files, and why they cannot be used


@contextmanager
def harmless(what: str, say: Say) -> Iterator[None]:
    """Inside, an error is told in a line and ends nothing: no run is lost for its report."""
    try:
        yield
    except Exception as error:  # a full disk, a strange file, memory: the run is what counts
        why = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
        say(f"{what} could not be made: {why}")


def keep(path: Path, content: Any) -> None:
    text = json.dumps(content)  # ASCII, so that names which are no Unicode survive
    replace_file(path, lambda beside: beside.write_text(text))


def begin(
    out: Path,
    splits: Mapping[str, Source],
    steps: int,
    runtime: Runtime,
    say: Say,
    *,
    task: Task,
    doctor: bool,
    step: int = 0,
) -> None:
    """Before training, by one process: where it runs and what it is given; `doctor`: and how that looks.

    What was written as the run began stays; a start at a later step is added to the list `later`.
    """
    with harmless("environment.json", say):
        data = {
            "images": {name: len(part) for name, part in splits.items()},
            "classes": len(splits["train"].classes),
        }
        started = datetime.now(UTC).isoformat(timespec="seconds")
        told = {"machine": machine(runtime) | {"started": started}, "steps": steps, "data": data,
                "command": command(sys.argv)}  # fmt: skip
        path = out / "environment.json"
        first = read_json(path) if step else None
        if first:
            told = first | {"later": [*first.get("later", []), {"step": step} | told]}
        keep(path, told)
    with harmless(SHOWN, say):
        if not (out / SHOWN).exists():
            write_shown(out, task)
    with harmless("doctor.json", say):
        if doctor and not (out / "doctor.json").exists():
            keep(out / "doctor.json", look(splits))


def machine(runtime: Runtime) -> dict[str, Any]:
    """Versions and hardware."""
    found = {
        "vitkit": vitkit.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "numpy": np.__version__, "pillow": PIL.__version__,
        "system": platform.platform(), "processors": os.cpu_count(), **runtime.describe(),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def command(words: Sequence[str]) -> str | None:
    """What was typed, if it was our command."""
    ours = Path(words[0]).name == "vitkit" or Path(words[0]).parts[-2:] == ("vitkit", "__main__.py")
    return shlex.join(["vitkit", *words[1:]]) if ours else None


def look(splits: Mapping[str, Source]) -> dict[str, Any]:
    """The doctor's findings by names and counts, with some of the files of each."""
    total = sum(map(len, splits.values()))
    if total > LOOKED:
        told = f"{total:,} images: their names and counts were not gone through; vitkit doctor does so."
        return {"skipped": told}
    found = examine(splits, deep=False).to_json()
    for finding in found["findings"]:
        finding |= {"files": finding["files"][:NAMES], "groups": finding["groups"][:NAMES]}
    return found


def finish(
    out: Path,
    runtime: Runtime,
    source: Source,
    task: Task,
    metrics: Metrics,
    model: Model,
    unusable: Unusable,
    say: Say,
) -> None:
    """After training, by all processes; the first one writes what is to be seen, and the report.

    source: what the model was tested on; metrics: how well; model: whole, and nobody else's.
    """
    everyones = runtime.all_gather_object(unusable)
    if not runtime.is_main:
        return
    with harmless("unusable.json", say):
        keep(out / "unusable.json", listed(everyones))
    if found := task.mistakes(metrics):
        with harmless("mistakes.json", say):
            keep(out / "mistakes.json", mistakes(source, found, model, runtime.device, say))
        with harmless(PREDICTIONS, say):
            write_predictions(out, source, found)
        with harmless(MISTAKES, say):
            write_mistakes(out / MISTAKES, source, found)
    with harmless("report.html", say):
        write_run_page(out)


def listed(everyones: Sequence[Unusable]) -> dict[str, Any]:
    """Of each split how many files cannot be used, and some of their names."""
    joined: dict[str, dict[str, str]] = {}
    for one in everyones:
        for split, files in one.items():
            joined.setdefault(split, {}).update(files)
    return {
        split: {"count": len(files), "files": dict(sorted(files.items())[:FILES])}
        for split, files in joined.items()
    }


def mistakes(source: Source, found: Accuracy, model: Model, device: str, say: Say) -> dict[str, Any]:
    """The mistakes of which the model was most sure, what is confused, how sure it is, and where least."""
    ordered = wrong_ones(found)
    worst = ordered[:KEPT]
    rising = found.confidence.argsort(stable=True)[: LEAST + len(worst)].tolist()
    least = [row for row in rising if row not in worst][:LEAST]  # no picture twice
    shown = pictured(source, found, [*worst, *least], model, device, say)
    return {
        "images": found.images, "wrong": len(ordered), "pairs": pairs(found, source.classes),
        "calibration": bins(found.confidence, found.correct),
        "worst": [shown[row] for row in worst if row in shown],
        "least": [shown[row] for row in least if row in shown],
    }  # fmt: skip


def wrong_ones(found: Accuracy) -> list[int]:
    """The rows that are wrong, those of which the model was most sure first."""
    wrong = torch.nonzero(~found.correct)[:, 0]
    return wrong[found.confidence[wrong].argsort(descending=True, stable=True)].tolist()


def write_mistakes(path: Path, source: Source, found: Accuracy) -> None:
    """Every mistake as a row of a table for spreadsheets and scripts."""

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("file", "truth", "said", "confidence"))
            for row in wrong_ones(found):
                names = (source.keys[int(found.index[row])], source.classes[int(found.truth[row])],
                         source.classes[int(found.predicted[row])])  # fmt: skip
                rows.writerow([*map(csv_cell, names), f"{float(found.confidence[row]):.6f}"])

    replace_file(path, write)


def pictured(
    source: Source, found: Accuracy, rows: Sequence[int], model: Model, device: str, say: Say
) -> dict[int, dict[str, Any]]:
    """Of each row what it is and was said to be, with a small picture and one of attention over it."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    images: dict[int, Tensor] = {}
    for row in rows:
        try:
            images[row] = apply(source.fetch(int(found.index[row])), view, np.random.default_rng(0))
        except BadImage:  # it was there when the model was tested
            continue
    if isinstance(model, ViT):  # maps cover the pixels that lie in patches
        images = {row: in_patches(image, model.config.stride) for row, image in images.items()}
    maps: Sequence[np.ndarray | None] = [None] * len(images)
    if images and isinstance(model, ViT) and model.config.depth:
        with harmless("attention over the mistakes", say):
            maps = attended(model.to(device), torch.stack([*images.values()]))
    told = {}
    for (row, image), heat in zip(images.items(), maps, strict=True):
        small = resized(image.permute(1, 2, 0).numpy())
        told[row] = {
            "key": str(source.keys[int(found.index[row])]), "confidence": float(found.confidence[row]),
            "truth": source.classes[int(found.truth[row])], "said": source.classes[int(found.predicted[row])],
            "image": jpeg(small),
            "overlay": None if heat is None else jpeg(overlay(small, heat)),
        }  # fmt: skip
    return told


def attended(model: ViT, images: Tensor) -> list[np.ndarray]:
    """What reaches the head, (h, w) for each of uint8 images (B, 3, H, W)."""
    ready = normalise(images, model.preprocessing.mean, model.preprocessing.std)
    return list(attention_rollout(model, ready, batch=4))


def resized(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) with a longer side of at most 192; very small ones are enlarged, with their pixels seen."""
    height, width = pixels.shape[:2]
    factor = SIDE / max(height, width)
    factor = factor if factor < 1 else max(1, int(factor))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    how = Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST
    return np.array(Image.fromarray(pixels).resize(size, how))


def jpeg(pixels: np.ndarray) -> str:
    """In base64, as JSON and pages want it."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85, optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def pairs(found: Accuracy, classes: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """(truth, said, times, images of that truth) of the most frequent confusions."""
    wrong = ~found.correct
    kinds, times = torch.stack([found.truth[wrong], found.predicted[wrong]]).unique(dim=1, return_counts=True)
    counts = found.truth.bincount(minlength=found.data_classes)
    order = times.argsort(descending=True, stable=True)[:PAIRS].tolist()
    both = [(int(kinds[0, i]), int(kinds[1, i]), int(times[i])) for i in order]
    return [(classes[truth], classes[said], n, int(counts[truth])) for truth, said, n in both]


def bins(confidence: Tensor, right: Tensor) -> list[tuple[float, float, int]]:
    """(mean confidence, share right, images) in bins of equal width, without those that are empty."""
    place = (confidence * BINS).ceil().long().clamp(1, BINS)
    chosen = [place == number for number in range(1, BINS + 1)]
    return [
        (float(confidence[those].mean()), float(right[those].double().mean()), int(those.sum()))
        for those in chosen if those.any()
    ]  # fmt: skip


PICTURE = "training-batch.jpg"
IMAGES_SHOWN, ACROSS = 12, 4  # images of the batch, and of a row of the picture
Labels = Sequence[tuple[str, float]]  # with their shares
LABELS = 3  # of one image that are named
LINE = 20  # pixels of a row of words in the picture


def keep_batch(out: Path, recipe: Recipe, source: Source, order: Order, say: Say) -> None:
    """Into the run folder, once. The images are made anew, so that training is not touched by it."""
    if (out / BATCH).exists():
        return
    with harmless(BATCH, say):
        images, labels = first_images(recipe, source, order)
        named = [label_shares(row, source.classes) for row in labels]
        small = [resized(image.permute(1, 2, 0).numpy()) for image in images]
        sheet = contact_sheet([Image.fromarray(pixels) for pixels in small], named)
        replace_file(out / PICTURE, lambda beside: sheet.save(beside, "JPEG", quality=88))
        shown = [{"image": jpeg(pixels), "labels": row} for pixels, row in zip(small, named, strict=True)]
        keep(out / BATCH, {"step": 0, "of": recipe.batch, "how": how_made(recipe), "images": shown})


def first_images(recipe: Recipe, source: Source, order: Order) -> tuple[Tensor, Tensor]:
    """uint8 (B, 3, H, W) and the shares of their labels (B, C), as the first step has them but normalised.

    Every random choice is a function of the seed, the step and the place: these are the same images.
    """
    mine = range(min(IMAGES_SHOWN, recipe.batch))
    places = list(mine)
    if recipe.mixup and len(places) < recipe.batch:
        places.insert(0, recipe.batch - 1)  # the partner of the first one
    made, _ = Samples(source, training_view(recipe), order).made([(0, place) for place in places])
    targets = one_hot(made["label"], len(source.classes))
    batch: Batch = made | {"image": made["image"].float(), "label": targets}
    if recipe.mixup:
        batch = mixup_batch(batch, recipe.mixup, order.rng(0, -1), mine, recipe.batch)
    return batch["image"].round().clamp(0, 255).to(torch.uint8), batch["label"]


def label_shares(row: Tensor, classes: Sequence[str]) -> list[tuple[str, float]]:
    """The labels of one image by their share, the largest first."""
    best = row.argsort(descending=True, stable=True)[:LABELS].tolist()
    return [(classes[i], round(float(row[i]), 4)) for i in best if row[i] >= 0.005]


def how_made(recipe: Recipe) -> str:
    """The augmentation in words."""
    used = {
        "a random part of each": recipe.crop in ("inception", "random", "squash-random"),
        "mirrored at random": recipe.flip,
        "changed by RandAugment": bool(recipe.randaugment),
        "two mixed by Mixup, with their shares": bool(recipe.mixup),
        recipe.task.batch_note: bool(recipe.task.batch_note),
    }
    return ", ".join(words for words, of in used.items() if of) or "the whole of each"


def contact_sheet(pictures: Sequence[Image.Image], labels: Sequence[Labels]) -> Image.Image:
    """One picture of all, each with its labels below it."""
    wide, tall = max(p.width for p in pictures), max(p.height for p in pictures) + LINE + 8
    rows = -(-len(pictures) // ACROSS)
    sheet = Image.new("RGB", (ACROSS * (wide + 8) + 8, rows * tall + 8), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for i, (picture, named) in enumerate(zip(pictures, labels, strict=True)):
        x, y = 8 + i % ACROSS * (wide + 8), 8 + i // ACROSS * tall
        sheet.paste(picture, (x, y))
        words = ", ".join(label + ("" if share >= 0.995 else f" {share:.0%}") for label, share in named)
        words = "".join(letter if letter.isprintable() else "?" for letter in words)
        while len(words) > 1 and draw.textlength(words, font) > wide:
            words = f"{words[:-2]}…"
        draw.text((x, y + picture.height + 3), words, "black", font)
    return sheet
