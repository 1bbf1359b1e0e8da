"""HTTP/1.1 with deadlines: nobody holds a connection by sending or reading slowly, or in a million pieces.

Uvicorn limits none of this itself. Every second each connection looks at what it is waiting for and since
when; the application's own work is limited by the application.
"""

import asyncio
import json
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = {"head": 10.0, "body": 30.0, "write": 30.0, "rest": 2.0}
LOOK = 1.0
MAX_HEAD = 16 * 1024  # bytes of a request line and headers
MAX_HEADERS = 100
MAX_CHUNKS = 10_000  # of a body in chunks: each costs as much time as a request
CONNECTIONS, OF_ONE_ADDRESS = 2048, 1024
UNREAD = 128 * 1024  # bytes of answers that the system keeps for one who does not read


class Strict(h11.Connection):
    """Refuses what is correct but has no honest use. `status` tells with what."""

    status = 400
    chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
            names = [name for name, _ in event.headers]
            if (
                b"content-length" in names and b"transfer-encoding" in names
            ):  # of which a proxy takes the other
                raise h11.RemoteProtocolError("two lengths")
            if len(names) > MAX_HEADERS:
                self.status = 431
                raise h11.RemoteProtocolError(f"more than {MAX_HEADERS} headers")
        elif isinstance(event, h11.Data):
            self.chunks += bool(event.chunk_start)
            if self.chunks > MAX_CHUNKS:
                self.status = 413
                raise h11.RemoteProtocolError(f"more than {MAX_CHUNKS} chunks")
        return event


class Timed(H11Protocol):
    """A connection that looks at the clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Strict(h11.SERVER, MAX_HEAD)
        self.seen: tuple[str, Any] = ("head", None)
        self.since = self.loop.time()
        self.watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        if self.too_many():
            transport.write(raw_answer(503, "too many connections", "Retry-After: 1\r\n"))
            return transport.close()
        self.watch = self.loop.call_later(LOOK, self.look)

    def too_many(self) -> bool:
        if len(self.connections) <= OF_ONE_ADDRESS:
            return False
        mine = self.client[0] if self.client else None
        same = sum(1 for c in self.connections if c.client and c.client[0] == mine)
        return same > OF_ONE_ADDRESS or len(self.connections) > CONNECTIONS

    def connection_lost(self, exc: Exception | None) -> None:
        if self.watch:
            self.watch.cancel()
        super().connection_lost(exc)

    def look(self) -> None:
        now, seen = self.loop.time(), (self.waits_for(), self.cycle)
        if seen != self.seen:  # the request is part of it: a new one has time of its own
            self.seen, self.since = seen, now
        elif now - self.since > SECONDS.get(seen[0], float("inf")):
            return self.transport.abort()
        self.watch = self.loop.call_later(LOOK, self.look)

    def waits_for(self) -> str:
        """head, body, write or, once it has been answered, the rest of a body; else work or nothing."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            return "body"
        if self.transport.get_write_buffer_size() or self.transport.is_closing():
            return "write"
        if self.cycle is not None and not self.cycle.response_complete:
            return "work"
        if self.conn.their_state is h11.SEND_BODY:
            return "rest"
        return "head" if self.timeout_keep_alive_task is None else "nothing"  # that is uvicorn's to end

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no HTTP, as long as none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            texts = {413: f"more than {MAX_CHUNKS} chunks", 431: f"more than {MAX_HEADERS} headers"}
            self.transport.write(raw_answer(self.conn.status, texts.get(self.conn.status, msg)))
        self.transport.close()


def raw_answer(status: int, text: str, headers: str = "") -> bytes:
    body = json.dumps({"error": text})
    return (
        f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n"
        f"Cache-Control: no-store\r\nConnection: close\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode("ascii")
