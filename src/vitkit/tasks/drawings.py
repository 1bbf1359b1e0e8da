"""The arrays of an inspection as figures in a folder, and all of them on one sheet."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.report.figures import (
    contact_sheet,
    draw_distance,
    draw_filters,
    draw_pictures,
    draw_sheet,
    draw_similarity,
    render,
)
from vitkit.report.overlay import in_blocks, masked, overlay

SHEET = "attention-sheet"
HEADS = 16  # at most so many are drawn of a layer


def draw_all(folder: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> tuple[list[str], bytes]:
    """Write every figure that the arrays allow as PNG and SVG; their names, and the contact sheet.

    A sheet of many attention maps is too large to be on another sheet.
    """
    pictures: dict[str, bytes] = {}
    for name, figure in [*from_inside(arrays, facts), *from_images(arrays, facts)]:
        pictures[name] = render(figure, "png")
        (folder / f"{name}.png").write_bytes(pictures[name])
        (folder / f"{name}.svg").write_bytes(render(figure, "svg"))
    return list(pictures), contact_sheet([picture for name, picture in pictures.items() if name != SHEET])


def from_inside(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fig. 7: filters, positions, distances."""
    yield "filters", draw_filters(arrays["filters"])
    tables = arrays.get("position_similarity", ())
    for table, layer in zip(tables, arrays.get("position_layers", ()), strict=True):
        name, of = ("", "") if len(tables) == 1 else (f"-layer-{layer}", f", layer {layer}")
        yield f"position-similarity{name}", draw_similarity(table, title=f"Position embedding similarity{of}")
    if "attention_distance" in arrays:
        along = "Layer" if facts["attention"] == "full" else "Attention (rows, columns, rows, ...)"
        uniform = facts["attention_distance"]["uniform"]
        yield "attention-distance", draw_distance(arrays["attention_distance"], uniform=uniform, along=along)


def from_images(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fig. 6 and its relatives: each image beside its maps, and once more beside the heads of a layer."""
    if "images" not in arrays:
        return
    names = [Path(row["image"]).name for row in facts["shown"]]
    if {"rollout", "class_maps", "feature_colours"} & arrays.keys():
        yield "maps", map_figure(arrays, facts, names)
    if "sheet_rollout" in arrays:
        maps = zip(arrays["sheet_images"], arrays["sheet_rollout"], strict=True)
        pairs = [(image, masked(image, heat)) for image, heat in maps]
        yield SHEET, draw_sheet(pairs, title=f"Input and attention, {len(pairs)} images")
    if "head_maps" in arrays:
        yield "head-maps", head_figure(arrays["images"], arrays["head_maps"], facts["head_layer"], names)


def map_figure(arrays: dict[str, np.ndarray], facts: dict[str, Any], names: Sequence[str]) -> Any:
    """Image, attention, class maps and features in a row, with the file and what the model says below."""
    images = arrays["images"]
    size = images[0].shape[:2]
    columns, panels = ["Input"], [list(images)]
    if "rollout" in arrays:
        columns.append("Attention")
        panels.append([masked(image, heat) for image, heat in zip(images, arrays["rollout"], strict=True)])
    captions = list(names)
    for row, maps in zip(facts.get("classes", ()), arrays.get("class_maps", ()), strict=True):
        same = len(set(row)) == 1 and len(facts["classes"]) > 1  # a class that was asked for
        columns.append(row[0] if same else "Class map")
        panels.append([overlay(image, heat) for image, heat in zip(images, maps, strict=True)])
        if not same:
            told = zip(names, row, facts["shown"], strict=True)
            captions = [f"{name}: {chance(label, shown['top'])}" for name, label, shown in told]
    if "feature_colours" in arrays:
        columns.append("Features")
        panels.append([in_blocks(values, size) for values in arrays["feature_colours"]])
    return draw_pictures(list(zip(*panels, strict=True)), columns=columns, captions=captions)


def head_figure(images: np.ndarray, maps: np.ndarray, layer: int, names: Sequence[str]) -> Any:
    """Each image in a row with the heads of a layer, each head's map stretched for itself."""
    size, count = images[0].shape[:2], maps.shape[1]
    shown = range(min(count, HEADS))
    groups = [
        (image, *(in_blocks(of[head], size) for head in shown))
        for image, of in zip(images, maps, strict=True)
    ]
    some = f", the first {HEADS} of {count} heads" if count > HEADS else ""
    columns = ("Input", *(f"Head {head}" for head in shown))
    across = 1 if count > 4 else 0
    return draw_pictures(
        groups, columns=columns, captions=names, title=f"Attention of layer {layer}{some}", side=0.8,
        across=across,
    )  # fmt: skip


def chance(label: str, top: list[list[Any]]) -> str:
    """A label, with its probability where that is known."""
    known = (f"{label} {100 * probability:.1f} %" for name, probability in top if name == label)
    return next(known, label)
