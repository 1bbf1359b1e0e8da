"""The server process: start-up, model reloads and graceful shutdown."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import uvicorn

from vitkit.errors import Error
from vitkit.io.system import RELOAD_SIGNALS
from vitkit.server.admission import AdmissionControl
from vitkit.server.app import make_app
from vitkit.server.decoder import start_forkserver
from vitkit.server.http import ConnectionLimits, Listener, TimedProtocol, allow_connections, listen
from vitkit.server.monitoring import RateLimitedLog, announce, start_log
from vitkit.server.served_model import FileStamps, file_stamps, open_served, source_kind
from vitkit.server.settings import Settings

log = logging.getLogger("vitkit.server")
POLL = 1.0  # seconds between two checks of the model files
NOTICE = 2.0  # seconds that a stopping service still listens, so that load balancers see /readyz
DRAIN = 22  # seconds to finish accepted requests
log_accept_error = RateLimitedLog(log, "times")


class Server(uvicorn.Server):
    """Uvicorn's server; after SIGTERM it is not ready, listens for NOTICE seconds, and exits with 0."""

    def __init__(self, config: uvicorn.Config, admission: AdmissionControl) -> None:
        super().__init__(config)
        self.admission = admission
        self.stop_at = float("inf")

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.admission.stopping:
            self.force_exit = sig == signal.SIGINT
            self.should_exit = True
        self.admission.stopping = True
        self.stop_at = time.monotonic() + (NOTICE if sig == signal.SIGTERM else 0)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or time.monotonic() >= self.stop_at
        return await super().on_tick(counter)


class ModelReloader:
    """Replaces the served model when its files have changed, or on request."""

    def __init__(self, admission: AdmissionControl) -> None:
        self.admission, self.source = admission, admission.settings.model
        self.requested = asyncio.Event()
        self.known = admission.served.stamps  # of the files that were loaded or rejected last
        self.kind = source_kind(self.source)

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.requested.wait(), POLL)
            requested, stamps = self.requested.is_set(), file_stamps(self.source)
            self.requested.clear()
            if requested or (stamps and stamps != self.known and await self.is_stable(stamps)):
                await self.reload(stamps)

    async def is_stable(self, stamps: FileStamps) -> bool:
        """Whether the files are no longer being written."""
        await asyncio.sleep(POLL)
        return file_stamps(self.source) == stamps

    async def reload(self, stamps: FileStamps) -> None:
        """Load the new model next to the old one, which stays in service if anything fails."""
        self.known, old = stamps, self.admission.served
        try:
            if (kind := source_kind(self.source)) != self.kind:
                raise Error(
                    f"{self.source} was {self.kind} and is now {kind}; restart the service",
                    code="request.conflict",
                )
            new = await asyncio.to_thread(open_served, self.admission.settings, old.revision + 1)
        except Exception as error:  # the new file can be anything
            self.admission.metrics.reloads.labels("refused").inc()
            return log.error("the new model was rejected, the old one stays in service: %s", error)
        self.known = new.stamps
        self.admission.served = new  # for new requests; running ones keep the old model
        self.admission.metrics.reloads.labels("loaded").inc()
        log.info("now serving revision %d of %s", new.revision, new.name)


def serve(settings: Settings, show: Callable[[str], None] = announce) -> None:
    """Serve until a signal stops it; raises ValueError or OSError if it cannot start."""
    on_reload(signal.SIG_IGN)  # until it is ready; see reloading
    writer = start_log()
    limits = ConnectionLimits(allow_connections())
    try:
        with listen(settings.host, settings.port) as listener:
            start_forkserver()
            admission = AdmissionControl(settings, open_served(settings))
            config = uvicorn.Config(
                make_app(admission), http=partial(TimedProtocol, limits),
                ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False,
                server_header=False, proxy_headers=False, timeout_keep_alive=5,
                timeout_graceful_shutdown=DRAIN,
            )  # fmt: skip
            try:
                asyncio.run(run(Server(config, admission), listener, show))
            finally:
                admission.close()
    finally:
        writer.drain()


async def run(server: Server, listener: Listener, show: Callable[[str], None]) -> None:
    admission, host = server.admission, server.admission.settings.host
    asyncio.get_running_loop().set_exception_handler(on_loop_error)
    async with reloading(admission):
        port = listener.getsockname()[1]
        host = f"[{host}]" if ":" in host else host
        show(f"serving {admission.served.name} at http://{host}:{port} (API documentation at /docs)")
        await server.serve(sockets=[listener])
    log.info("stopped")


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop itself: no file descriptors left to accept, or a bug."""
    error = context.get("exception")
    if isinstance(error, OSError) and "accept" in context["message"]:
        return log_accept_error(f"cannot accept connections, retrying in a second: {error.strerror}")
    loop.default_exception_handler(context)


def on_reload(handler: Any) -> None:
    """Set the handler of SIGHUP, where there is one."""
    for number in RELOAD_SIGNALS:
        signal.signal(number, handler)


@contextlib.asynccontextmanager
async def reloading(admission: AdmissionControl) -> AsyncIterator[None]:
    """Reload the model on SIGHUP and when its files change. Before and after, SIGHUP is ignored."""
    reloader = ModelReloader(admission)
    loop = asyncio.get_running_loop()
    on_reload(lambda *_: loop.call_soon_threadsafe(reloader.requested.set))
    task = asyncio.create_task(reloader.watch())
    try:
        yield
    finally:
        task.cancel()
        on_reload(signal.SIG_IGN)
