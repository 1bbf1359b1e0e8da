"""`vitkit inspect`: arrays, figures and facts about a model's filters, positions and attention."""

# B images, L layers, K heads, N patches; H, W pixels; h, w grid of patches

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.commands.look import label_of, model_view, normalized, top_predictions, upright
from vitkit.commands.shared import Emit
from vitkit.data.decode import BadImage, read
from vitkit.data.names import SUFFIXES
from vitkit.data.sources.source import walk
from vitkit.datasets.opening import is_data_file, open_data
from vitkit.errors import Error
from vitkit.inference.predict import find_images, load_model
from vitkit.inspection.attention import attention_distance, attention_rollout
from vitkit.inspection.embeddings import embedding_filters, position_similarity
from vitkit.inspection.gather import (
    Gathered,
    batch_for,
    check_layer,
    distance_facts,
    gather,
    similarity_facts,
    uniform_distance,
)
from vitkit.inspection.subject import (
    attention_count,
    check_class_maps,
    class_number,
    note_dense,
    transformer,
)
from vitkit.io.files import replace_file
from vitkit.models.vit import ViT, covered, dropped, grid_of
from vitkit.options import parse_size
from vitkit.report.figure_style import render
from vitkit.report.figures import (
    Figure,
    contact_sheet,
    draw_distance,
    draw_filters,
    draw_pictures,
    draw_sheet,
    draw_similarity,
)
from vitkit.report.overlay import in_blocks, masked, overlay
from vitkit.report.terminal import Live, printable, say, warn

ON_SHEET = "attention-sheet"
HEADS = 16  # maximum number of heads drawn per layer


