"""Around every request: tokens, origins, headers, request ids, and one form for all errors."""

import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitkit.errors import Error
from vitkit.server.monitoring import Metrics
from vitkit.server.settings import Settings, without_port

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


log = logging.getLogger("vitkit.server")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; media-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
SECRET = ("/v1/", "/metrics")  # what a token is needed for; a page must be there to ask for one
PATHS = ("/v1/predict", "/v1/embed", "/v1/attention", "/v1/model", "/healthz", "/readyz", "/metrics", "/",
         "/docs", "/openapi.json")  # fmt: skip


class Guard:
    """The outermost layer of the application."""

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, stopping: Callable[[], bool]
    ) -> None:
        self.app, self.settings, self.metrics, self.stopping = app, settings, metrics, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, number, status = time.monotonic(), new_id(), 0
        scope.setdefault("state", {})["request_id"] = number

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS | {"x-request-id": number})
                if self.stopping():
                    headers["connection"] = "close"
                if status >= 400:  # the log leaves lines out where they are too many
                    log.info(
                        "request %s: %s %s: %d", number, scope["method"], ascii(scope["path"][:100]), status
                    )
            await send(message)

        with self.metrics.in_flight.track_inprogress():
            try:
                await self.passed(scope, receive, sent)
            except Exception:  # of ours: the log has it all, the client the id
                log.exception("request %s", number)
                if not status:
                    await refused(Request(scope), 500, "an error of the service")(scope, receive, sent)
        path = scope["path"] if scope["path"] in PATHS else "other"
        self.metrics.requests.labels(path, str(status or 499)).inc()  # 499: gone before an answer
        self.metrics.seconds.labels(path).observe(time.monotonic() - begun)

    async def passed(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check_origin(scope)
            self.check_token(scope)
            self.check_host(scope)
        except Refusal as error:
            answer = refused(Request(scope), error.status, str(error), error.headers, error.code)
            return await answer(scope, receive, send)
        if scope["method"] == "HEAD":  # as GET; the body is not sent, since the connection knows the method
            scope = scope | {"method": "GET"}
        await self.app(scope, receive, send)

    def check_origin(self, scope: Scope) -> None:
        """A page of another site may not ask in the name of whoever looks at it."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if scope["method"] in ("GET", "HEAD") or origin is None:
            return
        try:
            same = urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
        except ValueError:
            same = False
        if not same:
            raise Refusal(403, "asked from a page of another origin")

    def check_host(self, scope: Scope) -> None:
        """A name that somebody else's DNS gives this machine may not be used to ask."""
        host = without_port(Headers(scope=scope).get("host", "")).lower()
        names = [name.lower() for name in self.settings.names]
        known = any(
            name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])) for name in names
        )
        if not known:
            raise Refusal(400, "this service is not known by this Host; vitkit serve takes --allow-host NAME")

    def check_token(self, scope: Scope) -> None:
        if not self.settings.token or not scope["path"].startswith(SECRET):
            return
        word, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.settings.token.encode())
        if word.lower() != "bearer" or not right:
            raise Refusal(401, "send Authorization: Bearer TOKEN", www_authenticate="Bearer")
