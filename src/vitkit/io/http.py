"""HTTP: parts of files and whole files, with retries, time limits, proxies and errors that say what to do.

urllib3 does the protocol; it is imported when something is fetched, since that takes a tenth of a second.
"""

import os
import random
import re
import shutil
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from vitkit.errors import Error
from vitkit.io.files import naming

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager
    from urllib3.util import Retry

TIMEOUT = 30.0  # seconds without a byte
REACH = 3.0  # seconds in which a server must be reached; a machine without network learns it that soon
SLOWEST = 16 * 1024  # bytes a second, below which a range is requested anew
TRIES = 8  # of a range; of a download, without a byte of progress between them
PAUSE = 1.0  # seconds before the third try, about, and doubled from try to try; the second follows at once
LONGEST = 60  # seconds of one pause, whatever a server's Retry-After says
REDIRECTS = 5
CHUNK = 2**20
AGAIN = (408, 425, 429, 500, 502, 503, 504)  # what a server says that may go better later
MOVED = (301, 302, 303, 307, 308)
jitter = random.SystemRandom()  # not the generator that training may draw from
Progress = Callable[[int, int | None], None]  # bytes that are there, and in all, where that is known
T = TypeVar("T")


class NetworkError(Error, OSError):
    """A server that cannot be reached, or did not send, for several tries."""

    code = "network.unreachable"


class Again(Exception):
    """What may go better the next time."""

    def __init__(self, reason: str, response: "BaseHTTPResponse | None" = None) -> None:
        super().__init__(reason)
        self.response = response


def join(address: str, name: str) -> str:
    """The address of a file in a folder that is itself an address."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name), fragment=""))


def get_range(address: str, start: int, size: int) -> tuple[bytes, int]:
    """Bytes of a file, and the length of the whole; tried again where that may help."""
    return retried(address, lambda: receive_range(address, start, size))


def download(
    address: str, path: Path, *, size: int | None = None, limit: int | None = None,
    progress: Progress = lambda done, total: None, tries: int = TRIES,
) -> None:  # fmt: skip
    """Append what is still missing of a file, and have it on the disk; what came before an error is kept.

    size: its length, if that is known; limit: the most bytes that are accepted.
    """

    def there() -> int:
        return path.stat().st_size if path.exists() else 0

    if size is not None and there() > size:
        path.unlink()
    retried(address, lambda: receive_rest(address, path, there(), size, limit, progress), tries, there)


def retried(
    address: str, attempt: Callable[[], T], tries: int | None = None, progress: Callable[[], int] = lambda: 0
) -> T:
    """The result of an attempt that may fail for a while; progress between two of them resets the count."""
    from urllib3.exceptions import HTTPError, LocationValueError, MaxRetryError

    tries = TRIES if tries is None else tries
    before, policy = progress(), patience(tries)
    while True:
        try:
            return attempt()
        except Again as failed:
            reason, response = str(failed), failed.response
        except LocationValueError as failed:
            raise Error(f"{address}: {failed}", code="request.value") from None
        except HTTPError as failed:
            refuse_certificate(address, failed)
            reason, response = reason_of(failed), None
        if (now := progress()) > before:
            before, policy = now, patience(tries)
        try:
            policy = policy.increment("GET", address, response, None if response else HTTPError(reason))
        except MaxRetryError:
            kept = f"; the {now} bytes that came are kept for the next time" if now else ""
            raise NetworkError(f"cannot fetch {address} after {tries} tries: {reason}{kept}") from None
        pause(policy, response)


def pause(policy: "Retry", response: "BaseHTTPResponse | None") -> None:
    """Wait for the next try, as long as the server asks for, if it does."""
    from urllib3.exceptions import InvalidHeader

    try:
        policy.sleep(response)
    except InvalidHeader:  # a Retry-After that is neither a number nor a date
        policy.sleep()


def patience(tries: int) -> "Retry":
    """How long to wait between tries; not the same for all processes that a busy server has turned away."""
    from urllib3.util import Retry

    factor = PAUSE * jitter.uniform(0.5, 1.5)
    return Retry(tries - 1, backoff_factor=factor, backoff_max=LONGEST, retry_after_max=LONGEST)


def refuse_certificate(address: str, error: Exception) -> None:
    """Raise what no further try will change."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = f"{address}: {reason.verify_message}: not fetched"
            raise Error(why, code="network.refused") from None
        reason = next((part for part in reason.args if isinstance(part, BaseException)), reason.__cause__)


def reason_of(error: BaseException) -> str:
    """The system's own word for what went wrong, where there is one."""
    cause = error.__cause__ or next((part for part in error.args if isinstance(part, BaseException)), None)
    if cause is not None:
        return reason_of(cause)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def receive_range(address: str, start: int, size: int) -> tuple[bytes, int]:
    """One try: the bytes that were asked for, all of them."""
    with requested(address, {"Range": f"bytes={start}-{start + size - 1}"}) as response:
        check_status(address, response, start)
        first, last, total = extent(response)
        if first != start or last != min(start + size, total) - 1:
            why = f"asked for {size} bytes from {start}, the server sends {first}-{last}"
            raise Error(f"{address}: {why}; it must know byte ranges", code="network.refused")
        length = last - first + 1
        allowed = TIMEOUT + length / SLOWEST
        content, end = bytearray(), time.monotonic() + allowed
        while len(content) < length and (part := response.read1(min(CHUNK, length - len(content)), False)):
            content += part
            if time.monotonic() > end:
                raise Again(f"{len(content)} of {length} bytes after {allowed:.0f} s")
    if len(content) != length:
        raise Again(f"{len(content)} of {length} bytes came")
    return bytes(content), total


