"""Middleware around every request: token, origin and host checks, security headers, request ids, errors."""

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

MAX_ERROR = 400  # characters of an error message
CODES = {  # status -> code, for errors without a code of their own
    401: "server.unauthorized",
    404: "server.not-found",
    413: "server.too-large",
    414: "server.too-large",
    431: "server.too-large",
    503: "server.busy",
}


def code_of(status: int) -> str:
    return CODES.get(status, "server.failed" if status >= 500 else "server.request")


class RequestError(Error):
    """An error response: a status, a message for the client and a code."""

    def __init__(self, status: int, text: str, *, code: str = "", **headers: str) -> None:
        super().__init__(text, code=code or code_of(status))
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def busy(text: str) -> RequestError:
    return RequestError(503, text, retry_after="1")


class AsciiJSONResponse(Response):
    """JSON in ASCII, which also holds file names that are not valid Unicode. Bytes are already JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else to_json(content)


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def error_response(
    request: Request, status: int, text: str, headers: dict[str, str] | None = None, code: str = ""
) -> AsciiJSONResponse:
    """An error in the form that all errors share; its request id is also in the log."""
    return AsciiJSONResponse(error_body(status, text, request_id_of(request), code), status, headers)


def error_body(status: int, text: str, request_id: str, code: str = "") -> dict[str, str]:
    return {"error": text[:MAX_ERROR], "code": code or code_of(status), "request": request_id}


def new_request_id() -> str:
    return secrets.token_hex(8)


def request_id_of(request: Request) -> str:
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
TOKEN_PATHS = ("/v1/", "/metrics")  # prefixes that require a token; the page, which asks for it, does not
PATHS = ("/v1/predict", "/v1/embed", "/v1/attention", "/v1/model", "/healthz", "/readyz", "/metrics", "/",
         "/docs", "/openapi.json")  # fmt: skip


class Guard:
    """The outermost ASGI middleware."""

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, stopping: Callable[[], bool]
    ) -> None:
        self.app, self.settings, self.metrics, self.stopping = app, settings, metrics, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, request_id, status = time.monotonic(), new_request_id(), 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS | {"x-request-id": request_id})
                if self.stopping():
                    headers["connection"] = "close"
                if status >= 400:  # the log drops lines when there are too many
                    path = ascii(scope["path"][:100])
                    log.info("request %s: %s %s: %d", request_id, scope["method"], path, status)
            await send(message)

        with self.metrics.in_flight.track_inprogress():
            try:
                await self.dispatch(scope, receive, send_with_headers)
            except Exception:  # a bug: the traceback goes to the log, the client gets the request id
                log.exception("request %s", request_id)
                if not status:
                    response = error_response(Request(scope), 500, "internal server error")
                    await response(scope, receive, send_with_headers)
        path = scope["path"] if scope["path"] in PATHS else "other"
        self.metrics.requests.labels(path, str(status or 499)).inc()  # 499: client closed request
        self.metrics.seconds.labels(path).observe(time.monotonic() - start)

    async def dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check_origin(scope)
            self.check_token(scope)
            self.check_host(scope)
        except RequestError as error:
            response = error_response(Request(scope), error.status, str(error), error.headers, error.code)
            return await response(scope, receive, send)
        if scope["method"] == "HEAD":  # handled as GET; the connection drops the body
            scope = scope | {"method": "GET"}
        await self.app(scope, receive, send)

    def check_origin(self, scope: Scope) -> None:
        """Refuse cross-origin requests: another site's page must not use its visitor's access (CSRF)."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if scope["method"] in ("GET", "HEAD") or origin is None:
            return
        try:
            same = urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
        except ValueError:
            same = False
        if not same:
            raise RequestError(403, "requests from a web page of another origin are not allowed")

    def check_host(self, scope: Scope) -> None:
        """Refuse an unknown Host header, to prevent DNS rebinding."""
        host = without_port(Headers(scope=scope).get("host", "")).lower()
        names = [name.lower() for name in self.settings.allowed_hosts]
        known = any(
            name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])) for name in names
        )
        if not known:
            raise RequestError(400, "unknown Host header; allow it with vitkit serve --allow-host NAME")

    def check_token(self, scope: Scope) -> None:
        if not self.settings.token or not scope["path"].startswith(TOKEN_PATHS):
            return
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        valid = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self.settings.token.encode())
        if scheme.lower() != "bearer" or not valid:
            raise RequestError(401, "send Authorization: Bearer TOKEN", www_authenticate="Bearer")
