"""HTTP downloads of files and byte ranges, with retries, timeouts, proxies and helpful errors.

urllib3 is imported lazily, on the first request: the import takes a tenth of a second.
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
CONNECT_TIMEOUT = 3.0  # seconds to reach a server; short, so that being offline is noticed quickly
MIN_SPEED = 16 * 1024  # bytes per second; a slower range request is retried
TRIES = 8  # per byte range; for a download, tries without any progress
PAUSE = 1.0  # base of the exponential backoff in seconds; the first retry follows at once
MAX_PAUSE = 60  # seconds between two tries, whatever the server's Retry-After says
REDIRECTS = 5
CHUNK = 2**20
RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
REDIRECT_STATUS = (301, 302, 303, 307, 308)
jitter = random.SystemRandom()  # leaves the generator that training may use alone
Progress = Callable[[int, int | None], None]  # bytes received so far, and the total if it is known
T = TypeVar("T")


class NetworkError(Error, OSError):
    """A server cannot be reached, or a transfer failed in every try."""

    code = "network.unreachable"


class RetryableError(Exception):
    """A failure that may be temporary, with the server's response if there is one."""

    def __init__(self, reason: str, response: "BaseHTTPResponse | None" = None) -> None:
        super().__init__(reason)
        self.response = response


def join(address: str, name: str) -> str:
    """The URL of a file in the folder at another URL."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name), fragment=""))


def get_range(address: str, start: int, size: int) -> tuple[bytes, int]:
    """`size` bytes of a remote file from `start` on, and the length of the whole file; with retries."""
    return with_retries(address, lambda: receive_range(address, start, size))


def download(
    address: str, path: Path, *, size: int | None = None, limit: int | None = None,
    progress: Progress = lambda done, total: None, tries: int = TRIES,
) -> None:  # fmt: skip
    """Download a file, resuming from what is already at `path`; a failed download keeps its bytes there.

    size: the expected length, if known; limit: the largest length that is accepted.
    """

    def received() -> int:
        return path.stat().st_size if path.exists() else 0

    if size is not None and received() > size:
        path.unlink()
    with_retries(
        address, lambda: receive_rest(address, path, received(), size, limit, progress), tries, received
    )


def with_retries(
    address: str, attempt: Callable[[], T], tries: int | None = None, progress: Callable[[], int] = lambda: 0
) -> T:
    """Call `attempt` until it succeeds or the tries are used up; progress resets the count."""
    from urllib3.exceptions import HTTPError, LocationValueError, MaxRetryError

    tries = TRIES if tries is None else tries
    before, policy = progress(), retry_policy(tries)
    while True:
        try:
            return attempt()
        except RetryableError as failed:
            reason, response = str(failed), failed.response
        except LocationValueError as failed:
            raise Error(f"{address}: {failed}", code="request.value") from None
        except HTTPError as failed:
            refuse_certificate(address, failed)
            reason, response = reason_of(failed), None
        if (now := progress()) > before:
            before, policy = now, retry_policy(tries)
        try:
            policy = policy.increment("GET", address, response, None if response else HTTPError(reason))
        except MaxRetryError:
            resume = f"; {now} bytes are kept, and the next attempt resumes there" if now else ""
            raise NetworkError(f"cannot fetch {address} after {tries} tries: {reason}{resume}") from None
        pause(policy, response)


def pause(policy: "Retry", response: "BaseHTTPResponse | None") -> None:
    """Wait before the next try, for as long as the server's Retry-After says if it has one."""
    from urllib3.exceptions import InvalidHeader

    try:
        policy.sleep(response)
    except InvalidHeader:  # a Retry-After that is neither a number nor a date
        policy.sleep()


def retry_policy(tries: int) -> "Retry":
    """Exponential backoff with jitter, so that processes do not all return to a busy server at once."""
    from urllib3.util import Retry

    factor = PAUSE * jitter.uniform(0.5, 1.5)
    return Retry(tries - 1, backoff_factor=factor, backoff_max=MAX_PAUSE, retry_after_max=MAX_PAUSE)


def refuse_certificate(address: str, error: Exception) -> None:
    """Raise an error for an invalid certificate, which no retry can fix."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, ssl.SSLCertVerificationError):
            message = f"{address}: invalid certificate: {reason.verify_message}"
            raise Error(message, code="network.refused") from None
        reason = next((part for part in reason.args if isinstance(part, BaseException)), reason.__cause__)


def reason_of(error: BaseException) -> str:
    """The root cause of an error, in the operating system's words if there are any."""
    cause = error.__cause__ or next((part for part in error.args if isinstance(part, BaseException)), None)
    if cause is not None:
        return reason_of(cause)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def receive_range(address: str, start: int, size: int) -> tuple[bytes, int]:
    """One try to fetch a byte range completely."""
    with open_response(address, {"Range": f"bytes={start}-{start + size - 1}"}) as response:
        check_status(address, response, start)
        first, last, total = content_range(response)
        if first != start or last != min(start + size, total) - 1:
            mismatch = f"requested {size} bytes from {start}, the server sends {first}-{last}"
            raise Error(f"{address}: {mismatch}; it must support byte ranges", code="network.refused")
        length = last - first + 1
        allowed = TIMEOUT + length / MIN_SPEED
        content, end = bytearray(), time.monotonic() + allowed
        while len(content) < length and (part := response.read1(min(CHUNK, length - len(content)), False)):
            content += part
            if time.monotonic() > end:
                raise RetryableError(f"only {len(content)} of {length} bytes after {allowed:.0f} s")
    if len(content) != length:
        raise RetryableError(f"only {len(content)} of {length} bytes were received")
    return bytes(content), total


