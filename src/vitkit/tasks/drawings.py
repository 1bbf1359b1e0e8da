"""The arrays of an inspection as figures in a folder, and all of them on one sheet."""

from collections.abc import Iterator
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
ATTENTION = 0.95  # quantile of attention maps that is drawn as the greatest: often a few patches take most


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
    """Fig. 6 and its relatives: the images beside their maps."""
    if "images" not in arrays:
        return
    images = arrays["images"]
    size = images[0].shape[:2]
    names = [Path(row["image"]).name for row in facts["shown"]]
    if "rollout" in arrays:
        maps = zip(images, arrays["rollout"], strict=True)
        pairs = [(image, masked(image, heat, quantile=ATTENTION)) for image, heat in maps]
        yield "rollout", draw_pictures(pairs, columns=("Input", "Attention"), captions=names)
    if "sheet_rollout" in arrays:
        maps = zip(arrays["sheet_images"], arrays["sheet_rollout"], strict=True)
        pairs = [(image, masked(image, heat, quantile=ATTENTION)) for image, heat in maps]
        yield SHEET, draw_sheet(pairs, title=f"Input and attention, {len(pairs)} images")
    if "class_maps" in arrays:
        yield "class-maps", class_figure(images, arrays["class_maps"], facts, names)
    if "feature_colours" in arrays:
        colours = [in_blocks(values, size) for values in arrays["feature_colours"]]
        pairs = list(zip(images, colours, strict=True))
        yield "features", draw_pictures(pairs, columns=("Input", "Features"), captions=names)
    if "head_maps" in arrays:
        yield "head-maps", head_figure(images, arrays["head_maps"], facts["head_layer"])


def head_figure(images: np.ndarray, maps: np.ndarray, layer: int) -> Any:
    """Each image in a row with the heads of a layer, each head's map stretched for itself."""
    size, count = images[0].shape[:2], maps.shape[1]
    shown = range(min(count, HEADS))
    groups = [
        (image, *(in_blocks(of[head], size, ATTENTION) for head in shown))
        for image, of in zip(images, maps, strict=True)
    ]
    some = f", the first {HEADS} of {count} heads" if count > HEADS else ""
    columns = ("Input", *(f"Head {head}" for head in shown))
    across = 1 if count > 4 else 0
    return draw_pictures(
        groups, columns=columns, title=f"Attention of layer {layer}{some}", side=0.8, across=across
    )


def class_figure(images: np.ndarray, maps: np.ndarray, facts: dict[str, Any], names: list[str]) -> Any:
    """Image and maps. Several classes are named above the maps; one, with its probability, below."""
    groups = [(image, *(overlay(image, heat) for heat in maps[:, i])) for i, image in enumerate(images)]
    if len(maps) > 1:
        columns = ("Input", *(row[0] for row in facts["classes"]))
        return draw_pictures(groups, columns=columns, captions=names)
    rows = zip(facts["classes"][0], facts["shown"], strict=True)
    captions = [chance(label, row["top"]) for label, row in rows]
    return draw_pictures(groups, columns=("Input", "Class map"), captions=captions)


def chance(label: str, top: list[list[Any]]) -> str:
    """A label, with its probability where that is known."""
    return next((f"{label} {probability:.2f}" for name, probability in top if name == label), label)
