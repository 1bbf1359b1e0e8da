"""Which files are images, and the names by which splits are known."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec

from PIL import features

from vitkit.data.findings import some
from vitkit.errors import Error, did_you_mean

SUFFIXES_OF: Mapping[str, tuple[str, ...]] = {
    "JPEG": (".jpg", ".jpeg"), "PNG": (".png",), "WEBP": (".webp",), "GIF": (".gif",), "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"), "AVIF": (".avif",), "HEIC": (".heic", ".heif"),
}  # fmt: skip
REMEDIES = {  # for formats that not every installation reads
    "HEIC": "pip install 'vitkit[heif]'",
    "AVIF": "pip install --upgrade pillow",
}
DATA_SUFFIXES = (".csv", ".parquet", ".zip", ".tar", ".npz")  # of files that are data sets
SUFFIXES = tuple(suffix for suffixes in SUFFIXES_OF.values() for suffix in suffixes)


def readable_formats() -> tuple[str, ...]:
    """The formats that the libraries installed here read."""
    there = {"AVIF": bool(features.check("avif")), "HEIC": find_spec("pillow_heif") is not None}
    return tuple(kind for kind in SUFFIXES_OF if there.get(kind, True))


def readable_suffixes() -> tuple[str, ...]:
    """The suffixes of their files, for whoever offers a choice of files."""
    return tuple(suffix for kind in readable_formats() for suffix in SUFFIXES_OF[kind])


def not_read(kind: str, formats: Sequence[str]) -> str:
    """The message for an image of a format that is not read: what would read it, or what is read."""
    if kind in REMEDIES and kind not in readable_formats():
        return f"{kind} is not read here; to read it: {REMEDIES[kind]}"
    return f"{kind} is not read here; {', '.join(formats)} are"


SPLITS = {  # what people call the folders of a split
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
MOST_CLASSES = 10**6  # a list of names is made of them


def hidden(name: str) -> bool:
    """Files and folders that file managers and notebooks leave behind, such as .DS_Store and __MACOSX."""
    return any(part.startswith((".", "__MACOSX")) and part not in (".", "..") for part in name.split("/"))


def split_folders(place: str, images: Sequence[str]) -> dict[str, str]:
    """Which split each of the top folders is; empty where they are classes.

    A folder that is named like a split and holds class folders is a split. One that holds images alone,
    beside folders of other names, is a class: there are pictures of trains.
    """
    tops = {name.split("/", 1)[0] for name in images if "/" in name}
    named = {top for top in tops if top.lower() in SPLITS}
    deep = {name.split("/", 1)[0] for name in images if name.count("/") > 1} & named
    others = sorted(tops - named)
    if others and deep:
        raise Error(
            f"{place}: {some(others)} beside the split{'s' * (len(deep) > 1)} {some(sorted(deep))}: these "
            "folders cannot be splits and classes at once; move what is no split elsewhere, or rename it to "
            "train, val or test",
            code="data.layout",
        )
    if others:
        return {}
    check_aliases(place, named)
    return {top: SPLITS[top.lower()] for top in named}


def check_aliases(place: str, names: Iterable[str]) -> None:
    """Refuse two names of one split: which of them is meant, or whether both are, cannot be known."""
    known: dict[str, str] = {}
    for name in sorted(set(names)):
        other = known.setdefault(SPLITS[name.lower()], name)
        if other != name:
            raise Error(
                f"{place}: {other!r} and {name!r} both name the {SPLITS[name.lower()]} split; keep one of "
                "them, or join them under one name",
                code="data.layout",
            )


def split_of(where: str, value: str) -> str:
    """The split that a cell of a table names; "all" where it is empty."""
    if not value or value.lower() == "all":
        return "all"
    if value.lower() not in SPLITS:
        value = value[:40]
        hint = did_you_mean(value.strip(), SPLITS, cutoff=0.5)
        raise Error(
            f"{where}: unknown split {value!r};{hint} expected one of {', '.join(SPLITS)}", code="data.layout"
        )
    return SPLITS[value.lower()]


def check_stray(place: str, groups: dict[str, list[str]]) -> None:
    """Refuse files that name no split beside others that do: nothing would use them."""
    if "all" in groups and len(groups) > 1:
        those = ", ".join(sorted(set(groups) - {"all"}))
        raise Error(
            f"{place}: {some(groups['all'])} without the name of a split beside files of {those}; move "
            "what is no split elsewhere, or rename it to begin with train, val or test",
            code="data.layout",
        )


def folded(name: str) -> str:
    """A name without what is easily mistaken: case, spaces and Unicode form."""
    return "".join(unicodedata.normalize("NFC", name.casefold()).split())
