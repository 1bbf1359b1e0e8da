"""A cache of compiled Python files for installations that have none, such as some container images."""

import os
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

from vitkit.io.cache import cache_folder


def cache_bytecode(package: str = "torch") -> None:
    """Let Python keep compiled files in the user's cache if it has none of this package and would write none.

    That is so where PYTHONDONTWRITEBYTECODE is set, or the installation is read-only. Without them, every
    command compiles torch anew, which takes seconds. Python checks them against their sources as always.
    """
    spec = find_spec(package)
    if sys.pycache_prefix or not spec or not spec.origin or not spec.cached or os.path.exists(spec.cached):
        return
    if not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK):
        return
    folder = cache_folder() / "bytecode"
    if is_private(folder):
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def is_private(folder: Path) -> bool:
    """Whether the folder exists or can be made, and nobody else can write to it: its files are executed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    if sys.platform == "win32":
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
