"""A study in one file, or in numbered parts, to go on with it on another machine.

A pack is a zip: manifest.json names the files of the study folder, and objects/SHA256 holds each content
once. The zip's comment ends with the SHA-256 of everything before it. Parts are slices of the pack, NAME.1of3
and so on. Tables, figures and the page are left out, as `study report` writes them again.
"""

import hashlib
import json
import shlex
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vitkit import __version__
from vitkit.errors import Error
from vitkit.io.files import LOCK, PARTIAL, flush, locked, sha256, staged
from vitkit.io.system import rename_over
from vitkit.report.terminal import duration
from vitkit.runs.folder import MODEL, RESULT
from vitkit.studies.folder import has_begun, is_finished, read_plan, trial_folder
from vitkit.studies.scale import study as named_study
from vitkit.studies.study import Plan, Trial
from vitkit.studies.time_use import read as read_times
from vitkit.studies.time_use import trial_seconds
from vitkit.training.checkpoint import complete

MANIFEST, OBJECTS, FORMAT = "manifest.json", "objects/", 1
MARK = b"vitkit study, SHA-256 "  # then 64 hex digits, at the end of the zip's comment
DERIVED = ("page.html", "summary.json", "table.csv", "table.json", "table.parquet")
KEPT = (RESULT, "recipe.json", "task.json", "environment.json", "protocol.json")  # of finished runs
LOG, CHECKPOINTS = "metrics.jsonl", "checkpoints"
SKIPPED = ("events", "slurm", "batches", "figures")  # folders
ENTRY = 1000  # bytes of a zip and its manifest for one more file, at most
CHUNK = 2**20


@dataclass
class Packed:
    """What was packed, and what was left out."""

    files: list[Path]
    size: int  # bytes of all files
    finished: int  # trials
    interrupted: int  # trials that go on from their checkpoint
    restarted: dict[str, float]  # interrupted trials that start again, and the seconds that each repeats
    logs: bool  # whether the step logs of all finished trials are in it

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"files": [str(path) for path in self.files]}


@dataclass
class Writer:
    """Adds files to a pack, each content once."""

    folder: Path
    archive: zipfile.ZipFile
    files: dict[str, str] = field(default_factory=dict)  # path in the study folder -> SHA-256
    stored: set[str] = field(default_factory=set)

    def add(self, paths: Sequence[Path]) -> None:
        for path in paths:
            digest = sha256(path)
            self.files[path.relative_to(self.folder).as_posix()] = digest
            if digest not in self.stored:
                self.stored.add(digest)
                self.archive.write(path, OBJECTS + digest)

    def size_with(self, paths: Sequence[Path]) -> int:
        """The size of the pack with these files, at most."""
        now = self.archive.fp.tell() + ENTRY * (1 + len(self.files))  # type: ignore[union-attr]
        sizes = (path.stat().st_size for path in paths)
        return now + sum(size + size // 1000 + ENTRY for size in sizes)


def pack(folder: Path, to: Path, max_size: int) -> Packed:
    """Write a study folder into `to`, or into parts of at most `max_size` bytes where its results are larger.

    The checkpoints of interrupted trials, the longest trials first, and then the logs of finished trials are
    added as long as the pack stays within `max_size`.
    """
    plan = read_plan(folder)
    if to.absolute().is_relative_to(folder.absolute()):
        raise Error(f"--to {to} is inside of {folder}, which it packs; choose another folder")
    to.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder, wait=False), tempfile.TemporaryDirectory(PARTIAL, ".pack", to.parent) as beside:
        whole = Path(beside) / "whole"
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            writer = Writer(folder, archive)
            writer.add([*root_files(folder), *needed_files(folder, plan)])
            packed = add_what_fits(writer, plan, max_size)
            manifest = {"format": FORMAT, "vitkit": __version__, "study": plan.study, "files": writer.files}
            archive.writestr(MANIFEST, json.dumps(manifest))
            archive.comment = MARK + bytes(64)
        packed.size = whole.stat().st_size
        with whole.open("r+b") as file:
            digest = hash_of(file, packed.size - 64)
            file.seek(-64, 2)
            file.write(digest.encode())
        if packed.size <= max_size:
            flush(whole)
            rename_over(whole, to)
            packed.files = [to]
        else:
            packed.files = split(whole, to, max_size)
    return packed


def root_files(folder: Path) -> list[Path]:
    """The plan and what was recorded of the whole study."""
    skipped = (*DERIVED, LOCK)
    return [p for p in sorted(folder.iterdir()) if p.is_file() and p.name not in skipped and is_whole(p)]


