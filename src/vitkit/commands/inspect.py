"""vitkit inspect: arrays, figures and facts of what a model looks at, in one folder."""

# B images, L layers, K heads, N patches; H, W pixels; h, w grid of patches

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.commands.look import label_of, ready, said, seen, upright
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
from vitkit.inspection.subject import attention_count, class_number, transformer
from vitkit.io.files import replace_file
from vitkit.models.vit import ViT, covered, dropped, grid_of
from vitkit.options import parse_size
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
from vitkit.report.terminal import Live, printable, say, warn

ON_SHEET = "attention-sheet"
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
    return list(pictures), contact_sheet([picture for name, picture in pictures.items() if name != ON_SHEET])


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
        yield ON_SHEET, draw_sheet(pairs, title=f"Input and attention, {len(pairs)} images")
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


SHOWN = 8  # images of which all maps are drawn
SHEET = 128  # images of which the attention is drawn, as in Fig. 14
TILE = 112  # pixels of their longer side there
WANTED = {  # what images would add
    "attention_distance": "how far each head looks",
    "rollout": "where attention goes in an image",
    "head_maps": "what each head of a layer looks at",
    "class_maps": "which patches speak for a class",
    "feature_colours": "which patches are alike",
}


@dataclass(frozen=True)
class Pictures:
    """Images by name, read when they are asked for."""

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
    """Whether every image could be read; the rest of the answer lies in the folder `out`."""
    model = transformer(load_model(place, device))
    size = parse_size(image_size or None) or model.config.image_size
    if note := dropped(model.config, size, strict=strict_size):
        warn(note)
    check_layer(model, layer)
    if images < 1:
        raise Error(f"--images {images}: give at least 1")
    wanted = [class_number(model, name) for name in classes]
    pictures = find_pictures(places) if places else None
    found, facts = Gathered(), facts_of(model, place, size)
    look_inside(model, size, found, facts)
    if pictures:
        look_at(model, evenly(pictures, images), size, layer, wanted, found, facts, quiet=bool(emit))
    else:
        found.skipped |= dict.fromkeys(WANTED, "needs images")
    folder = out or default_folder(place)
    facts |= {"skipped": found.skipped}
    write(folder, found.arrays, facts)
    emit(facts | {"folder": str(folder)}) if emit else tell(folder, facts)
    return not facts.get("unreadable")


def facts_of(model: ViT, place: str, size: tuple[int, int]) -> dict[str, Any]:
    c = model.config
    return {
        "model": place,
        "image_size": list(size),
        "covered": list(covered(size, c.stride)),  # by whole patches; what is drawn
        "grid": list(grid_of(size, c.stride)),
        "patch_pixels": c.stride,
        "layers": c.depth,
        "heads": c.heads,
        "attention": c.attention,
    }


def look_inside(model: ViT, size: tuple[int, int], found: Gathered, facts: dict[str, Any]) -> None:
    """What needs no image: filters and positions."""
    filters = embedding_filters(model)
    found.arrays |= {"filters": filters.tiles, "filters_variance": filters.variance}
    share = [round(float(value), 6) for value in filters.variance]
    facts["filters"] = {"explained_variance": share, "together": round(sum(share), 6)}
    layers = table_layers(model)
    found.add(
        "position_similarity",
        lambda: np.stack([position_similarity(model, image_size=size, layer=i) for i in layers]),
    )
    if "position_similarity" in found.arrays:
        found.arrays["position_layers"] = np.array(layers)
        tables = zip(layers, found.arrays["position_similarity"], strict=True)
        facts["position_similarity"] = [{"layer": i} | similarity_facts(table) for i, table in tables]


