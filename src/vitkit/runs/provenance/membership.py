"""How a run used each image of a data set, by content: trained on, validated on, tested on, or new."""

# N images of the data

from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np

from vitkit.data.content import SIZE
from vitkit.data.sources.source import Source
from vitkit.data.splits import fingerprints, join, same_classes
from vitkit.errors import Error
from vitkit.recipes.recipe import read_recipe
from vitkit.runs.build import open_splits
from vitkit.runs.provenance.changes import counted
from vitkit.runs.provenance.fingerprint import FILE, is_same, read, summary
from vitkit.weights.locate import RECIPE

NEW = "new"
SPLITS = ("train", "val", "test")
USES = {  # how a run used images, as a phrase after their number
    "train": "used for training", "val": "used for validation", "test": "kept for testing",
    NEW: "new to the model",
}  # fmt: skip
Splits = Mapping[str, Source]


@dataclass(frozen=True)
class Chosen:
    """The images that an evaluation counts, and how the run used them and the others."""

    whole: Source  # all images to choose from
    numbers: np.ndarray  # indices of those that count
    split: str
    uses: np.ndarray | None = None  # of each image of the whole, as in USES; None: unknown
    left_out: dict[str, int] = field(default_factory=dict)  # images by use
    matched_by: str | None = None  # "content", "data" (the same names, labels and sizes), None: not checked
    warning: str = ""

    @property
    def source(self) -> Source:
        all_chosen = len(self.numbers) == len(self.whole)
        return self.whole if all_chosen else self.whole.take(self.numbers)


def run_folder(place: str) -> Path | None:
    """The run folder of a model; for the folder of a protocol that of its first seed."""
    path = Path(place)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    folders = (folder, *sorted(folder.glob("seed-*"))) if folder else ()
    return next((path for path in folders if (path / RECIPE).exists()), None)


def choose_images(place: str, data: str, opened: Splits, split: str | None) -> Chosen:
    """The images of a split as the model's run has it, by default those that are valid for a test.

    An image of the run is in the run's split; a new one in the split of the data, or in test where the data
    has no splits. split: train, val, test or all, which is every image of the data.
    """
    if split not in (None, "all", *SPLITS, *opened):
        raise Error(
            f"--split {split!r}: {data} has no such split; give {', '.join(SPLITS)} or all",
            code="data.not-found",
        )
    folder = run_folder(place)
    if folder and (known := remembered(folder)):
        name = split or "test"
        if name in opened and len(opened) > 1:  # the other splits need not be read
            chosen = pick(*by_content({name: opened[name]}, known), split)
            if len(chosen.numbers):
                return chosen
        return refuse_empty(pick(*by_content(opened, known), split), place, data)
    if folder and (own := same_data(folder, data)):
        uses = np.concatenate([np.full(len(part), name) for name, part in own.items()])
        chosen = pick(together(own), uses, np.full(len(uses), "all"), split)
        return refuse_empty(replace(chosen, matched_by="data"), place, data)
    warning = ""
    if folder:
        warning = (
            f"{folder}: its {FILE} has no content hashes (older versions and very large data have none): "
            f"images of {data} that the model was trained on may be counted"
        )
    name = split or next((s for s in ("test", "val", "all", "train") if s in opened), "all")
    if name not in opened and name != "all":
        raise Error(f"{data} has no split {name!r}, only {', '.join(opened)}", code="data.not-found")
    whole = opened[name] if name in opened else together(opened)
    return Chosen(whole, np.arange(len(whole)), name, warning=warning)


def remembered(folder: Path) -> dict[str, np.ndarray]:
    """The content hashes of a run's images by split, also of its earlier data; empty: unknown."""
    parts: dict[str, list[np.ndarray]] = {}
    for path in (folder / FILE, *sorted(folder.glob("data-*.json.gz"))):
        for name, row in (read(path, 2) or [{}, {}])[1].items():
            with suppress(ValueError, TypeError):  # a row without hashes, or truncated
                raw = b64decode(row.get("marks") or "")
                parts.setdefault(name, []).append(np.frombuffer(raw, f"S{SIZE}"))
    hashes = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return hashes if len(hashes.get("train", ())) else {}


def by_content(opened: Splits, known: Mapping[str, np.ndarray]) -> tuple[Source, np.ndarray, np.ndarray]:
    """All images, the use of each, and the name of its split in the data."""
    source = together(opened)
    hashes, uses = fingerprints(source), np.full(len(source), NEW, dtype="<U5")
    for name in ("test", "val", "train"):  # train last: an image in several splits counts as trained on
        uses[np.isin(hashes, known.get(name, ()))] = name
    return source, uses, np.concatenate([np.full(len(part), name) for name, part in opened.items()])


def together(splits: Splits) -> Source:
    """All splits as one source, with the classes of all."""
    first, *others = splits.values()
    if not others:
        return first
    names = {name for part in splits.values() for name in part.classes}
    classes = first.classes if names <= set(first.classes) else tuple(sorted(names))
    return reduce(join, (same_classes(part, classes) for part in splits.values()))


def same_data(folder: Path, data: str) -> dict[str, Source] | None:
    """The run's own splits, if the data has the names, labels and sizes that it was trained on."""
    stored = read(folder / FILE, 1)
    try:
        recipe = replace(read_recipe(folder / RECIPE), data=data)
        if not stored or recipe.against:
            return None
        splits = open_splits(recipe)
        return splits if is_same(stored[0], summary(splits)) else None
    except (ValueError, LookupError, AttributeError, OSError):  # data of another kind
        return None


def pick(source: Source, uses: np.ndarray, own: np.ndarray, split: str | None) -> Chosen:
    """The images of a split; by default the test images, else new images of any split of the data."""
    new = uses == NEW
    effective = np.where(new, np.where(own == "all", "test", own), uses)
    if split == "all":
        chosen, name = np.ones(len(uses), bool), "all"
    elif split:
        chosen, name = effective == split, split
    else:
        name = next((s for s in SPLITS[::-1] if ((effective == s) & (new | (uses == "test"))).any()), "test")
        chosen = (effective == name) & (new | (uses == "test"))
    left_out = by_use(uses[~chosen & np.isin(own, ("all", name)) & ~new])
    return Chosen(source, np.flatnonzero(chosen), name, uses, left_out, "content")


def by_use(uses: np.ndarray) -> dict[str, int]:
    """The number of images of each use, without zeros."""
    counts = Counter(uses.tolist())
    return {use: counts[use] for use in USES if counts[use]}


def use_words(images: Mapping[str, int]) -> str:
    """For example: 100 images used for training, 10 images kept for testing."""
    return ", ".join(f"{counted(count, 'image')} {USES[use]}" for use, count in images.items())


def refuse_empty(chosen: Chosen, place: str, data: str) -> Chosen:
    if len(chosen.numbers):
        return chosen
    left_out = chosen.left_out or by_use(chosen.uses if chosen.uses is not None else np.empty(0))
    raise Error(
        f"{data}: no image is left for --split {chosen.split} of {place}: {use_words(left_out)}; "
        "--split all counts them all",
        code="data.empty",
    )
