"""The service as a process: it listens, loads new model files beside the old one, and stops without loss."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn

from vitkit.service.app import make_app
from vitkit.service.decoder import prepare
from vitkit.service.desk import Desk
from vitkit.service.protocol import CONNECTIONS, Timed
from vitkit.service.served import marks, open_served
from vitkit.service.settings import Settings

log = logging.getLogger("vitkit.service")
POLL = 1.0  # seconds between looks at the model's files
NOTICE = 2.0  # seconds between "not ready" and the end of listening, in which whoever sends requests sees it
DRAIN = 22  # seconds for what has been accepted


class Server(uvicorn.Server):
    """Uvicorn's server; on SIGTERM it is not ready from then on, listens a little longer, and ends with 0."""

    def __init__(self, config: uvicorn.Config, desk: Desk) -> None:
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

    def __init__(self, desk: Desk) -> None:
        self.desk, self.place = desk, desk.settings.model
        self.asked = asyncio.Event()
        self.known = marks(self.place)  # of the files that were loaded, or refused

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
            new = await asyncio.to_thread(open_served, self.desk.settings, old.revision + 1)
        except Exception as error:  # a file of any kind may lie there
            self.desk.metrics.reloads.labels("refused").inc()
            return log.error("the new model is refused, the old one goes on: %s", error)
        self.desk.served = new  # for the requests that begin now; those before keep theirs
        self.desk.metrics.reloads.labels("loaded").inc()
        log.info("revision %d of %s is served", new.revision, new.name)


def serve(settings: Settings, say: Callable[[str], None] = print) -> None:
    """Listen until a signal ends it. What cannot be started is a ValueError or an OSError."""
    start_log()
    allow_files(2 * CONNECTIONS)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    with listening:
        prepare()
        desk = Desk(settings, open_served(settings))
        config = uvicorn.Config(
            make_app(desk), http=Timed, ws="none", lifespan="off", loop="asyncio", log_config=None,
            access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=5,
            timeout_graceful_shutdown=DRAIN,
        )  # fmt: skip
        try:
            asyncio.run(run(Server(config, desk), listening, say))
        finally:
            desk.close()


async def run(server: Server, listening: socket.socket, say: Callable[[str], None]) -> None:
    desk = server.desk
    async with watching(desk):
        port = listening.getsockname()[1]
        host = f"[{desk.settings.host}]" if ":" in desk.settings.host else desk.settings.host
        say(f"{desk.served.name} is served at http://{host}:{port} (documents at /docs)")
        await server.serve(sockets=[listening])
    log.info("stopped")


@contextlib.asynccontextmanager
async def watching(desk: Desk) -> AsyncIterator[None]:
    """Inside, SIGHUP and new files are noticed."""
    reloading = Reloading(desk)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reloading.asked.set)
    task = asyncio.create_task(reloading.watch())
    try:
        yield
    finally:
        task.cancel()
        loop.remove_signal_handler(signal.SIGHUP)


def start_log() -> None:
    """Our lines on standard error, and none of uvicorn's: any stranger could fill a disk with those."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def allow_files(wanted: int) -> None:
    """As many open files as connections may need, if the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