def table_layers(model: ViT) -> list[int]:
    """Layers whose position tables are compared: the first, a middle one, the last, if each has its own."""
    last = model.config.depth - 1
    return sorted({0, last // 2, last}) if model.config.injection == "every" and last > 0 else [0]


def look_at(
    model: ViT, pictures: Pictures, size: tuple[int, int], layer: int, wanted: list[int], found: Gathered,
    facts: dict[str, Any], *, quiet: bool,
) -> None:  # fmt: skip
    """What needs images: distances over all of them, maps of some."""
    unread: dict[str, str] = {}
    good: list[int] = []
    with Live("looking", len(pictures.names), quiet=quiet) as live:
        distance = mean_distance(model, views(model, pictures, size, unread, good, live.more))
    if not good:
        first = next(f"{name}: {why}" for name, why in unread.items())
        raise Error(
            f"none of the {len(unread)} images can be read; the first, {first}", code="image.unreadable"
        )
    facts |= {"images": len(good), "unreadable": unread}
    if distance is None:
        found.skipped["attention_distance"] = "this model has depth 0: there is no attention in it"
    else:
        found.arrays["attention_distance"] = distance
        uniform = uniform_distance(model, grid_of(size, model.config.stride))
        facts["attention_distance"] = distance_facts(distance, uniform)
    if len(good) > SHOWN and model.config.depth:
        add_sheet(model, pictures, [good[i] for i in spread(len(good), SHEET)], size, found, facts)
    some = [good[i] for i in spread(len(good), SHOWN)]
    shown = torch.stack([seen(model, pictures.fetch(i), size) for i in some])
    predictions, best = said(model, shown)
    targets = [[number] * len(some) for number in wanted] or [best.tolist()]
    maps = gather(model, ready(model, shown), layer=layer, targets=targets)
    found.arrays |= {"images": upright(shown)} | maps.arrays
    found.skipped |= maps.skipped
    if "head_maps" in maps.arrays:
        facts["head_layer"] = layer % attention_count(model)
    if "class_maps" in maps.arrays:
        found.arrays["class_numbers"] = np.array(targets)
        facts["classes"] = [[label_of(model, number) for number in row] for row in targets]
    facts["shown"] = [
        {"image": pictures.names[i], "top": [list(pair) for pair in top]}
        for i, top in zip(some, predictions, strict=True)
    ]


def add_sheet(
    model: ViT, pictures: Pictures, chosen: list[int], size: tuple[int, int], found: Gathered,
    facts: dict[str, Any],
) -> None:  # fmt: skip
    """The attention of many images beside them, small; a few at a time are in memory in full."""
    batch, images, maps = batch_for(model, grid_of(size, model.config.stride)), [], []
    small = [max(1, round(side * min(1.0, TILE / max(size)))) for side in size]
    for at in range(0, len(chosen), batch):
        views = torch.stack([seen(model, pictures.fetch(i), size) for i in chosen[at : at + batch]])
        maps.append(attention_rollout(model, ready(model, views), batch=batch))
        images += [np.asarray(Image.fromarray(view).resize(small[::-1], Image.Resampling.BOX))
                   for view in upright(views)]  # fmt: skip
    found.arrays |= {"sheet_images": np.stack(images), "sheet_rollout": np.concatenate(maps)}
    facts["sheet"] = [pictures.names[i] for i in chosen]


def mean_distance(model: ViT, parts: Iterator[Tensor]) -> np.ndarray | None:
    """The mean attention distance over parts of any number of images, one part in memory; None at depth 0."""
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
    """Normalised images, a few at a time; which could be read, and why others could not, is noted."""
    batch, part = batch_for(model, grid_of(size, model.config.stride)), []
    for i, name in enumerate(pictures.names):
        try:
            part.append(seen(model, pictures.fetch(i), size))
            good.append(i)
        except BadImage as error:
            unread[name] = str(error)
            warn(f"not read: {printable(name)}: {error}")
        if len(part) == batch or (part and i + 1 == len(pictures.names)):
            yield ready(model, torch.stack(part))
            advance(len(part))
            part = []


def find_pictures(places: tuple[str, ...]) -> Pictures:
    """Image files, folders and globs; or one data set, of which the held-out split is taken."""
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


def evenly(pictures: Pictures, most: int) -> Pictures:
    """At most so many of the pictures, from all over them, since neighbours are often of one class."""
    chosen = spread(len(pictures.names), most)
    return Pictures([pictures.names[i] for i in chosen], lambda i: pictures.fetch(chosen[i]))


def spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below count, equally far apart.

    >>> spread(10, 4), spread(2, 4)
    ([0, 2, 5, 7], [0, 1])
    """
    return [i * count // most for i in range(most)] if count > most else list(range(count))


def default_folder(place: str) -> Path:
    """runs/inspect/NAME, with the name of the model's file, folder or publication."""
    path = Path(place)
    name = (path.name if path.is_dir() else path.stem) if path.exists() else place
    return Path("runs", "inspect", re.sub(r"[^\w.-]+", "-", name or path.resolve().name))


def write(folder: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """The whole folder: arrays, figures, contact sheet, facts. Figures of an earlier inspection go."""
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
    replace_file(folder / "facts.json", lambda beside: beside.write_bytes(text))


def tell(folder: Path, facts: dict[str, Any]) -> None:
    """The inspection in a few lines."""
    needs = [what for name, what in WANTED.items() if facts["skipped"].get(name) == "needs images"]
    for name, why in facts["skipped"].items():
        if why != "needs images":
            say(f"no {name.replace('_', ' ')}: {why}")
    if needs:
        say(f"with images it would also show {', '.join(needs[:-1])} and {needs[-1]}")
    if "attention_distance" in facts:
        reach = facts["attention_distance"]["mean"]
        say(
            f"attention reaches {reach[0]:.1f} pixels on average in the first layer, {reach[-1]:.1f} in the "
            f"last ({facts['images']} images of {facts['image_size'][0]} x {facts['image_size'][1]})"
        )
    for row in facts.get("shown", ()):
        if row["top"]:
            say(f"{row['image']}: {', '.join(f'{label} {100 * p:.1f} %' for label, p in row['top'][:3])}")
    say(f"{len(facts['figures'])} figures and their arrays in {folder}; at a glance: contact-sheet.png")
