"""The registry of data sources: a module of this package that defines OPENER opens one kind of data."""

import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.data.sources.source import Source
from vitkit.io.cache import cache_folder


@dataclass(frozen=True)
class Cache:
    """Where downloads are stored, and the size limit for images in bytes; 0 stores nothing but indexes."""

    folder: Path = field(default_factory=lambda: cache_folder() / "shards")
    limit: int = 64 * 2**30


@dataclass(frozen=True)
class Opener:
    """How to recognise and open one kind of data."""

    description: str  # for messages that list what can be opened
    matches: Callable[[str], bool]  # a cheap check; False for a file or folder that does not exist
    open: Callable[[str, Cache | None], dict[str, Source]]  # the splits by name, "all" where there are none
    order: int = 50  # openers are tried in ascending order; the first that matches is used
    open_all: Callable[[str, Cache | None], dict[str, Source]] | None = None  # also unlabelled images: -1


def file_with_suffix(*suffixes: str) -> Callable[[str], bool]:
    """A check for existing files, not folders, with one of these suffixes."""

    def matches(place: str) -> bool:
        return Path(place).suffix.lower() in suffixes and os.path.exists(place) and not os.path.isdir(place)

    return matches


def find_openers(*packages: str) -> tuple[Opener, ...]:
    """The OPENER of every module in these packages, sorted by `order`, then by module name."""
    names = [
        f"{package}.{module.name}"
        for package in packages
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
    ]
    openers = [getattr(importlib.import_module(name), "OPENER", None) for name in sorted(names)]
    return tuple(sorted((opener for opener in openers if opener is not None), key=lambda o: o.order))
