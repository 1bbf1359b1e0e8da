"""What a service is started with, and what of it is refused."""

import ipaddress
import math
import os
import re
from dataclasses import dataclass, fields

from vitkit.errors import Error
from vitkit.options import SERVICE
from vitkit.runtime.runtime import data_workers

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LEAST_TOKEN = 16  # characters, where others than this machine can ask
MOST_IMAGES = 32  # in one request
MOST_SCANS = 32  # of a JPEG; ordinary progressive ones have about ten
IMAGES_OF_MOST_PIXELS = 5  # that one request may hold: `max_pixels` times this, over all its images
NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.I)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where to listen, to whom, and how much of everything."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    allow_host: tuple[str, ...] = ()  # names by which the service may be asked, beside its own
    engine: str = "torch"
    view: str = "model"  # how images are brought to the model's size; "model": as its card has it
    device: str = "auto"
    precision: str = "fp32"
    max_batch: int = 32
    max_wait_ms: float = 5.0
    queue: int = 256  # images that are decoded, wait or are computed
    attention_queue: int = 4  # requests for attention maps among them
    timeout: float = 30.0  # seconds from a whole request to its answer
    max_bytes: int = 10**7  # of a request's body
    max_pixels: int = 20_000_000  # of an image
    workers: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), SERVICE.get(field.name)
            if allowed and value not in allowed:
                expected = allowed.expected(whole=field.type is int)
                raise Error(f"--{field.name.replace('_', '-')} {value}: expected {expected}")
        for name in self.allow_host:
            self.check_name(name)
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise Error("a token is made of printable ASCII characters without spaces")
        if not self.local and len(self.token) < LEAST_TOKEN:
            raise Error(
                f"--host {self.host} lets other machines ask: set VITKIT_TOKEN (or --token) to a secret of "
                f"at least {LEAST_TOKEN} characters, as made by: openssl rand -hex 16",
                code="request.missing",
            )

    def check_name(self, name: str) -> None:
        """Refuse a name that no Host header could match, or that would match them all."""
        if name == "*" and not self.token:
            raise Error(
                "--allow-host '*' lets any page in a browser ask: set a token, or give names",
                code="request.missing",
            )
        if name != "*" and not is_host(without_port(name)):
            raise Error(
                f"--allow-host {name!r} is no name of a host: give one such as photos.example.org, "
                "*.example.org or [2001:db8::1], without http:// and without a path"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can ask."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # some other name
            return False

    @property
    def names(self) -> list[str]:
        """The Host headers that are answered. Where a token is needed, a page of others has none to send."""
        if self.allow_host:
            return [*LOOPBACK, *map(without_port, self.allow_host)]
        own = f"[{self.host}]" if ":" in self.host else self.host
        return [*LOOPBACK, own] if self.local else ["*"]

    @property
    def request_pixels(self) -> int:
        """Of all images of one request together."""
        return IMAGES_OF_MOST_PIXELS * self.max_pixels

    @property
    def held_bytes(self) -> int:
        """Bodies in memory, of all requests together."""
        return max(256 * 10**6, 4 * self.max_bytes)


def without_port(name: str) -> str:
    """A Host header is compared without its port; one from 1 to 65535 may be given all the same."""
    host, colon, port = name.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535
    return host if colon and is_port and (":" not in host or host.endswith("]")) else name


def is_host(name: str) -> bool:
    """A DNS name, perhaps with *. before it, an IPv4 address, or an IPv6 address in brackets."""
    if name.startswith("[") and name.endswith("]"):
        try:
            return bool(ipaddress.IPv6Address(name[1:-1]))
        except ValueError:
            return False
    return len(name) <= 253 and bool(NAME.fullmatch(name))


def whole(name: str, value: float) -> int:
    """A number such as 2e7 as an integer; which range it must be in is for Settings to say."""
    if not math.isfinite(value) or value != int(value):
        raise Error(f"--{name} must be a whole number, not {value}")
    return int(value)


def token_or_environment(token: str) -> str:
    return token or os.environ.get("VITKIT_TOKEN", "")


def decoders(workers: int | None) -> int:
    """Processes that decode: those asked for, or one a core up to eight."""
    return min(8, data_workers(None)) if workers is None else workers
