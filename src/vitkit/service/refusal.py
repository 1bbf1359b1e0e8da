"""What is said to a request that cannot be met, and how answers are written."""

import json
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

LONGEST = 400  # characters of an error


class Refusal(Exception):
    """A request that is not met: a status, and what the client should know and do."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def busy(text: str) -> Refusal:
    return Refusal(503, text, retry_after="1")


class Plain(Response):
    """JSON in ASCII: names that are no Unicode survive it. Bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else to_json(content)


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def refused(request: Request, status: int, text: str, headers: dict[str, str] | None = None) -> Plain:
    """The one form of all errors; the id stands in the log too."""
    return Plain({"error": text[:LONGEST], "request": id_of(request)}, status, headers)


def new_id() -> str:
    """Of a request, in its answer and in the log."""
    return secrets.token_hex(8)


def id_of(request: Request) -> str:
    return request.scope.get("state", {}).get("request_id", "")
