"""Around every request: who may ask, the headers of every answer, its id, its count, and no traceback."""

import hmac
import logging
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitkit.service.metrics import Metrics
from vitkit.service.refusal import Refusal, new_id, refused
from vitkit.service.settings import Settings, without_port

log = logging.getLogger("vitkit.service")
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
