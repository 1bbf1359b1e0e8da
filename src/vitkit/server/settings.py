"""The settings of a service, and their validation."""

import ipaddress
import math
import os
import re
from dataclasses import dataclass, fields

from vitkit.errors import Error
from vitkit.options import SERVICE
from vitkit.runtime.runtime import data_workers

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
MIN_TOKEN = 16  # characters, if other machines can connect
MAX_IMAGES = 32  # per request
MAX_SCANS = 32  # of a JPEG; ordinary progressive ones have about ten
MAX_SIZE_IMAGES = 5  # a request may hold this many images of `max_pixels`, or the same number of pixels
NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.I)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where to listen, which clients to accept, and the limits."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    allow_host: tuple[str, ...] = ()  # further Host headers to accept
    engine: str = "torch"
    view: str = "model"  # how images are resized; "model": as in the model's card
    device: str = "auto"
    precision: str = "fp32"
    max_batch: int = 32
    max_wait_ms: float = 5.0
    queue: int = 256  # images in progress: waiting, being decoded or computed
    attention_queue: int = 4  # attention requests among them
    timeout: float = 30.0  # seconds from a complete request to its response
    max_bytes: int = 10**7  # of a request body
    max_pixels: int = 20_000_000  # of an image
    workers: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), SERVICE.get(field.name)
            if allowed and value not in allowed:
                expected = allowed.expected(whole=field.type is int)
                raise Error(f"--{field.name.replace('_', '-')} {value}: expected {expected}")
        for name in self.allow_host:
            self.check_host_name(name)
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise Error("the token must be printable ASCII characters without spaces")
        if not self.local and len(self.token) < MIN_TOKEN:
            raise Error(
                f"--host {self.host} lets other machines connect: set VITKIT_TOKEN (or --token) to a secret "
                f"of at least {MIN_TOKEN} characters, for example from: openssl rand -hex 16",
                code="request.missing",
            )

    def check_host_name(self, name: str) -> None:
        """Refuse an invalid host name, and a wildcard for all hosts without a token."""
        if name == "*" and not self.token:
            raise Error(
                "--allow-host '*' gives any web page access: set a token, or list the host names",
                code="request.missing",
            )
        if name != "*" and not is_host(without_port(name)):
            raise Error(
                f"--allow-host {name!r} is not a host name: give one such as photos.example.org, "
                "*.example.org or [2001:db8::1], without http:// and without a path"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # another host name
            return False

    @property
    def allowed_hosts(self) -> list[str]:
        """The accepted Host headers; any with a token, which another site's page does not have."""
        if self.allow_host:
            return [*LOOPBACK, *map(without_port, self.allow_host)]
        own = f"[{self.host}]" if ":" in self.host else self.host
        return [*LOOPBACK, own] if self.local else ["*"]

    @property
    def request_pixels(self) -> int:
        """The limit on the pixels of all images of a request together."""
        return MAX_SIZE_IMAGES * self.max_pixels

    @property
    def total_body_bytes(self) -> int:
        """The limit on the request bodies in memory, over all requests."""
        return max(256 * 10**6, 4 * self.max_bytes)


def without_port(name: str) -> str:
    """A host name without its port, if it has a valid one."""
    host, colon, port = name.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535
    return host if colon and is_port and (":" not in host or host.endswith("]")) else name


def is_host(name: str) -> bool:
    """Whether this is a DNS name, also one starting with *., an IPv4 address or a bracketed IPv6 address."""
    if name.startswith("[") and name.endswith("]"):
        try:
            return bool(ipaddress.IPv6Address(name[1:-1]))
        except ValueError:
            return False
    return len(name) <= 253 and bool(NAME.fullmatch(name))


def whole(name: str, value: float) -> int:
    """A number such as 2e7 as an integer; Settings checks its range."""
    if not math.isfinite(value) or value != int(value):
        raise Error(f"--{name} must be a whole number, not {value}")
    return int(value)


def token_or_environment(token: str) -> str:
    return token or os.environ.get("VITKIT_TOKEN", "")


def decoders(workers: int | None) -> int:
    """The number of decoding processes: as given, or one per core up to eight."""
    return min(8, data_workers(None)) if workers is None else workers
