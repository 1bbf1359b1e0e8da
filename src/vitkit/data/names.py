"""File suffixes of images and data sets, and the names of splits."""

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
REMEDIES = {  # for formats with optional decoders
    "HEIC": 'pip install "vitkit[heif]"',
    "AVIF": "pip install --upgrade pillow",
}
DATA_SUFFIXES = (".csv", ".parquet", ".zip", ".tar", ".npz")  # of data set files
SUFFIXES = tuple(suffix for suffixes in SUFFIXES_OF.values() for suffix in suffixes)


def readable_formats() -> tuple[str, ...]:
    """The formats that the installed libraries can decode."""
    installed = {"AVIF": bool(features.check("avif")), "HEIC": find_spec("pillow_heif") is not None}
    return tuple(kind for kind in SUFFIXES_OF if installed.get(kind, True))


def readable_suffixes() -> tuple[str, ...]:
    """The file suffixes of the readable formats, for file choosers."""
    return tuple(suffix for kind in readable_formats() for suffix in SUFFIXES_OF[kind])


def not_read(kind: str, formats: Sequence[str]) -> str:
    """The error message for an unsupported image format: how to add support, or what is supported."""
    if kind in REMEDIES and kind not in readable_formats():
        return f"{kind} support is not installed; to read it: {REMEDIES[kind]}"
    return f"{kind} is not supported; supported: {', '.join(formats)}"


SPLITS = {  # common folder names to splits
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
MOST_CLASSES = 10**6  # bounds the list of class names that a label implies


def hidden(name: str) -> bool:
    """Whether a path is hidden or left behind by a file manager or notebook, such as __MACOSX."""
    return any(part.startswith((".", "__MACOSX")) and part not in (".", "..") for part in name.split("/"))


def split_folders(place: str, images: Sequence[str]) -> dict[str, str]:
    """The split of each top-level folder; empty if these folders are classes.

    A folder that is named like a split and contains class folders is a split. One that contains only images,
    beside folders with other names, is a class: there are pictures of trains.
    """
    tops = {name.split("/", 1)[0] for name in images if "/" in name}
    named = {top for top in tops if top.lower() in SPLITS}
    deep = {name.split("/", 1)[0] for name in images if name.count("/") > 1} & named
    others = sorted(tops - named)
    if others and deep:
        raise Error(
            f"{place}: {some(others)} beside the split{'s' * (len(deep) > 1)} {some(sorted(deep))}: folders "
            "must be all splits or all classes; move those that are not splits elsewhere, or rename them to "
            "train, val or test",
            code="data.layout",
        )
    if others:
        return {}
    check_aliases(place, named)
    return {top: SPLITS[top.lower()] for top in named}


def check_aliases(place: str, names: Iterable[str]) -> None:
    """Reject two names for the same split, since it is unclear which of them to use."""
    seen: dict[str, str] = {}
    for name in sorted(set(names)):
        other = seen.setdefault(SPLITS[name.lower()], name)
        if other != name:
            raise Error(
                f"{place}: {other!r} and {name!r} both name the {SPLITS[name.lower()]} split; keep one of "
                "them, or merge them under one name",
                code="data.layout",
            )


def split_of(where: str, value: str) -> str:
    """The split that a table cell names; "all" for an empty cell."""
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
    """Reject files without a split name beside others that have one, since they would not be used."""
    if "all" in groups and len(groups) > 1:
        splits = ", ".join(sorted(set(groups) - {"all"}))
        raise Error(
            f"{place}: {some(groups['all'])} without a split name beside files of {splits}; move them "
            "elsewhere, or rename them to start with train, val or test",
            code="data.layout",
        )


def folded(name: str) -> str:
    """A name without case, spaces and differences in Unicode form, to find names that look alike."""
    return "".join(unicodedata.normalize("NFC", name.casefold()).split())