def needed_files(folder: Path, plan: Plan) -> Iterator[Path]:
    """The results of finished trials, and what other trials and the page need of them."""
    unfinished = [trial for trial in plan.trials if not is_finished(folder, trial)]
    models = {trial.needs for trial in unfinished} | shown_models(folder, plan)
    history = any(picture.kind == "history" for picture in named_study(plan.study).pictures)
    for trial in plan.trials:
        if not is_finished(folder, trial):
            continue
        place = trial_folder(folder, trial.name)
        names = [*KEPT, *([LOG] if history else []), *([MODEL] if trial.name in models else [])]
        yield from (place / name for name in names if (place / name).exists())
        yield from (path for name in KEPT for path in sorted(place.glob(f"*/{name}")))


def shown_models(folder: Path, plan: Plan) -> set[str]:
    """The trials whose position embeddings the page shows: one of each setting."""
    if not any(picture.kind == "similarity" for picture in named_study(plan.study).pictures):
        return set()
    first: dict[str, str] = {}
    for trial in plan.trials:
        if (trial_folder(folder, trial.name) / MODEL).exists():
            first.setdefault(json.dumps(trial.factors, sort_keys=True), trial.name)
    return set(first.values())


def add_what_fits(writer: Writer, plan: Plan, max_size: int) -> Packed:
    """Add checkpoints and logs while there is room."""
    folder, seconds = writer.folder, trial_seconds(read_times(writer.folder))
    finished = [trial for trial in plan.trials if is_finished(folder, trial)]
    interrupted = [trial for trial in plan.trials if trial not in finished and has_begun(folder, trial)]
    packed = Packed([], 0, len(finished), 0, {}, logs=True)
    for trial in sorted(interrupted, key=lambda trial: -seconds.get(trial.name, 0.0)):
        files = list(state_files(trial_folder(folder, trial.name)))
        if writer.size_with(files) <= max_size:
            writer.add(files)
            packed.interrupted += 1
        else:
            packed.restarted[trial.name] = round(seconds.get(trial.name, 0.0), 1)
    for trial in finished:  # one after the other, as they compress well
        files = log_files(folder, trial)
        if writer.size_with(files) <= max_size:
            writer.add(files)
        else:
            packed.logs = False
    return packed


def state_files(place: Path) -> Iterator[Path]:
    """All files from which an interrupted trial goes on: of checkpoints only the newest."""
    newest = {max(steps) for run in (place, *place.glob("*/")) if (steps := complete(run / CHECKPOINTS))}
    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place).parts
        if not path.is_file() or path.is_symlink() or set(inside) & set(SKIPPED) or not is_whole(path):
            continue
        ended = (path.parent.parent.parent / RESULT).exists()  # of the run that a checkpoint belongs to
        if path.name != LOCK and (CHECKPOINTS not in inside or (path.parent in newest and not ended)):
            yield path


def log_files(folder: Path, trial: Trial) -> list[Path]:
    place = trial_folder(folder, trial.name)
    return [path for path in (place / LOG, *sorted(place.glob(f"*/{LOG}"))) if path.exists()]


def is_whole(path: Path) -> bool:
    return not path.name.endswith(PARTIAL)


def hash_of(file: BinaryIO, size: int) -> str:
    """The SHA-256 of the first bytes of a file."""
    hasher = hashlib.sha256()
    file.seek(0)
    while size > 0:
        content = file.read(min(CHUNK, size))
        if not content:
            break
        hasher.update(content)
        size -= len(content)
    return hasher.hexdigest()


def split(whole: Path, to: Path, max_size: int) -> list[Path]:
    """Write a pack as numbered parts."""
    count = -(-whole.stat().st_size // max_size)
    paths = [to.with_name(f"{to.name}.{number}of{count}") for number in range(1, count + 1)]
    with whole.open("rb") as file:
        for path in paths:
            with staged(path) as temporary, temporary.open("wb") as part:
                left = max_size
                while left and (content := file.read(min(CHUNK, left))):
                    part.write(content)
                    left -= len(content)
    return paths


def default_name(folder: Path) -> Path:
    return folder.absolute().with_name(f"{folder.absolute().name}.study.zip")


def lines(packed: Packed) -> Iterator[str]:
    """What was packed, what was left out, and what that costs."""
    names = shlex.join(map(str, packed.files))
    yield f"finished trials: {packed.finished}; interrupted ones with their state: {packed.interrupted}"
    for name, seconds in packed.restarted.items():
        yield f"left out, too large: the state of {name}, which starts again ({duration(seconds)} are lost)"
    if packed.finished and not packed.logs:
        yield "left out, too large: step logs of some finished trials, which the study does not need"
    yield f"{packed.size / 1e6:.1f} MB; on another machine: vitkit study unpack {names} --to FOLDER"
