"""Fetch a file over HTTP: resumable, retried, its SHA-256 recorded on first use and checked ever after."""

import hashlib
import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from vitkit.models.errors import WeightsError

CHUNK = 2**20
TRIES = 5  # without a single byte of progress between them
TIMEOUT = 30.0
REACH = 3.0  # seconds in which a server must be reached; a machine without network learns it that soon
OFFLINE = (
    "Offline? Download that address on another machine and give the file's path instead of the name "
    "(--weights FILE for training)"
)

Progress = Callable[[int, int | None], None]


class DownloadError(WeightsError):
    """A file could not be fetched; what arrived is kept, and the next try goes on from there."""


def cache_folder() -> Path:
    """Where downloads are kept: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vitkit"


def download(address: str, path: Path, *, progress: Progress | None = None, pause: float = 1.0) -> str:
    """Have the file at `path`, and return its SHA-256."""
    recorded = path.with_name(path.name + ".sha256")
    if path.exists():
        digest = sha256(path)
        if not recorded.exists():
            raise DownloadError(f"{path} lacks its checksum {recorded.name}; delete it to fetch it again")
        if digest != recorded.read_text().strip():
            raise DownloadError(f"{path} has changed since it was fetched; delete it to fetch it again")
        return digest
    check_reachable(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with bar(path.name) if progress is None else given(progress) as report:
        fill(address, partial, report, pause)
    digest = sha256(partial)
    recorded.write_text(digest + "\n")
    os.replace(partial, path)
    return digest


def check_reachable(address: str) -> None:
    """Refuse an address whose server cannot be reached, within REACH seconds, before any other try."""
    parts = urlsplit(address)
    if parts.scheme in urllib.request.getproxies() or not parts.hostname:  # a proxy looks for it; no address
        return
    place = (parts.hostname, parts.port or {"https": 443}.get(parts.scheme, 80))
    reason = [f"no answer in {REACH:.0f} s"]

    def connect() -> None:
        try:
            socket.create_connection(place, REACH).close()
            reason.clear()
        except OSError as error:
            reason[0] = error.strerror or str(error)

    attempt = threading.Thread(target=connect, daemon=True)  # looking up a name knows no time limit
    attempt.start()
    attempt.join(REACH)
    if reason:
        raise DownloadError(
            f"cannot fetch {address}: {parts.hostname} is out of reach ({reason[0]}). {OFFLINE}"
        )


def fill(address: str, partial: Path, progress: Progress, pause: float) -> None:
    """Append what is still missing until all is there; give up after several tries without a byte."""
    tries = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            if receive(address, partial, before, progress):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise DownloadError(f"{address}: the server says {error.code} {error.reason}") from None
            reason = f"the server says {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        after = partial.stat().st_size if partial.exists() else 0
        tries = 0 if after > before else tries + 1
        if tries >= TRIES:
            raise DownloadError(
                f"cannot fetch {address} ({reason}); the {after} bytes that came are kept for the next try. "
                f"{OFFLINE}"
            )
        time.sleep(pause * 2 ** min(tries, 5))


def receive(address: str, partial: Path, start: int, progress: Progress) -> bool:
    """One request from byte `start` on; whether the file is complete."""
    if not address.startswith(("https://", "http://")):
        raise DownloadError(f"{address}: only http and https addresses are fetched")
    request = urllib.request.Request(address, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{start}":
            return True  # nothing is missing
        raise
    with response:
        if start and response.status != 206:  # the server sends it all again
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            done = start
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(done, total)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    return total is None or done == total


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class given:
    """A caller's own progress function, as a context."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def __enter__(self) -> Progress:
        return self.progress

    def __exit__(self, *_: object) -> None:
        pass


class bar:
    """A progress bar on standard error."""

    def __init__(self, name: str):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            "{task.description}",
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.task = self.bar.add_task(f"fetching {name}", total=None)

    def __enter__(self) -> Progress:
        self.bar.__enter__()
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)  # type: ignore[arg-type]
