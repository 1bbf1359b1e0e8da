"""The service as a process: it listens, loads new model files beside the old one, and stops without loss."""

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
from vitkit.server.admission import AdmissionControl
from vitkit.server.app import make_app
from vitkit.server.decoder import prepare
from vitkit.server.http import ConnectionLimits, Listener, Timed, allow_connections, listen
from vitkit.server.monitoring import Seldom, announce, start_log
from vitkit.server.served_model import kind_of, marks, open_served
from vitkit.server.settings import Settings

log = logging.getLogger("vitkit.server")
POLL = 1.0  # seconds between looks at the model's files
NOTICE = 2.0  # seconds between "not ready" and the end of listening, in which whoever sends requests sees it
DRAIN = 22  # seconds for what has been accepted
no_files = Seldom(log, "times")


class Server(uvicorn.Server):
    """Uvicorn's server; on SIGTERM it is not ready from then on, listens a little longer, and ends with 0."""

    def __init__(self, config: uvicorn.Config, desk: AdmissionControl) -> None:
        super().__init__(config)
        self.desk = desk
        self.stop_at = float("inf")

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.desk.stopping:
            self.force_exit = sig == signal.SIGINT
            self.should_exit = True
        self.desk.stopping = True
        self.stop_at = time.monotonic() + (NOTICE if sig == signal.SIGTERM else 0)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or time.monotonic() >= self.stop_at
        return await super().on_tick(counter)


class Reloading:
    """Replaces the desk's model when its files have changed, or when it is told to."""

    def __init__(self, desk: AdmissionControl) -> None:
        self.desk, self.place = desk, desk.settings.model
        self.asked = asyncio.Event()
        self.known = desk.served.marks  # of the files that were loaded, or refused
        self.kind = kind_of(self.place)

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.asked.wait(), POLL)
            told, now = self.asked.is_set(), marks(self.place)
            self.asked.clear()
            if told or (now and now != self.known and await self.settled(now)):
                await self.reload(now)

    async def settled(self, now: Any) -> bool:
        """Whether nobody is writing any more."""
        await asyncio.sleep(POLL)
        return marks(self.place) == now

    async def reload(self, now: Any) -> None:
        """The new model beside the old one; whatever is wrong with it, the old one goes on."""
        self.known, old = now, self.desk.served
        try:
            if (kind := kind_of(self.place)) != self.kind:
                raise Error(
                    f"{self.place} was {self.kind} and is {kind} now; start the service again",
                    code="request.conflict",
                )
            new = await asyncio.to_thread(open_served, self.desk.settings, old.revision + 1)
        except Exception as error:  # a file of any kind may lie there
            self.desk.metrics.reloads.labels("refused").inc()
            return log.error("the new model is refused, the old one goes on: %s", error)
        self.known = new.marks
        self.desk.served = new  # for the requests that begin now; those before keep theirs
        self.desk.metrics.reloads.labels("loaded").inc()
        log.info("revision %d of %s is served", new.revision, new.name)


def serve(settings: Settings, say: Callable[[str], None] = announce) -> None:
    """Listen until a signal ends it. What cannot be started is a ValueError or an OSError."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it is ready; see watching
    writer = start_log()
    crowd = ConnectionLimits(allow_connections())
    try:
        with listen(settings.host, settings.port) as listening:
            prepare()
            desk = AdmissionControl(settings, open_served(settings))
            config = uvicorn.Config(
                make_app(desk), http=partial(Timed, crowd),
                ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False,
                server_header=False, proxy_headers=False, timeout_keep_alive=5,
                timeout_graceful_shutdown=DRAIN,
            )  # fmt: skip
            try:
                asyncio.run(run(Server(config, desk), listening, say))
            finally:
                desk.close()
    finally:
        writer.drain()


async def run(server: Server, listening: Listener, say: Callable[[str], None]) -> None:
    desk = server.desk
    asyncio.get_running_loop().set_exception_handler(report)
    async with watching(desk):
        port = listening.getsockname()[1]
        host = f"[{desk.settings.host}]" if ":" in desk.settings.host else desk.settings.host
        say(f"{desk.served.name} is served at http://{host}:{port} (documents at /docs)")
        await server.serve(sockets=[listening])
    log.info("stopped")


def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What goes wrong in the event loop itself: no more files for connections, or an error of ours."""
    error = context.get("exception")
    if isinstance(error, OSError) and "accept" in context["message"]:
        return no_files(f"no connection can be accepted for a second: {error.strerror}")
    loop.default_exception_handler(context)


@contextlib.asynccontextmanager
async def watching(desk: AdmissionControl) -> AsyncIterator[None]:
    """Inside, SIGHUP and new files are noticed. Before and after, SIGHUP is ignored; it never ends us."""
    reloading = Reloading(desk)
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(reloading.asked.set))
    task = asyncio.create_task(reloading.watch())
    try:
        yield
    finally:
        task.cancel()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
