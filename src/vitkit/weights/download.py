"""Published weights fetched and kept: their SHA-256 is recorded on first use and checked ever after."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit.errors import Error
from vitkit.io import http
from vitkit.io.hashing import sha256
from vitkit.io.http import NetworkError, Progress
from vitkit.models.errors import WeightsError

TRIES = 5  # without a byte of progress between them
LIMIT = 64 * 2**30  # bytes of a file
OFFLINE = (
    "Offline? Download that address on another machine and give the file's path instead of the name "
    "(--weights FILE for training)"
)


class DownloadError(WeightsError):
    """A file could not be fetched; what arrived is kept, and the next try goes on from there."""

    code = "network.unreachable"


def download(address: str, path: Path, *, progress: Progress | None = None) -> str:
    """Have the file at `path`, and return its SHA-256."""
    recorded = path.with_name(path.name + ".sha256")
    if path.exists():
        return check_recorded(path, recorded)
    check_reachable(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with explained(), bar(path.name) if progress is None else given(progress) as report:
        http.download(address, partial, limit=LIMIT, progress=report, tries=TRIES)
    digest = sha256(partial)
    recorded.write_text(digest + "\n")
    os.replace(partial, path)
    return digest


def check_recorded(path: Path, recorded: Path) -> str:
    """The SHA-256 of a file that was fetched before; an error where it is not the recorded one."""
    if not recorded.exists():
        why = f"{path} lacks its checksum {recorded.name}"
        raise DownloadError(f"{why}; delete it to fetch it again", code="file.unreadable")
    digest = sha256(path)
    if digest != recorded.read_text().strip():
        why = f"{path} has changed since it was fetched"
        raise DownloadError(f"{why}; delete it to fetch it again", code="file.unreadable")
    return digest


def check_reachable(address: str) -> None:
    """Refuse an address whose server cannot be reached, within seconds, with what to do instead."""
    with explained():
        http.check_reachable(address)


@contextmanager
def explained() -> Iterator[None]:
    """Inside, errors of the network are errors of weights, and say what to do without one."""
    try:
        yield
    except NetworkError as error:
        raise DownloadError(f"{error}. {OFFLINE}", code=error.code) from None
    except Error as error:
        raise DownloadError(str(error), code=error.code) from None


@contextmanager
def given(progress: Progress) -> Iterator[Progress]:
    """A caller's own progress function."""
    yield progress


@contextmanager
def bar(name: str) -> Iterator[Progress]:
    """A progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(f"fetching {name}", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
