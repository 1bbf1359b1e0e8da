"""The files of a run for its report: machine, data, mistakes, and the first training batch."""

# B images that are shown; H, W pixels; C classes

import csv
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
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
from vitkit.inference.predict import evaluation_view, image_outputs
from vitkit.inspection.attention import attention_rollout
from vitkit.io.files import replace_file
from vitkit.metrics.classification import BINS, Accuracy
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, in_patches
from vitkit.recipes.recipe import Recipe
from vitkit.report.overlay import overlay
from vitkit.report.target_pictures import legend
from vitkit.report.terminal import csv_cell
from vitkit.runs.batches import mix_batch, mixes, mixing_text, training_view
from vitkit.runs.page import BATCH, MISTAKES, SAMPLES, write_run_page, write_shown
from vitkit.runs.page import FILE as SHOWN
from vitkit.runs.page import read as read_json
from vitkit.runs.provenance.predictions import PREDICTIONS, write_predictions
from vitkit.runs.samples import jpeg, resized, sample_images
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import one_hot
from vitkit.tasks.task import Metrics, Task

KEPT = 24  # mistakes of each kind
LEAST = 12  # correct images with the lowest confidence
PAIRS, FILES, NAMES = 100, 100, 20  # at most: confusions, unusable files, files of a finding
LOOKED = 1_000_000  # images up to which the doctor checks names and counts at the start
Say = Callable[[str], None]
Unusable = Mapping[str, Mapping[str, str]]  # by split: files and why they are unusable


@contextmanager
def warn_on_error(name: str, say: Say) -> Iterator[None]:
    """Inside, an error is only printed: a run must not fail because of its report."""
    try:
        yield
    except Exception as error:  # a full disk, an odd file, out of memory
        why = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
        say(f"{name} could not be written: {why}")


def keep(path: Path, content: Any) -> None:
    text = json.dumps(content)  # ASCII, so that names that are not valid Unicode survive
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))


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
    """Write environment.json, task.json and, with `doctor`, doctor.json before training.

    A resumed run keeps the first environment and adds its own to the list `later`.
    """
    with warn_on_error("environment.json", say):
        data = {
            "images": {name: len(part) for name, part in splits.items()},
            "classes": len(splits["train"].classes),
        }
        started = datetime.now(UTC).isoformat(timespec="seconds")
        environment = {"machine": machine(runtime) | {"started": started}, "steps": steps, "data": data,
                       "command": command(sys.argv)}  # fmt: skip
        path = out / "environment.json"
        first = read_json(path) if step else None
        if first:
            environment = first | {"later": [*first.get("later", []), {"step": step} | environment]}
        keep(path, environment)
    with warn_on_error(SHOWN, say):
        if not (out / SHOWN).exists():
            write_shown(out, task)
    with warn_on_error("doctor.json", say):
        if doctor and not (out / "doctor.json").exists():
            keep(out / "doctor.json", look(splits))


def machine(runtime: Runtime) -> dict[str, Any]:
    """Versions and hardware."""
    versions = {
        "vitkit": vitkit.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "numpy": np.__version__, "pillow": PIL.__version__,
        "system": platform.platform(), "processors": os.cpu_count(), **runtime.describe(),
    }  # fmt: skip
    return {name: value for name, value in versions.items() if value is not None}


def command(argv: Sequence[str]) -> str | None:
    """The command line, if it is one of vitkit."""
    is_vitkit = Path(argv[0]).name == "vitkit" or Path(argv[0]).parts[-2:] == ("vitkit", "__main__.py")
    return shlex.join(["vitkit", *argv[1:]]) if is_vitkit else None


def look(splits: Mapping[str, Source]) -> dict[str, Any]:
    """The doctor's findings about names and counts, each with some of its files."""
    total = sum(map(len, splits.values()))
    if total > LOOKED:
        return {"skipped": f"{total:,} images: names and counts were not checked; vitkit doctor checks them."}
    report = examine(splits, deep=False).to_json()
    for finding in report["findings"]:
        finding |= {"files": finding["files"][:NAMES], "groups": finding["groups"][:NAMES]}
    return report


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
    """Write the mistakes and the report after training; collective, the main process writes.

    source: the test images; metrics: of the test; model: a whole copy.
    """
    gathered = runtime.all_gather_object(unusable)
    if not runtime.is_main:
        return
    with warn_on_error("unusable.json", say):
        keep(out / "unusable.json", listed(gathered))
    with warn_on_error(SAMPLES, say):
        if task.predicts:
            examples = task.examples(metrics, source, model, partial(image_outputs, model.to(runtime.device)))
            keep(out / SAMPLES, examples or sample_images(
                source, task, task.mistakes(metrics), model, runtime.device
            ))  # fmt: skip
    if accuracy := task.mistakes(metrics):
        with warn_on_error("mistakes.json", say):
            keep(out / "mistakes.json", mistakes(source, accuracy, model, runtime.device, say))
        with warn_on_error(PREDICTIONS, say):
            write_predictions(out, source, accuracy)
        with warn_on_error(MISTAKES, say):
            write_mistakes(out / MISTAKES, source, accuracy)
    with warn_on_error("report.html", say):
        write_run_page(out)


