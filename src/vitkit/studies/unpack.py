"""Read a packed study into a new folder; everything is verified before the folder gets its name."""

import hashlib
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from vitkit.errors import Error
from vitkit.io.files import PARTIAL
from vitkit.io.system import rename_over
from vitkit.studies.folder import PLAN, read_plan
from vitkit.studies.pack import CHUNK, FORMAT, MANIFEST, MARK, OBJECTS, hash_of

PART = re.compile(r"(?P<name>.+)\.(?P<number>[0-9]{1,6})of(?P<count>[0-9]{1,6})")
LARGEST_MANIFEST = 10**8  # bytes


def unpack(files: Sequence[Path], to: Path) -> dict[str, Any]:
    """Write the packed study folder to `to`, which must be empty or not exist; return its manifest."""
    check_target(to)
    paths = ordered(files)
    shown = ", ".join(path.name for path in paths)
    with tempfile.TemporaryFile() as whole:
        for path in paths:
            with open_part(path) as part:
                shutil.copyfileobj(part, whole, CHUNK)
        check_digest(whole, shown)
        try:
            with zipfile.ZipFile(whole) as archive:
                manifest = read_manifest(archive, shown)
                extract(archive, manifest["files"], to, shown)
        except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, KeyError) as error:
            raise damaged(shown, f"{type(error).__name__}: {error}") from None
    return manifest


def check_target(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise Error(f"--to {to} is a file; choose a new folder", code="file.not-writable")
    if to.exists() and any(to.iterdir()):
        raise Error(f"--to {to} is not empty; choose a new folder", code="file.exists")


def ordered(files: Sequence[Path]) -> list[Path]:
    """The parts of one pack in order; an error names those that are missing."""
    parts = {path: PART.fullmatch(path.name) for path in files}
    if len(files) == 1 and parts[files[0]] is None:
        return list(files)
    matches = [match for match in parts.values() if match]
    if len(matches) < len(files) or len({(match["name"], match["count"]) for match in matches}) != 1:
        names = ", ".join(path.name for path in files)
        raise Error(f"{names}: expected one packed study, or all parts of one, such as NAME.1of2 NAME.2of2")
    count, by_number = int(matches[0]["count"]), {int(m["number"]): path for path, m in parts.items() if m}
    missing = [number for number in range(1, count + 1) if number not in by_number]
    if missing:
        names = ", ".join(f"{matches[0]['name']}.{number}of{count}" for number in missing[:5])
        raise Error(f"{len(missing)} of {count} parts are missing: {names}; give all", code="file.not-found")
    return [by_number[number] for number in range(1, count + 1)]


def open_part(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise Error(f"there is no file {path}", code="file.not-found")
    return path.open("rb")


def check_digest(whole: IO[bytes], shown: str) -> None:
    """Compare the digest at the end of a pack with its content."""
    size = whole.seek(0, 2)
    whole.seek(max(0, size - len(MARK) - 64))
    tail = whole.read()
    whole.seek(0)
    if not tail.startswith(MARK):
        if whole.read(4) != b"PK\x03\x04":
            raise Error(
                f"{shown} is no packed study; give files that vitkit study pack wrote", code="file.unreadable"
            )
        raise damaged(shown, "its end is missing")
    if hash_of(whole, size - 64).encode() != tail[len(MARK) :]:  # type: ignore[arg-type]
        raise damaged(shown, "its content does not have the digest that it names")


def damaged(shown: str, reason: str) -> Error:
    return Error(f"{shown} is damaged ({reason}); copy it again", code="study.corrupt")


def read_manifest(archive: zipfile.ZipFile, shown: str) -> dict[str, Any]:
    """The manifest of a pack, with checked paths."""
    if archive.getinfo(MANIFEST).file_size > LARGEST_MANIFEST:
        raise damaged(shown, f"its list of files is larger than {LARGEST_MANIFEST:,} bytes")
    try:
        manifest = json.loads(archive.read(MANIFEST))
        version, files = manifest["format"], dict(manifest["files"])
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(shown, f"{MANIFEST}: {error}") from None
    if version != FORMAT:
        raise Error(f"{shown} has format {version!r}; this vitkit reads {FORMAT}; update vitkit to read it")
    for name, digest in files.items():
        check_name(name, shown)
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise damaged(shown, f"{name} has no digest")
    if PLAN not in files:
        raise damaged(shown, f"it has no {PLAN}")
    return manifest | {"files": files}


def check_name(name: str, shown: str) -> None:
    """Refuse a path that could lead out of the folder on any system."""
    parts = name.split("/")
    unsafe = any(part in ("", ".", "..") for part in parts) or any(sign in name for sign in '\\:*?"<>|\0')
    if unsafe or not name.isprintable() or PurePosixPath(name).is_absolute():
        raise Error(f"{shown} names a path outside of the study folder: {name!r}", code="data.unsafe")


def extract(archive: zipfile.ZipFile, files: dict[str, str], to: Path, shown: str) -> None:
    """Write all files into a temporary folder beside `to`, and rename it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(archive.getinfo(OBJECTS + digest).file_size for digest in files.values())
    free = shutil.disk_usage(to.parent).free
    if needed > free:
        raise Error(f"{to} needs {needed:,} bytes and {free:,} are free", code="disk.full")
    temporary = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=PARTIAL, dir=to.parent))
    try:
        for name, digest in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hasher = hashlib.sha256()
            with archive.open(OBJECTS + digest) as source, path.open("xb") as target:
                while content := source.read(CHUNK):
                    hasher.update(content)
                    target.write(content)
            if hasher.hexdigest() != digest:
                raise damaged(shown, f"{name} does not have its digest")
        read_plan(temporary)  # refuses a plan that cannot be read
        temporary.chmod(0o755)
        if to.exists():
            to.rmdir()
        rename_over(temporary, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
