"""What each image of a data set was to a run, by content: trained on, validated on, tested on, new."""

# N images of the data

from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    pass

NEW = "new"
SPLITS = ("train", "val", "test")
USES = {  # what a run did with images, in words that follow their number
    "train": "used for training", "val": "used for validation", "test": "kept for testing",
    NEW: "new to the model",
}  # fmt: skip
Splits = Mapping[str, Source]


@dataclass(frozen=True)
class Chosen:
    """The images that an evaluation counts, and what is known of them and of those that it does not."""

    whole: Source  # the images among which was chosen
    numbers: np.ndarray  # those that count
    split: str
    uses: np.ndarray | None = None  # of each of the whole, as in USES; None where nothing is known of them
    left_out: dict[str, int] = field(default_factory=dict)  # images by use
    matched_by: str | None = None  # "content", "data" (the same names, labels and sizes), None: not checked
    warning: str = ""

    @property
    def source(self) -> Source:
        everything = len(self.numbers) == len(self.whole)
        return self.whole if everything else self.whole.take(self.numbers)


def run_folder(place: str) -> Path | None:
    """The run folder that a model belongs to; of a protocol's folder that of its first seed."""
    path = Path(place)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    found = (folder, *sorted(folder.glob("seed-*"))) if folder else ()
    return next((each for each in found if (each / RECIPE).exists()), None)


def choose_images(place: str, data: str, opened: Splits, split: str | None) -> Chosen:
    """The images of a split as the model's run made it, by default those that a test may count.

    An image that the run knows is of the run's split; another of the split that the data itself names, and
    of test where it names none. split: train, val, test or all, which is every image of the data.
    """
    if split not in (None, "all", *SPLITS, *opened):
        raise Error(
            f"--split {split!r}: {data} has no such split; give {', '.join(SPLITS)} or all",
            code="data.not-found",
        )
    folder = run_folder(place)
    if folder and (known := remembered(folder)):
        wanted = split or "test"
        if wanted in opened and len(opened) > 1:  # the others need not be read
            looked = pick(*by_content({wanted: opened[wanted]}, known), split)
            if len(looked.numbers):
                return looked
        return refuse_empty(pick(*by_content(opened, known), split), place, data)
    if folder and (own := same_data(folder, data)):
        uses = np.concatenate([np.full(len(part), name) for name, part in own.items()])
        found = pick(together(own), uses, np.full(len(uses), "all"), split)
        return refuse_empty(replace(found, matched_by="data"), place, data)
    warning = ""
    if folder:
        warning = (
            f"{folder}: its {FILE} does not hold the content of its images (older runs and very large data "
            f"have none): images of {data} that trained the model may be counted"
        )
    name = split or next((s for s in ("test", "val", "all", "train") if s in opened), "all")
    if name not in opened and name != "all":
        raise Error(f"{data} has no split {name!r}, only {', '.join(opened)}", code="data.not-found")
    whole = opened[name] if name in opened else together(opened)
    return Chosen(whole, np.arange(len(whole)), name, warning=warning)


def remembered(folder: Path) -> dict[str, np.ndarray]:
    """The content hashes of a run's images by split, also of data from before it changed; empty: unknown."""
    found: dict[str, list[np.ndarray]] = {}
    for path in (folder / FILE, *sorted(folder.glob("data-*.json.gz"))):
        for name, row in (read(path, 2) or [{}, {}])[1].items():
            with suppress(ValueError, TypeError):  # a row without them, or cut off
                raw = b64decode(row.get("marks") or "")
                found.setdefault(name, []).append(np.frombuffer(raw, f"S{SIZE}"))
    hashes = {name: np.concatenate(parts) for name, parts in found.items()}
    return hashes if len(hashes.get("train", ())) else {}


def by_content(opened: Splits, known: Mapping[str, np.ndarray]) -> tuple[Source, np.ndarray, np.ndarray]:
    """All images, the use of each, and the name of its split in the data."""
    source = together(opened)
    hashes, uses = fingerprints(source), np.full(len(source), NEW, dtype="<U5")
    for name in ("test", "val", "train"):  # an image that is in several counts as trained on
        uses[np.isin(hashes, known.get(name, ()))] = name
    return source, uses, np.concatenate([np.full(len(part), name) for name, part in opened.items()])


def together(splits: Splits) -> Source:
    """The images of all splits, with the classes of all."""
    first, *others = splits.values()
    if not others:
        return first
    names = {name for part in splits.values() for name in part.classes}
    classes = first.classes if names <= set(first.classes) else tuple(sorted(names))
    return reduce(join, (same_classes(part, classes) for part in splits.values()))


def same_data(folder: Path, data: str) -> dict[str, Source] | None:
    """The run's own splits, where the data is by names, labels and sizes what it was trained on."""
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
    """The images of a split; without a name those of test, else new ones of whatever split the data has."""
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
    """How many images there are of each use, without those that there are none of."""
    found = Counter(uses.tolist())
    return {use: found[use] for use in USES if found[use]}


def use_words(images: Mapping[str, int]) -> str:
    """100 images used for training, 10 images kept for testing."""
    return ", ".join(f"{counted(count, 'image')} {USES[use]}" for use, count in images.items())


def refuse_empty(found: Chosen, place: str, data: str) -> Chosen:
    if len(found.numbers):
        return found
    left = found.left_out or by_use(found.uses if found.uses is not None else np.empty(0))
    known = use_words(left)
    raise Error(
        f"{data}: no image is left for --split {found.split} by {place}: {known}; "
        "--split all counts them all",
        code="data.empty",
    )