def draw_all(folder: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> tuple[list[str], bytes]:
    """Write all possible figures as PNG and SVG; returns their names and the contact sheet.

    The sheet of many attention maps is too large for the contact sheet.
    """
    pictures: dict[str, bytes] = {}
    for name, figure in [*model_figures(arrays, facts), *image_figures(arrays, facts)]:
        pictures[name] = render(figure, "png")
        (folder / f"{name}.png").write_bytes(pictures[name])
        (folder / f"{name}.svg").write_bytes(render(figure, "svg"))
    return list(pictures), contact_sheet([picture for name, picture in pictures.items() if name != ON_SHEET])


@dataclass(frozen=True, eq=False)
class Inspection:
    """What `vitkit inspect` writes: arrays by name, facts and figures; it shows itself in a notebook."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]  # skipped: array -> why the model does not have it

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name: filters, position-similarity, attention-distance, maps ..."""
        return dict([*model_figures(self.arrays, self.facts), *image_figures(self.arrays, self.facts)])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the figures, the arrays and the facts into a folder."""
        write(Path(folder), self.arrays, self.facts)

    def __repr__(self) -> str:
        return f"Inspection(arrays: {', '.join(self.arrays)}; figures: {', '.join(self.figures)})"

    def _repr_png_(self) -> bytes:
        return contact_sheet([render(figure, "png") for n, figure in self.figures.items() if n != ON_SHEET])


def model_figures(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fig. 7: filters, position embeddings, attention distances."""
    yield "filters", draw_filters(arrays["filters"])
    tables = arrays.get("position_similarity", ())
    for table, layer in zip(tables, arrays.get("position_layers", ()), strict=True):
        suffix, title = ("", "") if len(tables) == 1 else (f"-layer-{layer}", f", layer {layer}")
        title = f"Position embedding similarity{title}"
        yield f"position-similarity{suffix}", draw_similarity(table, title=title)
    if "attention_distance" in arrays:
        along = "Layer" if facts["attention"] == "full" else "Attention (rows, columns, rows, ...)"
        uniform = facts["attention_distance"]["uniform"]
        yield "attention-distance", draw_distance(arrays["attention_distance"], uniform=uniform, along=along)


def image_figures(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fig. 6 and similar: each image next to its maps, and next to the attention heads of a layer."""
    if "images" not in arrays:
        return
    names = [Path(row["image"]).name for row in facts["shown"]]
    if {"rollout", "class_maps", "feature_colours"} & arrays.keys():
        yield "maps", map_figure(arrays, facts, names)
    if "sheet_rollout" in arrays:
        maps = zip(arrays["sheet_images"], arrays["sheet_rollout"], strict=True)
        pairs = [(image, masked(image, heat)) for image, heat in maps]
        yield ON_SHEET, draw_sheet(pairs, title=f"Input and attention, {len(pairs)} images")
    if "head_maps" in arrays:
        yield "head-maps", head_figure(arrays["images"], arrays["head_maps"], facts["head_layer"], names)
    if "register_maps" in arrays:
        layer = facts["head_layer"]
        yield (
            "register-maps",
            head_figure(arrays["images"], arrays["register_maps"], layer, names, "register"),
        )


def map_figure(arrays: dict[str, np.ndarray], facts: dict[str, Any], names: Sequence[str]) -> Any:
    """One row per image: image, attention, class maps and features; captions: file name and prediction."""
    images = arrays["images"]
    size = images[0].shape[:2]
    columns, panels = ["Input"], [list(images)]
    if "rollout" in arrays:
        columns.append("Attention")
        panels.append([masked(image, heat) for image, heat in zip(images, arrays["rollout"], strict=True)])
    captions = list(names)
    for row, maps in zip(facts.get("classes", ()), arrays.get("class_maps", ()), strict=True):
        same = len(set(row)) == 1 and len(facts["classes"]) > 1  # a class of --class, the same for all images
        columns.append(row[0] if same else "Class map")
        panels.append([overlay(image, heat) for image, heat in zip(images, maps, strict=True)])
        if not same:
            predictions = zip(names, row, facts["shown"], strict=True)
            captions = [f"{name}: {with_probability(label, p['top'])}" for name, label, p in predictions]
    if "feature_colours" in arrays:
        columns.append("Features")
        panels.append([in_blocks(values, size) for values in arrays["feature_colours"]])
    return draw_pictures(list(zip(*panels, strict=True)), columns=columns, captions=captions)


def head_figure(
    images: np.ndarray, maps: np.ndarray, layer: int, names: Sequence[str], part: str = "head"
) -> Any:
    """One row per image: the image and one map per attention head or register, each scaled separately."""
    size, count = images[0].shape[:2], maps.shape[1]
    heads = range(min(count, HEADS))
    groups = [
        (image, *(in_blocks(by_head[head], size) for head in heads))
        for image, by_head in zip(images, maps, strict=True)
    ]
    note = f", the first {HEADS} of {count} {part}s" if count > HEADS else ""
    columns = ("Input", *(f"{part.capitalize()} {head}" for head in heads))
    across = 1 if count > 4 else 0
    return draw_pictures(
        groups, columns=columns, captions=names, title=f"Attention of layer {layer}{note}", side=0.8,
        across=across,
    )  # fmt: skip


def with_probability(label: str, top: list[list[Any]]) -> str:
    """A label, with its probability if it is among the top predictions."""
    texts = (f"{label} {100 * probability:.1f} %" for name, probability in top if name == label)
    return next(texts, label)


SHOWN = 8  # images for which all maps are drawn
SHEET = 128  # images on the attention sheet, as in Fig. 14
TILE = 112  # pixels of the longer side of images on the sheet
NEED_IMAGES = {  # results that need images
    "attention_distance": "attention distances",
    "rollout": "attention rollout",
    "head_maps": "attention maps of the heads of a layer",
    "class_maps": "class maps",
    "feature_colours": "similarity of patches",
}


@dataclass(frozen=True)
class Pictures:
    """Images by name, which are read on demand."""

    names: Sequence[str]
    fetch: Callable[[int], bytes | np.ndarray]


def inspect(
    place: str,
    places: tuple[str, ...],
    out: Path | None,
    *,
    image_size: str = "",
    layer: int = -1,
    classes: tuple[str, ...] = (),
    images: int = 128,
    device: str = "auto",
    strict_size: bool = False,
    emit: Emit = None,
) -> bool:
    """Write the inspection of a model into the folder `out`; returns whether every image could be read."""
    model = transformer(whole := load_model(place, device))
    check_class_maps(whole, classes)
    size = parse_size(image_size or None) or model.config.image_size
    if note := dropped(model.config, size, strict=strict_size):
        warn(note)
    check_layer(model, layer)
    if images < 1:
        raise Error(f"--images {images}: expected at least 1")
    targets = [class_number(model, name) for name in classes]
    pictures = evenly_chosen(find_pictures(places), images) if places else None
    result = inspection(model, place, pictures, size, layer, targets, quiet=bool(emit))
    note_dense(whole, result.facts["skipped"])
    folder, facts = out or default_folder(place), result.facts
    result.save(folder)
    emit(facts | {"folder": str(folder)}) if emit else print_summary(folder, facts)
    return not facts.get("unreadable")


def inspection(
    model: ViT, place: str, pictures: Pictures | None, size: tuple[int, int], layer: int, classes: list[int],
    *, quiet: bool,
) -> Inspection:  # fmt: skip
    """The arrays and facts of a model, and of images where there are some."""
    gathered, facts = Gathered(), facts_of(model, place, size)
    inspect_model(model, size, gathered, facts)
    if pictures:
        inspect_images(model, pictures, size, layer, classes, gathered, facts, quiet=quiet)
    else:
        gathered.skipped |= dict.fromkeys(NEED_IMAGES, "needs images")
    return Inspection(gathered.arrays, facts | {"skipped": gathered.skipped})


def facts_of(model: ViT, place: str, size: tuple[int, int]) -> dict[str, Any]:
    c = model.config
    return {
        "model": place,
        "image_size": list(size),
        "covered": list(covered(size, c.stride)),  # the part that whole patches cover, which is drawn
        "grid": list(grid_of(size, c.stride)),
        "patch_pixels": c.stride,
        "layers": c.depth,
        "heads": c.heads,
        "attention": c.attention,
    }


def inspect_model(model: ViT, size: tuple[int, int], gathered: Gathered, facts: dict[str, Any]) -> None:
    """Gather filters and position similarity, which need no images."""
    filters = embedding_filters(model)
    gathered.arrays |= {"filters": filters.tiles, "filters_variance": filters.variance}
    share = [round(float(value), 6) for value in filters.variance]
    facts["filters"] = {"explained_variance": share, "together": round(sum(share), 6)}
    layers = table_layers(model)
    gathered.add(
        "position_similarity",
        lambda: np.stack([position_similarity(model, image_size=size, layer=i) for i in layers]),
    )
    if "position_similarity" in gathered.arrays:
        gathered.arrays["position_layers"] = np.array(layers)
        tables = zip(layers, gathered.arrays["position_similarity"], strict=True)
        facts["position_similarity"] = [{"layer": i} | similarity_facts(table) for i, table in tables]


def table_layers(model: ViT) -> list[int]:
    """Layers with position embeddings to compare: first, middle and last if every layer has its own."""
    last = model.config.depth - 1
    return sorted({0, last // 2, last}) if model.config.injection == "every" and last > 0 else [0]


def inspect_images(
    model: ViT, pictures: Pictures, size: tuple[int, int], layer: int, classes: list[int],
    gathered: Gathered, facts: dict[str, Any], *, quiet: bool,
) -> None:  # fmt: skip
    """Gather attention distances over all images, and maps of a few."""
    unread: dict[str, str] = {}
    good: list[int] = []
    with Live("inspecting", len(pictures.names), quiet=quiet) as live:
        distance = mean_distance(model, views(model, pictures, size, unread, good, live.more))
    if not good:
        name, reason = next(iter(unread.items()))
        raise Error(
            f"none of the {len(unread)} images can be read; the first is {name}: {reason}",
            code="image.unreadable",
        )
    facts |= {"images": len(good), "unreadable": unread}
    if distance is None:
        gathered.skipped["attention_distance"] = "this model has depth 0 and no attention"
    else:
        gathered.arrays["attention_distance"] = distance
        uniform = uniform_distance(model, grid_of(size, model.config.stride))
        facts["attention_distance"] = distance_facts(distance, uniform)
    if len(good) > SHOWN and model.config.depth:
        add_sheet(model, pictures, [good[i] for i in evenly_spaced(len(good), SHEET)], size, gathered, facts)
    drawn = [good[i] for i in evenly_spaced(len(good), SHOWN)]
    images = torch.stack([model_view(model, pictures.fetch(i), size) for i in drawn])
    predictions, best = top_predictions(model, images)
    targets = [[number] * len(drawn) for number in classes] or [best.tolist()]
    maps = gather(model, normalized(model, images), layer=layer, targets=targets)
    gathered.arrays |= {"images": upright(images)} | maps.arrays
    gathered.skipped |= maps.skipped
    if "head_maps" in maps.arrays:
        facts["head_layer"] = layer % attention_count(model)
    if "class_maps" in maps.arrays:
        gathered.arrays["class_numbers"] = np.array(targets)
        facts["classes"] = [[label_of(model, number) for number in row] for row in targets]
    facts["shown"] = [
        {"image": pictures.names[i], "top": [list(pair) for pair in top]}
        for i, top in zip(drawn, predictions, strict=True)
    ]


def add_sheet(
    model: ViT, pictures: Pictures, chosen: list[int], size: tuple[int, int], gathered: Gathered,
    facts: dict[str, Any],
) -> None:  # fmt: skip
    """Gather small images and attention maps of many images; only one batch is in memory at full size."""
    batch, images, maps = batch_for(model, grid_of(size, model.config.stride)), [], []
    small = [max(1, round(side * min(1.0, TILE / max(size)))) for side in size]
    for start in range(0, len(chosen), batch):
        part = chosen[start : start + batch]
        views = torch.stack([model_view(model, pictures.fetch(i), size) for i in part])
        maps.append(attention_rollout(model, normalized(model, views), batch=batch))
        images += [np.asarray(Image.fromarray(view).resize(small[::-1], Image.Resampling.BOX))
                   for view in upright(views)]  # fmt: skip
    gathered.arrays |= {"sheet_images": np.stack(images), "sheet_rollout": np.concatenate(maps)}
    facts["sheet"] = [pictures.names[i] for i in chosen]


def mean_distance(model: ViT, parts: Iterator[Tensor]) -> np.ndarray | None:
    """The mean attention distance over batches of images, one in memory at a time; None at depth 0."""
    total, count = np.zeros(()), 0
    for part in parts:
        count += len(part)
        if model.config.depth:
            total = total + len(part) * attention_distance(model, part, batch=len(part)).astype(np.float64)
    return (total / count).astype(np.float32) if count and model.config.depth else None


def views(
    model: ViT, pictures: Pictures, size: tuple[int, int], unread: dict[str, str], good: list[int],
    advance: Callable[[int], None],
) -> Iterator[Tensor]:  # fmt: skip
    """Batches of normalized images; adds readable indices to `good` and errors to `unread`."""
    batch, part = batch_for(model, grid_of(size, model.config.stride)), []
    for i, name in enumerate(pictures.names):
        try:
            part.append(model_view(model, pictures.fetch(i), size))
            good.append(i)
        except BadImage as error:
            unread[name] = str(error)
            warn(f"skipped: {printable(name)}: {error}")
        if len(part) == batch or (part and i + 1 == len(pictures.names)):
            yield normalized(model, torch.stack(part))
            advance(len(part))
            part = []


def find_pictures(places: tuple[str, ...]) -> Pictures:
    """The images of files, folders and globs, or of one data set, preferably its test split."""
    if len(places) == 1 and is_data(places[0]):
        splits = open_data(places[0])
        source = splits[next((s for s in ("test", "val", "all", "train") if s in splits), next(iter(splits)))]
        return Pictures(source.keys, source.fetch)
    names = find_images(places)
    return Pictures(names, lambda i: read(names[i]))


def is_data(place: str) -> bool:
    """Whether a place is a data set and not a file or folder of images."""
    if place == "digits" or not (path := Path(place)).is_dir():
        return is_data_file(place) or place == "digits"
    return not any(name.lower().endswith(SUFFIXES) for name in walk(path))


def evenly_chosen(pictures: Pictures, most: int) -> Pictures:
    """At most `most` pictures, evenly spaced, since neighbours are often of the same class."""
    chosen = evenly_spaced(len(pictures.names), most)
    return Pictures([pictures.names[i] for i in chosen], lambda i: pictures.fetch(chosen[i]))


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices below `count`.

    >>> evenly_spaced(10, 4), evenly_spaced(2, 4)
    ([0, 2, 5, 7], [0, 1])
    """
    return [i * count // most for i in range(most)] if count > most else list(range(count))


def default_folder(place: str) -> Path:
    """runs/inspect/NAME, by the name of the model's file, folder or published weights."""
    path = Path(place)
    name = (path.name if path.is_dir() else path.stem) if path.exists() else place
    return Path("runs", "inspect", re.sub(r"[^\w.-]+", "-", name or path.resolve().name))


def write(folder: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write arrays, figures, contact sheet and facts; figures of an earlier inspection are deleted."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for old in [*figures.glob("*.png"), *figures.glob("*.svg")]:
        old.unlink()
    names, sheet = draw_all(figures, arrays, facts)
    facts |= {"arrays": {name: list(values.shape) for name, values in arrays.items()}, "figures": names}
    text = json.dumps(facts, indent=2).encode() + b"\n"
    with (folder / "arrays.npz").open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    (folder / "contact-sheet.png").write_bytes(sheet)
    replace_file(folder / "facts.json", lambda path: path.write_bytes(text))


def print_summary(folder: Path, facts: dict[str, Any]) -> None:
    """Print the inspection in a few lines."""
    missing = [text for name, text in NEED_IMAGES.items() if facts["skipped"].get(name) == "needs images"]
    for name, reason in facts["skipped"].items():
        if reason != "needs images":
            say(f"no {name.replace('_', ' ')}: {reason}")
    if missing:
        say(f"add images to see also: {', '.join(missing)}")
    if "attention_distance" in facts:
        distance, (height, width) = facts["attention_distance"]["mean"], facts["image_size"]
        say(
            f"mean attention distance: {distance[0]:.1f} pixels in the first layer, {distance[-1]:.1f} in "
            f"the last ({facts['images']} images of {height} x {width})"
        )
    for row in facts.get("shown", ()):
        if row["top"]:
            say(f"{row['image']}: {', '.join(f'{label} {100 * p:.1f} %' for label, p in row['top'][:3])}")
    say(f"wrote {len(facts['figures'])} figures and their arrays to {folder}; overview: contact-sheet.png")