def listed(gathered: Sequence[Unusable]) -> dict[str, Any]:
    """The number of unusable files of each split, and some of their names."""
    joined: dict[str, dict[str, str]] = {}
    for unusable in gathered:
        for split, files in unusable.items():
            joined.setdefault(split, {}).update(files)
    return {
        split: {"count": len(files), "files": dict(sorted(files.items())[:FILES])}
        for split, files in joined.items()
    }


def mistakes(source: Source, accuracy: Accuracy, model: Model, device: str, say: Say) -> dict[str, Any]:
    """The most confident mistakes, the confusions, the calibration and the least confident correct images."""
    ordered = wrong_rows(accuracy)
    worst = ordered[:KEPT]
    rising = accuracy.confidence.argsort(stable=True)
    least = rising[accuracy.correct[rising]][:LEAST].tolist()
    examples = mistake_pictures(source, accuracy, [*worst, *least], model, device, say)
    return {
        "images": accuracy.images, "wrong": len(ordered), "pairs": pairs(accuracy, source.classes),
        "calibration": bins(accuracy.confidence, accuracy.correct),
        "worst": [examples[row] for row in worst if row in examples],
        "least_correct": [examples[row] for row in least if row in examples],
    }  # fmt: skip


def wrong_rows(accuracy: Accuracy) -> list[int]:
    """The rows that are wrong, the most confident first."""
    wrong = torch.nonzero(~accuracy.correct)[:, 0]
    return wrong[accuracy.confidence[wrong].argsort(descending=True, stable=True)].tolist()


def write_mistakes(path: Path, source: Source, accuracy: Accuracy) -> None:
    """Write mistakes.csv: every mistake as a row."""

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("file", "truth", "said", "confidence"))
            for row in wrong_rows(accuracy):
                names = (source.keys[int(accuracy.index[row])], source.classes[int(accuracy.truth[row])],
                         source.classes[int(accuracy.predicted[row])])  # fmt: skip
                rows.writerow([*map(csv_cell, names), f"{float(accuracy.confidence[row]):.6f}"])

    replace_file(path, write)