def receive_rest(
    address: str, path: Path, start: int, size: int | None, limit: int | None, progress: Progress
) -> None:
    """One try to fetch a file from byte `start` on, or all of it if the server does not support ranges."""
    if start and start == size:
        return
    with open_response(address, {"Range": f"bytes={start}-"} if start else {}) as response:
        if start and response.status == 416:
            if response.headers.get("Content-Range") == f"bytes */{start}" and size is None:
                return  # the file is already complete
            path.unlink()
            raise RetryableError(f"it has no byte {start}, so the partial download belongs to another file")
        check_status(address, response, start)
        first, last, total = content_range(response)
        if response.status == 206 and (first, last) != (start, total - 1):
            mismatch = f"requested all bytes from {start}, the server sends {first}-{last}"
            raise Error(f"{address}: {mismatch}; it must support byte ranges", code="network.refused")
        start = first  # 0 if the server sends the whole file again
        if size is not None and total != size:
            message = f"{address}: {total} bytes, expected {size}: the file changed during the download"
            raise Error(message, code="network.changed")
        check_size(address, path, total, start, limit)
        with naming(path):
            done = append(response, path, start, total, limit, progress)
    if done < total:
        raise RetryableError(f"the connection was cut after {done} of {total} bytes")


def append(
    response: "BaseHTTPResponse", path: Path, start: int, total: int, limit: int | None, progress: Progress
) -> int:
    """Write the response into a file from `start` on; returns the new length of the file."""
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


def check_size(address: str, path: Path, total: int, start: int, limit: int | None) -> None:
    """Refuse a download above the limit or the free disk space; a total of -1 is unknown."""
    if limit is not None and total > limit:
        raise Error(f"{address}: {total} bytes, more than the limit of {limit}", code="data.too-large")
    free = shutil.disk_usage(path.parent).free
    if total - start > free:
        message = f"{path}: the download needs {total - start:,} bytes, but only {free:,} are free"
        raise Error(f"{message}; free some space or use another folder", code="disk.full")


@contextmanager
def open_response(address: str, headers: dict[str, str]) -> "Iterator[BaseHTTPResponse]":
    """The response to a GET request after redirects; closes the connection unless it was read to the end."""
    url = address
    for _ in range(REDIRECTS + 1):
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise Error(f"{address}: {error}", code="request.value") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Error(f"{address}: expected an http or https URL", code="request.value")
        response = connections(os.getpid(), proxy_for(url)).request(
            "GET", url, headers={"User-Agent": "vitkit"} | headers, preload_content=False,
            redirect=False, retries=False, timeout=TIMEOUT,
        )  # fmt: skip
        try:
            if response.status not in REDIRECT_STATUS:
                yield response
                return
            target = urljoin(url, response.headers.get("Location", ""))
            response.read(2**16, decode_content=False)  # so that the connection can be reused
        finally:
            response.close()
        if urlsplit(target).scheme not in ("https", parts.scheme):
            raise Error(f"{address}: redirects to {target!r}, which is not followed", code="network.refused")
        url = target
    raise Error(f"{address}: redirects more than {REDIRECTS} times", code="network.refused")


def check_status(address: str, response: "BaseHTTPResponse", start: int) -> None:
    """Raise an error for any status other than 200 and 206."""
    message = f"the server answered {response.status} {response.reason}"
    if response.status in RETRY_STATUS:
        raise RetryableError(message, response)
    if response.status == 416:
        raise Error(
            f"{address}: has no byte {start}; the file is shorter than expected", code="network.changed"
        )
    if response.status not in (200, 206):
        raise Error(f"{address}: {message}", code="network.refused")


def content_range(response: "BaseHTTPResponse") -> tuple[int, int, int]:
    """The first and last byte of a response, and the length of the whole file; -1 for unknown."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
        first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
        return first, last, total
    length = response.headers.get("Content-Length", "")  # the server sends the whole file
    total = int(length) if length.isdecimal() else -1
    return 0, total - 1, total


@lru_cache
def connections(process: int, proxy: str) -> "PoolManager":
    """The connection pool of a process; a forked process must not share its parent's."""
    from urllib3 import PoolManager, ProxyManager
    from urllib3.util import make_headers

    if not proxy:
        return PoolManager(maxsize=32)
    parts = urlsplit(proxy)
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return ProxyManager(proxy, maxsize=32, proxy_headers=make_headers(proxy_basic_auth=credentials))


def proxy_for(address: str) -> str:
    """The proxy for a URL by http_proxy, https_proxy and no_proxy; empty for a direct connection."""
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def check_reachable(address: str) -> None:
    """Raise an error if the server, or its proxy, cannot be reached within CONNECT_TIMEOUT seconds."""
    parts = urlsplit(proxy_for(address) or address)
    if not parts.hostname:
        return
    endpoint = (parts.hostname, parts.port or {"https": 443}.get(parts.scheme, 80))
    reason = [f"no answer within {CONNECT_TIMEOUT:.0f} s"]

    def connect() -> None:
        try:
            socket.create_connection(endpoint, CONNECT_TIMEOUT).close()
            reason.clear()
        except OSError as error:
            reason[0] = error.strerror or str(error)

    attempt = threading.Thread(target=connect, daemon=True)  # DNS lookups have no timeout of their own
    attempt.start()
    attempt.join(CONNECT_TIMEOUT)
    if reason:
        raise NetworkError(f"cannot fetch {address}: {parts.hostname} cannot be reached ({reason[0]})")
