"""A table that is written in parts, so that a killed command continues where it was; merged at the end.

features.parquet is first the folder features.parquet.parts with manifest.json, which says what decides the
content, and one file for each part. A part appears whole or not at all, and belongs to one manifest.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.io.files import LOCK, locked, replace_file, staged

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Parts:
    """The parts of a table: `rows` rows in parts of `size`, each in a file of its own."""

    out: Path
    rows: int
    size: int
    digest: str  # of the manifest

    @property
    def count(self) -> int:
        return -(-self.rows // self.size)

    def range(self, number: int) -> range:
        """The rows of a part."""
        return range(number * self.size, min((number + 1) * self.size, self.rows))

    def path(self, number: int) -> Path:
        """The file of a part; its name has the manifest's digest, so that it belongs to no other manifest."""
        return folder_of(self.out) / f"part-{number:06d}-{self.digest[:8]}{self.out.suffix}"

    def missing(self) -> list[int]:
        present = {path.name for path in folder_of(self.out).iterdir()}
        return [number for number in range(self.count) if self.path(number).name not in present]

    def write(self, number: int, write: Callable[[Path], Any]) -> None:
        """Write a part; it gets its name when it is complete and on disk."""
        replace_file(self.path(number), write)

    def merge(self, merge: Callable[[Path, list[Path]], Any]) -> Any:
        """Write the table from its parts; returns what `merge` returns."""
        with staged(self.out, alone=True) as temporary:
            return merge(temporary, [self.path(number) for number in range(self.count)])

    def remove(self) -> None:
        """Remove the parts, once the table is written."""
        shutil.rmtree(folder_of(self.out), ignore_errors=True)


def folder_of(out: Path) -> Path:
    """The folder of the parts of a table."""
    return out.with_name(f"{out.name}.parts")


def take(out: Path, stack: ExitStack, *, restart: bool) -> None:
    """Make the folder of the parts and lock it until the stack is closed; an existing table is an error."""
    if out.is_dir():
        raise Error(f"--out {out}: this is a folder; give the name of a file", code="file.not-writable")
    folder = folder_of(out)
    if out.exists() and not restart and not (folder / MANIFEST).exists():
        raise Error(
            f"--out {out}: the file exists; give another name, or --restart to compute it again",
            code="file.exists",
        )
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(locked(folder, wait=False))
    stack.callback(remove_unused, folder)
    replace_file(folder / ".writable", lambda path: path.write_bytes(b"vitkit"))  # names a full disk now
    if restart:
        clear(folder)


def remove_unused(folder: Path) -> None:
    """Remove the folder of a command that failed before it had a manifest."""
    if not (folder / MANIFEST).exists():
        shutil.rmtree(folder, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove everything but the lock."""
    for path in folder.iterdir():
        if path.name != LOCK:
            path.unlink()


def read_manifest(out: Path) -> dict[str, Any] | None:
    """What decides the content of the parts in the folder; None if it has none yet."""
    path = folder_of(out) / MANIFEST
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise Error(
            f"{path}: not a manifest that vitkit wrote ({error}); give another --out, or --restart to "
            "compute everything again",
            code="run.corrupt",
        ) from None


def claim(out: Path, manifest: Mapping[str, Any], rows: int, size: int) -> Parts:
    """Store the manifest, or compare it with that of the parts in the folder and refuse another one."""
    old, new = read_manifest(out), json.loads(json.dumps(manifest))
    if old is None:
        text = json.dumps(new, indent=1) + "\n"
        replace_file(folder_of(out) / MANIFEST, lambda path: path.write_text(text, "utf-8"))
    elif changed := [name for name in {**old, **new} if old.get(name) != new.get(name)]:
        shown = [f"{name} ({short(old.get(name))} -> {short(new.get(name))})" for name in changed]
        raise Error(
            f"{folder_of(out)} was begun with another {', another '.join(shown)}; repeat that command to "
            "continue it, give another --out, or --restart to compute everything again",
            code="run.changed",
        )
    digest = hashlib.sha256(json.dumps(new, sort_keys=True).encode()).hexdigest()
    return Parts(out, rows, size, digest)


def short(value: Any) -> str:
    """A value for a message; of a hash the beginning."""
    text = str(value)
    return f"{text[:12]}..." if len(text) > 40 else text
