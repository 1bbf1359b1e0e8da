"""The data's classes in terms of the model's: ImageNet's by any of their names, others by a table."""

# F classes of the data, C of the model

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files

import torch
from torch import Tensor

from vitkit.errors import Error

BETWEEN = ";"  # several of the model's classes in one cell
Synsets = Sequence[tuple[str, str]]  # (WordNet number, names) of ImageNet's classes in their official order


def normalized_name(name: str) -> str:
    """As people write a name in a path: case and underscores do not matter."""
    return " ".join(name.replace("_", " ").split()).lower()


def places_of_names(synsets: Synsets) -> dict[str, int]:
    """By all of a class's names, or by one of them; a name that several classes share is none's."""
    wholes = Counter(normalized_name(names) for _, names in synsets)
    singles = Counter(normalized_name(one) for _, names in synsets for one in names.split(", "))
    found: dict[str, int] = {}
    for place, (number, names) in enumerate(synsets):
        for one in names.split(", "):
            if singles[normalized_name(one)] == 1 and normalized_name(one) not in wholes:
                found[normalized_name(one)] = place
        if wholes[normalized_name(names)] == 1:
            found[normalized_name(names)] = place
        found[normalized_name(f"{names} ({number})")] = place
    return found


def imagenet_places(names: Sequence[str], synsets: Synsets) -> list[int] | None:
    """The official class number of each name, if all are of one kind; None if they are not ImageNet's.

    Kinds: WordNet numbers (n01440764), names (tench), and class numbers (0 to 999), the last only if all of
    them are there: a few numbers may mean anything.
    """
    numbers = {number: place for place, (number, _) in enumerate(synsets)}
    if all(name in numbers for name in names):
        return [numbers[name] for name in names]
    if all(name.isascii() and name.isdigit() for name in names):
        places = [int(name) for name in names]
        return places if sorted(places) == list(range(len(synsets))) else None
    by_name = places_of_names(synsets)
    found = [by_name.get(normalized_name(name)) for name in names]
    return None if None in found else [place for place in found if place is not None]


def official_order(labels: Sequence[str], synsets: Synsets) -> list[int] | None:
    """Of each of a model's classes its official number, if they are ImageNet's, all of them; else None."""
    places = imagenet_places(labels, synsets) if len(labels) == len(synsets) else None
    return places if places and len(set(places)) == len(synsets) else None


def translated(classes: Sequence[str], labels: Sequence[str], synsets: Synsets) -> list[int] | None:
    """Of each of the data's classes the model's, where both are ImageNet's by whatever kind of name."""
    order, places = official_order(labels, synsets), imagenet_places(classes, synsets)
    if order is None or places is None:
        return None
    at = {official: ours for ours, official in enumerate(order)}
    return [at[place] for place in places]


def read_table(text: str, name: str) -> dict[str, list[str]]:
    """A .csv with the columns class and label: a class of the data, and those of the model that are right.

    Several labels stand in one cell with ';' between them, or in several rows. A class without a label, or
    not in the table, is left out of the evaluation.
    """
    rows = csv.DictReader(io.StringIO(text))
    if not {"class", "label"} <= set(rows.fieldnames or ()):
        raise Error(
            f"{name}: needs the columns class and label, has {', '.join(rows.fieldnames or ())}",
            code="data.layout",
        )
    table: dict[str, list[str]] = {}
    for row in rows:
        cell = [label.strip() for label in (row["label"] or "").split(BETWEEN)]
        table.setdefault(row["class"], []).extend(label for label in cell if label)
    return table


def objectnet_table() -> dict[str, list[str]]:
    """ObjectNet's 113 folders that overlap ImageNet, with the WordNet numbers that are right for each.

    The facts are those of the data set's own mappings/objectnet_to_imagenet_1k.json and
    folder_to_objectnet_label.json (Barbu et al., 2019), as kept in mlfoundations/wise-ft at 4639a39.
    """
    text = files("vitkit.metrics").joinpath("objectnet.tsv").read_text("utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return {folder: numbers.split(BETWEEN) for folder, numbers in rows}


def accepted_classes(
    table: Mapping[str, Sequence[str]],
    classes: Sequence[str],
    labels: Sequence[str],
    synsets: Synsets,
    name: str,
) -> Tensor:
    """(F, C): which of the model's classes are right for each of the data's; a row of none: left out.

    The table names a model's class by its label; where those are ImageNet's, by any kind of name.
    """
    place = {label: i for i, label in enumerate(labels)}
    order = official_order(labels, synsets)
    if order is not None:
        at = {official: ours for ours, official in enumerate(order)}
        known = places_of_names(synsets) | {number: i for i, (number, _) in enumerate(synsets)}
        place = {other: at[official] for other, official in known.items()} | place
    accepted = torch.zeros(len(classes), len(labels), dtype=torch.bool)
    for row, label in ((row, label) for row, kind in enumerate(classes) for label in table.get(kind, ())):
        found = place.get(label, place.get(normalized_name(label)))
        if found is None:
            raise Error(
                f"{name}: {classes[row]!r} is mapped to {label!r}, which is no class of the model",
                code="evaluation.classes",
            )
        accepted[row, found] = True
    if not accepted.any():
        raise Error(
            f"{name} names no class of the data; it names {', '.join(map(repr, list(table)[:3]))} ..., "
            f"the data has {', '.join(map(repr, classes[:3]))} ...",
            code="evaluation.classes",
        )
    return accepted
