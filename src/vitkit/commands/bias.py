"""`vitkit inspect --bias`: accuracy of models on images with permuted patches and on shifted images."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.commands.evaluate import match_classes
from vitkit.commands.shared import Emit
from vitkit.data.loader import BadFiles, evaluation_batches
from vitkit.data.sources.source import Source
from vitkit.datasets.opening import open_data
from vitkit.errors import Error
from vitkit.inference.predict import evaluation_view, load_model, logits, short_names
from vitkit.inspection.embeddings import shifted, shuffled
from vitkit.io.files import replace_file
from vitkit.metrics.intervals import percent, wilson, with_interval
from vitkit.models.variants import Model
from vitkit.models.vit import ViT
from vitkit.report.terminal import Live, print_table, say
from vitkit.runs.provenance.membership import choose_images
from vitkit.tasks.task import task_of

CELLS = (2, 4, 7, 8)  # default grids besides the patch grids of the models, if they divide the image
SHIFTS = (1, 2, 4, 8, 16, 32)
BATCH = 32
Change = Callable[[Tensor, Sequence[int]], Tensor]


def bias(
    places: Sequence[str],
    data: str,
    out: Path | None,
    *,
    images: int = 1000,
    cells: Sequence[int] = (),
    shifts: Sequence[int] = (),
    seed: int = 0,
    device: str = "auto",
    emit: Emit = None,
) -> None:
    """Evaluate several models on the same images with the same permutations and shift directions."""
    if images < 1:
        raise Error(f"--images {images}: expected at least 1")
    models = {place: load_model(place, device) for place in places}
    splits = open_data(data)
    for place in places:  # keep only images that no model was trained on
        held_out = choose_images(place, data, splits, None)
        splits = {held_out.split: held_out.source}
    ((split, source),) = splits.items()
    chosen = evenly_chosen(source, images)
    cells, shifts = cells or fitting_cells(models), shifts or fitting_shifts(models)
    check_supported(models, cells, shifts)
    rows, count = [], 0
    with Live("probing", len(models) * len(chosen), quiet=bool(emit)) as live:
        for place, model in models.items():
            source, _, _ = match_classes(chosen, model, data, "")
            row, count = probe(model, source, changes(cells, shifts, seed), live)
            rows.append({"model": place, "kind": kind_of(model)} | row)
    facts = {"data": data, "split": split, "images": count, "seed": seed, "cells": list(cells),
             "shifts": list(shifts), "models": rows}  # fmt: skip
    folder = out or Path("runs", "inspect", f"bias-{Path(data).stem}")
    write(folder, facts)
    emit(facts | {"folder": str(folder)}) if emit else print_summary(folder, facts)


def evenly_chosen(source: Source, most: int) -> Source:
    """At most `most` images, evenly spaced over the source."""
    count = len(source)
    return source if count <= most else source.take(np.arange(most) * count // most)


def fitting_cells(models: dict[str, Model]) -> tuple[int, ...]:
    """The patch grids of the models and some coarser grids, if they divide the images of every model."""
    own = {
        g
        for m in models.values()
        if isinstance(m, ViT)
        for g in m.config.grid
        if len(set(m.config.grid)) == 1
    }
    sides = [side for m in models.values() for side in m.config.image_size]
    return tuple(sorted(g for g in {*CELLS, *own} if g > 1 and not any(side % g for side in sides)))


def fitting_shifts(models: dict[str, Model]) -> tuple[int, ...]:
    """The default shifts up to a quarter of the smallest image."""
    least = min(side for m in models.values() for side in m.config.image_size)
    return tuple(n for n in SHIFTS if n <= least // 4)


def check_supported(models: dict[str, Model], cells: Sequence[int], shifts: Sequence[int]) -> None:
    """Reject models, cells and shifts that do not fit together before anything is computed."""
    for place, model in models.items():
        task_of(model).check_head(model)
        if model.task != "classify":
            raise Error(
                f"{place}: --bias needs a single-label classifier, not a model for {model.task}",
                code="inspection.unsupported",
            )
        h, w = model.config.image_size
        for g in cells:
            if g < 1 or h % g or w % g:
                raise Error(f"--cells {g}: the input of {place}, {h} x {w} pixels, is not divisible by {g}")
        for n in shifts:
            if not 0 <= n < min(h, w):
                raise Error(
                    f"--shifts {n}: the input of {place} is {h} x {w} pixels; expected less than {min(h, w)}"
                )


def changes(cells: Sequence[int], shifts: Sequence[int], seed: int) -> dict[tuple[str, str], Change]:
    """The image transforms by kind and amount; images pass unchanged under ("accuracy", "")."""
    transforms: dict[tuple[str, str], Change] = {("accuracy", ""): lambda images, indices: images}
    transforms |= {("shuffled", str(g)): partial(apply, shuffled, g, seed) for g in cells}
    return transforms | {("shifted", str(n)): partial(apply, shifted, n, seed) for n in shifts}


def apply(
    change: Callable[..., Tensor], amount: int, seed: int, images: Tensor, indices: Sequence[int]
) -> Tensor:
    return change(images, amount, indices, seed)


def probe(
    model: Model, source: Source, transforms: dict[tuple[str, str], Change], live: Live
) -> tuple[dict[str, Any], int]:
    """Accuracy under each transform, and the number of images; each image is decoded once."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    bad = BadFiles(1.0, lambda key, why: print(f"skipped: {key}: {why}", file=sys.stderr))
    correct: dict[tuple[str, str], int] = dict.fromkeys(transforms, 0)
    count = 0
    for batch in evaluation_batches(source, view, BATCH, bad=bad):
        count += len(batch["image"])
        indices = batch["index"].tolist()
        for key, change in transforms.items():
            predicted = logits(model, change(batch["image"], indices)).argmax(1)
            correct[key] += int((predicted == batch["label"]).sum())
        live.more(len(indices))
    if not count:
        raise Error(f"{source.name}: no image can be read", code="image.unreadable")
    row: dict[str, Any] = {"shuffled": {}, "shifted": {}}
    for (kind, amount), number in correct.items():
        if amount:
            row[kind][amount] = number / count
        else:
            row |= {"accuracy": number / count, "interval": list(wilson(number / count, count))}
    return row, count