def mistake_pictures(
    source: Source, accuracy: Accuracy, rows: Sequence[int], model: Model, device: str, say: Say
) -> dict[int, dict[str, Any]]:
    """For each row the true and the predicted class, a thumbnail, and one overlaid with attention."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    images: dict[int, Tensor] = {}
    for row in rows:
        try:
            images[row] = apply(source.fetch(int(accuracy.index[row])), view, np.random.default_rng(0))
        except BadImage:  # removed since the test
            continue
    if isinstance(model, ViT):  # attention maps cover only whole patches
        images = {row: in_patches(image, model.config.stride) for row, image in images.items()}
    maps: Sequence[np.ndarray | None] = [None] * len(images)
    if images and isinstance(model, ViT) and model.config.depth:
        with warn_on_error("attention over the mistakes", say):
            maps = rollout_maps(model.to(device), torch.stack([*images.values()]))
    classes, examples = source.classes, {}
    for (row, image), heat in zip(images.items(), maps, strict=True):
        small = resized(image.permute(1, 2, 0).numpy())
        examples[row] = {
            "key": str(source.keys[int(accuracy.index[row])]), "confidence": float(accuracy.confidence[row]),
            "truth": classes[int(accuracy.truth[row])], "said": classes[int(accuracy.predicted[row])],
            "image": jpeg(small),
            "overlay": None if heat is None else jpeg(overlay(small, heat)),
        }  # fmt: skip
    return examples


def rollout_maps(model: ViT, images: Tensor) -> list[np.ndarray]:
    """Attention rollout, (h, w) for each of the uint8 images (B, 3, H, W)."""
    inputs = normalise(images, model.preprocessing.mean, model.preprocessing.std)
    return list(attention_rollout(model, inputs, batch=4))


def pairs(accuracy: Accuracy, classes: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """The most frequent confusions: (true class, predicted class, times, images of the true class)."""
    wrong = ~accuracy.correct
    confusions = torch.stack([accuracy.truth[wrong], accuracy.predicted[wrong]])
    kinds, times = confusions.unique(dim=1, return_counts=True)
    counts = accuracy.truth.bincount(minlength=accuracy.data_classes)
    order = times.argsort(descending=True, stable=True)[:PAIRS].tolist()
    both = [(int(kinds[0, i]), int(kinds[1, i]), int(times[i])) for i in order]
    return [(classes[truth], classes[predicted], n, int(counts[truth])) for truth, predicted, n in both]


def bins(confidence: Tensor, right: Tensor) -> list[tuple[float, float, int]]:
    """(mean confidence, accuracy, images) in bins of equal width, without empty ones."""
    numbers = (confidence * BINS).ceil().long().clamp(1, BINS)
    masks = [numbers == number for number in range(1, BINS + 1)]
    return [
        (float(confidence[mask].mean()), float(right[mask].double().mean()), int(mask.sum()))
        for mask in masks if mask.any()
    ]  # fmt: skip


PICTURE = "training-batch.jpg"
IMAGES_SHOWN, ACROSS = 12, 4  # images of the contact sheet, and of one of its rows
Labels = Sequence[tuple[str, float]]  # with their weights
LABELS = 3  # that are shown for one image
LINE = 20  # pixels of a line of text in the contact sheet


def keep_batch(
    out: Path, recipe: Recipe, source: Source, order: Order, task: Task, model: Model, say: Say
) -> None:
    """Write the first training batch as the model sees it into the run folder, without affecting training."""
    if (out / BATCH).exists():
        return
    with warn_on_error(BATCH, say):
        images, labels = first_images(recipe, source, order, partial(task.visible, model, order, 0))
        named = [label_shares(row, source.classes) if task.classifies else [] for row in labels]
        small = [resized(image.permute(1, 2, 0).numpy()) for image in images]
        sheet = contact_sheet([Image.fromarray(pixels) for pixels in small], named)
        replace_file(out / PICTURE, lambda beside: sheet.save(beside, "JPEG", quality=88))
        pictures = [{"image": jpeg(pixels), "labels": row} for pixels, row in zip(small, named, strict=True)]
        shown = {"step": 0, "of": recipe.batch, "how": augmentation_text(recipe), "images": pictures}
        keep(out / BATCH, shown | ({"legend": legend(source.classes)} if task.targets else {}))


def first_images(
    recipe: Recipe, source: Source, order: Order, visible: Callable[[Batch], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """uint8 images (B, 3, H, W) and soft labels (B, C) of the first step, before normalization.

    Every random choice is a function of seed, step and place, so these are the images of the first step.
    visible: what the task lets the model see of a batch.
    """
    mine = range(min(IMAGES_SHOWN, recipe.batch))
    places = list(mine)
    if mixes(recipe) and len(places) < recipe.batch:
        places.insert(0, recipe.batch - 1)  # mixed with the first one
    view = training_view(recipe)
    target_view = recipe.task.target_view(view, source)
    loader = Samples(source, view, order, target_view=target_view)
    samples, _ = loader.load([(0, place) for place in places])
    targets = one_hot(samples["label"], len(source.classes))
    batch: Batch = samples | {"image": samples["image"].float(), "label": targets}
    if mixes(recipe):
        batch = mix_batch(batch, samples["place"].tolist(), recipe, order.rng(0, -1), mine)
    batch["image"] = batch["image"].round().clamp(0, 255).to(torch.uint8)
    return visible(batch) if visible else batch["image"], batch["label"]


def label_shares(row: Tensor, classes: Sequence[str]) -> list[tuple[str, float]]:
    """The labels of one image with their weights, the largest first."""
    best = row.argsort(descending=True, stable=True)[:LABELS].tolist()
    return [(classes[i], round(float(row[i]), 4)) for i in best if row[i] >= 0.005]


def augmentation_text(recipe: Recipe) -> str:
    """A description of the augmentation."""
    used = {
        "random crops": recipe.crop in ("inception", "resized", "random", "squash-random"),
        "random horizontal flips": recipe.flip,
        "3-Augment": recipe.three_augment,
        "colour jitter": bool(recipe.color_jitter),
        "RandAugment": bool(recipe.randaugment),
        "random erasing": bool(recipe.erasing),
        f"{mixing_text(recipe)} of two images, with their weights": mixes(recipe),
        recipe.task.batch_note: bool(recipe.task.batch_note),
    }
    return ", ".join(text for text, applies in used.items() if applies) or "whole images"


def contact_sheet(pictures: Sequence[Image.Image], labels: Sequence[Labels]) -> Image.Image:
    """All images in a grid, each with its labels below."""
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
