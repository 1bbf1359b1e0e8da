"""Suffixes of data sets and images; which image formats are read on this machine, what reads the others."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from PIL import features

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