def kind_of(model: Model) -> str:
    if not isinstance(model, ViT):
        return "ResNet"
    return "hybrid" if model.config.stem else "ViT"


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Write bias.json and the figure."""
    from vitkit.report.figure_style import render  # matplotlib is slow to import
    from vitkit.report.figures import Panel, draw_panels

    names = short_names(row["model"] for row in facts["models"])

    def lines(kind: str, unchanged: float) -> dict[str, list[tuple[float, float]]]:
        by_model = {}
        for row in facts["models"]:
            points = [(unchanged, row["accuracy"]), *((float(n), share) for n, share in row[kind].items())]
            by_model[f"{names[row['model']]} ({row['kind']})"] = points
        return by_model

    panels = [
        Panel("Patches permuted", "Cells per side", "Accuracy", lines("shuffled", 1)),
        Panel("Image shifted", "Pixels", "Accuracy", lines("shifted", 0)),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw_panels(panels, top=1.0)
    for kind in ("png", "svg"):
        (folder / f"bias.{kind}").write_bytes(render(figure, kind))
    text = json.dumps(facts, indent=2) + "\n"
    replace_file(folder / "bias.json", lambda path: path.write_text(text, encoding="utf-8"))


def print_summary(folder: Path, facts: dict[str, Any]) -> None:
    rows, images = [], facts["images"]
    for row in facts["models"]:
        shares = {"unchanged": row["accuracy"]} | {f"{n}x{n}": share for n, share in row["shuffled"].items()}
        shares |= {f"{n} px": share for n, share in row["shifted"].items()}
        cells = {name: percent(share, images).removesuffix(" %") for name, share in shares.items()}
        rows.append({"model": row["model"], "kind": row["kind"]} | cells)
    print_table(rows, title="accuracy in % with permuted cells (NxN) or a shifted image (N px)")
    first = facts["models"][0]
    say(f"{images} images of {facts['data']} ({facts['split']}); {first['model']} on unchanged images: "
        f"{with_interval(first['accuracy'], images)}")  # fmt: skip
    say(f"wrote bias.json and the figure bias.png to {folder}")
