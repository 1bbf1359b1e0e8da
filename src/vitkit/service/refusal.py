"""Errors of requests, each with a status, a text and a code, and how answers are written."""

import json
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vitkit.errors import Error

LONGEST = 400  # characters of an error
CODES = {  # of a status, where an error has none of its own
    401: "server.unauthorized",
    404: "server.not-found",
    413: "server.too-large",
    414: "server.too-large",
    431: "server.too-large",
    503: "server.busy",
}


def code_of(status: int) -> str:
    return CODES.get(status, "server.failed" if status >= 500 else "server.request")


class Refusal(Error):
    """A request that is not met: a status, what the client should know and do, and a code for programs."""

    def __init__(self, status: int, text: str, *, code: str = "", **headers: str) -> None:
        super().__init__(text, code=code or code_of(status))
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


def refused(
    request: Request, status: int, text: str, headers: dict[str, str] | None = None, code: str = ""
) -> Plain:
    """The one form of all errors; the id is in the log too."""
    return Plain(refusal_body(status, text, id_of(request), code), status, headers)


def refusal_body(status: int, text: str, number: str, code: str = "") -> dict[str, str]:
    return {"error": text[:LONGEST], "code": code or code_of(status), "request": number}


def new_id() -> str:
    """Of a request, in its answer and in the log."""
    return secrets.token_hex(8)


def id_of(request: Request) -> str:
    return request.scope.get("state", {}).get("request_id", "")