def receive_rest(
    address: str, path: Path, start: int, size: int | None, limit: int | None, progress: Progress
) -> None:
    """One try: everything from byte `start` on, or all of it where the server knows no ranges."""
    if start and start == size:
        return
    with requested(address, {"Range": f"bytes={start}-"} if start else {}) as response:
        if start and response.status == 416:
            if response.headers.get("Content-Range") == f"bytes */{start}" and size is None:
                return  # nothing is missing
            path.unlink()
            raise Again(f"it has no byte {start}, so what was kept is of another file")
        check_status(address, response, start)
        first, last, total = extent(response)
        if response.status == 206 and (first, last) != (start, total - 1):
            why = f"asked for all bytes from {start}, the server sends {first}-{last}"
            raise Error(f"{address}: {why}; it must know byte ranges", code="network.refused")
        start = first  # 0 where the server sends it all again
        if size is not None and total != size:
            why = f"{address}: {total} bytes, not {size}: replaced while it was fetched"
            raise Error(why, code="network.changed")
        check_room(address, path, total, start, limit)
        with naming(path):
            done = append(response, path, start, total, limit, progress)
    if done < total:
        raise Again(f"the connection was cut after {done} of {total} bytes")


def append(
    response: "BaseHTTPResponse", path: Path, start: int, total: int, limit: int | None, progress: Progress
) -> int:
    """Write what comes into a file from a place on; how long it is then."""
    done = start
    with path.open("r+b" if start else "wb") as file:
        file.seek(start)
        try:
            for part in response.stream(CHUNK, decode_content=False):
                if limit is not None and done + len(part) > limit:
                    raise Error(f"{path}: the server sends more than {limit} bytes", code="data.too-large")
                file.write(part)
                done += len(part)
                progress(done, None if total < 0 else total)
        finally:
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    return done


def check_room(address: str, path: Path, total: int, start: int, limit: int | None) -> None:
    """Refuse what would not fit, before it is fetched; a length that is not known is -1."""
    if limit is not None and total > limit:
        raise Error(f"{address}: {total} bytes; at most {limit} are accepted", code="data.too-large")
    free = shutil.disk_usage(path.parent).free
    if total - start > free:
        why = f"{path}: {total - start:,} bytes are to come and {free:,} are free"
        raise Error(f"{why}; make room there, or use another folder", code="disk.full")


@contextmanager
def requested(address: str, headers: dict[str, str]) -> "Iterator[BaseHTTPResponse]":
    """The response to a request, after redirects; its connection is closed unless all of it was read."""
    here = address
    for _ in range(REDIRECTS + 1):
        try:
            parts = urlsplit(here)
        except ValueError as error:
            raise Error(f"{address}: {error}", code="request.value") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Error(f"{address}: only http and https addresses are fetched", code="request.value")
        response = connections(os.getpid(), proxy_for(here)).request(
            "GET", here, headers={"User-Agent": "vitkit"} | headers, preload_content=False,
            redirect=False, retries=False, timeout=TIMEOUT,
        )  # fmt: skip
        try:
            if response.status not in MOVED:
                yield response
                return
            there = urljoin(here, response.headers.get("Location", ""))
            response.read(2**16, decode_content=False)  # so that the connection can be used again
        finally:
            response.close()
        if urlsplit(there).scheme not in ("https", parts.scheme):
            raise Error(f"{address}: sent on to {there!r}, which is not followed", code="network.refused")
        here = there
    raise Error(f"{address}: sent on more than {REDIRECTS} times", code="network.refused")


def check_status(address: str, response: "BaseHTTPResponse", start: int) -> None:
    """Raise what a server's status means, unless it sends what was asked for."""
    said = f"the server says {response.status} {response.reason}"
    if response.status in AGAIN:
        raise Again(said, response)
    if response.status == 416:
        raise Error(f"{address}: has no byte {start}: it is shorter than expected", code="network.changed")
    if response.status not in (200, 206):
        raise Error(f"{address}: {said}", code="network.refused")


def extent(response: "BaseHTTPResponse") -> tuple[int, int, int]:
    """The first and the last byte that a server sends, and the length of the whole file."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
        first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
        return first, last, total
    length = response.headers.get("Content-Length", "")  # all of it, which is right for a whole file
    total = int(length) if length.isdecimal() else -1
    return 0, total - 1, total


@lru_cache
def connections(process: int, proxy: str) -> "PoolManager":
    """Open connections of this process; a forked one must not use its parent's."""
    from urllib3 import PoolManager, ProxyManager
    from urllib3.util import make_headers

    if not proxy:
        return PoolManager(maxsize=32)
    parts = urlsplit(proxy)
    who = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return ProxyManager(proxy, maxsize=32, proxy_headers=make_headers(proxy_basic_auth=who))


def proxy_for(address: str) -> str:
    """The proxy that the environment (http_proxy, https_proxy, no_proxy) names for an address, or none."""
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def check_reachable(address: str) -> None:
    """Refuse an address whose server, or the proxy before it, cannot be reached within REACH seconds."""
    parts = urlsplit(proxy_for(address) or address)
    if not parts.hostname:
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
        raise NetworkError(f"cannot fetch {address}: {parts.hostname} is out of reach ({reason[0]})")
