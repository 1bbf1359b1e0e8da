"""What a service is started with, and what of it is refused."""

import ipaddress
import math
import os
import re
from dataclasses import dataclass

from vitkit.training.runtime import data_workers

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LEAST_TOKEN = 16  # characters, where others than this machine can ask
MOST_IMAGES = 32  # in one request


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where to listen, to whom, and how much of everything."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    allow_host: tuple[str, ...] = ()  # names by which the service may be asked, beside its own
    engine: str = "torch"
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
        for name, least in (("max_batch", 1), ("queue", 1), ("attention_queue", 1), ("workers", 1),
                            ("max_bytes", 1000), ("max_pixels", 1), ("port", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("timeout", "max_wait_ms"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name == "timeout" and not value):
                raise ValueError(f"{name} must be a time above 0, not {value}")
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, not {self.port}")
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise ValueError("a token is made of printable ASCII characters without spaces")
        if not self.local and len(self.token) < LEAST_TOKEN:
            raise ValueError(
                f"--host {self.host} lets other machines ask: set VITKIT_TOKEN (or --token) to a secret of "
                f"at least {LEAST_TOKEN} characters, as made by: openssl rand -hex 16"
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
            return [*LOOPBACK, *self.allow_host]
        own = f"[{self.host}]" if ":" in self.host else self.host
        return [*LOOPBACK, own] if self.local else ["*"]

    @property
    def held_bytes(self) -> int:
        """Bodies in memory, of all requests together."""
        return max(256 * 10**6, 4 * self.max_bytes)


def token_or_environment(token: str) -> str:
    return token or os.environ.get("VITKIT_TOKEN", "")


def decoders(workers: int | None) -> int:
    """Processes that decode: those asked for, or one a core up to eight."""
    return min(8, data_workers(None)) if workers is None else workers
