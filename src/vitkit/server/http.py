"""HTTP/1.1 connections: how many, from whom, and with deadlines for slow clients."""

import asyncio
import errno
import logging
import resource
import socket
from collections import Counter, defaultdict
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitkit.server.guard import new_id, refusal_body, to_json
from vitkit.server.monitoring import Seldom


class Connection(Protocol):
    """What the crowd knows of a connection."""

    address: str

    def make_way(self) -> None: ...


class ConnectionLimits:
    """Counts connections. Where there are too many, the one that has waited longest for a request goes."""

    def __init__(self, most: int) -> None:
        self.most, self.of_one_address = most, max(1, most // 2)
        self.open: Counter[str] = Counter()
        self.total = 0
        self.waiting: defaultdict[str, dict[Connection, None]] = defaultdict(dict)  # the longest first

    def enter(self, one: Connection) -> bool:
        """Count a newcomer; False where it cannot stay, since everybody else is being answered."""
        self.open[one.address] += 1
        self.total += 1
        if self.open[one.address] > self.of_one_address:
            return self.close_one_of(one.address)
        if self.total > self.most:
            return self.close_one_of(max(self.waiting, key=lambda each: len(self.waiting[each]), default=""))
        return True

    def close_one_of(self, address: str) -> bool:
        waiting = self.waiting.get(address)
        if not waiting:
            return False
        oldest = next(iter(waiting))
        self.busy(oldest)
        oldest.make_way()
        return True

    def idle(self, one: Connection) -> None:
        """It waits for a request, or for the rest of one's head."""
        self.busy(one)
        self.waiting[one.address][one] = None

    def busy(self, one: Connection) -> None:
        """It is being answered, or has gone."""
        mine = self.waiting.get(one.address, {})
        mine.pop(one, None)
        if not mine:
            self.waiting.pop(one.address, None)

    def leave(self, one: Connection) -> None:
        self.busy(one)
        self.total -= 1
        self.open[one.address] -= 1
        if not self.open[one.address]:
            del self.open[one.address]


MOST_CONNECTIONS = 2048
LEAST_CONNECTIONS = 16
RESERVE = 200  # files for all else: decoders, models being loaded, and connections on their way in or out
AT_ONCE = 16  # connections accepted before the event loop does something else
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def allow_connections() -> int:
    """How many may be open at a time; the limit of open files is raised for them as far as it goes."""
    wanted = MOST_CONNECTIONS + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_CONNECTIONS
    soft = wanted if hard == resource.RLIM_INFINITY else max(soft, min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(LEAST_CONNECTIONS, soft - RESERVE)


class Listener(socket.socket):
    """A listening socket for asyncio, which calls accept() until it would block.

    A few connections are accepted at a time, so that those that are closed meanwhile give their files back.
    Where there are none left, asyncio is told so once, and tries again after a second; asked again at once,
    as it does, it would log and wait two thousand times.
    """

    accepted = 0
    failed = False

    def accept(self) -> Any:
        if self.failed or self.accepted >= AT_ONCE:
            self.failed, self.accepted = False, 0
            raise BlockingIOError
        try:
            connection = super().accept()
        except BlockingIOError:
            self.accepted = 0
            raise
        except OSError as error:
            self.failed = error.errno in OUT_OF_FILES
            raise
        self.accepted += 1
        return connection


def listen(host: str, port: int) -> Listener:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    plain = socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
    return Listener(plain.family, plain.type, plain.proto, plain.detach())


log = logging.getLogger("vitkit.server")
SECONDS = {"head": 10.0, "body": 30.0, "write": 30.0, "rest": 2.0}
LOOK = 1.0
MAX_HEAD = 16 * 1024  # bytes of a request line and headers
MAX_TARGET = 8 * 1024  # bytes of an address
MAX_METHOD = 20
MAX_HEADERS = 100
MAX_CHUNKS = 10_000  # of a body in chunks: each costs as much time as a request
UNREAD = 128 * 1024  # bytes of answers that the system keeps for one who does not read
unfinished = Seldom(log, "requests ended in their head")
crowded = Seldom(log, "connections were refused or closed, because too many are open")


class Strict(h11.Connection):
    """Refuses what is correct but has no honest use, with `status` and `reason`."""

    status, reason = 400, "this is not HTTP/1.1"
    chunks = 0

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.status, self.reason = 431, f"a head of more than {MAX_HEAD} bytes"
            raise
        if isinstance(event, h11.Request):
            self.chunks = 0
            self.check_head(event)
        elif isinstance(event, h11.Data):
            self.chunks += bool(event.chunk_start)
            self.check(self.chunks <= MAX_CHUNKS, 413, f"more than {MAX_CHUNKS} chunks")
        return event

    def check_head(self, event: h11.Request) -> None:
        """A head that comes all at once is never incomplete, and so passes h11's own limit at any length."""
        names = [name for name, _ in event.headers]
        size = sum(len(name) + len(value) + 4 for name, value in event.headers)
        size += len(event.method) + len(event.target) + len("  HTTP/1.1\r\n\r\n")
        two = b"content-length" in names and b"transfer-encoding" in names  # a proxy may take the other
        self.check(not two, 400, "two lengths")
        self.check(len(event.method) <= MAX_METHOD, 400, f"a method of more than {MAX_METHOD} characters")
        self.check(len(event.target) <= MAX_TARGET, 414, f"an address of more than {MAX_TARGET} bytes")
        self.check(len(names) <= MAX_HEADERS, 431, f"more than {MAX_HEADERS} headers")
        self.check(size <= MAX_HEAD, 431, f"a head of more than {MAX_HEAD} bytes")

    def check(self, good: bool, status: int, reason: str) -> None:
        if not good:
            self.status, self.reason = status, reason
            raise h11.RemoteProtocolError(reason)


class Timed(H11Protocol):
    """A connection that looks at the clock."""

    def __init__(self, crowd: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.crowd = crowd
        self.address = ""
        self.conn = Strict(h11.SERVER, MAX_HEAD)
        self.seen: tuple[str, Any] = ("head", None)
        self.since = self.loop.time()
        self.watch: asyncio.TimerHandle | None = None
        self.half_closed = False  # the client sends no more, but waits for its answer

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        wire = transport.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body are two writes
        if not self.crowd.enter(self):
            return self.refuse(503, "too many connections; try again", "Retry-After: 1\r\n", crowded)
        self.crowd.idle(self)
        self.watch = self.loop.call_later(LOOK, self.look)

    def make_way(self) -> None:
        """Close a connection that has sent no whole request, since there are too many."""
        if self.conn.trailing_data[0]:
            return self.refuse(503, "too many connections; try again", "Retry-After: 1\r\n", crowded)
        crowded("an idle connection was closed")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.watch:
            self.watch.cancel()
        self.crowd.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.is_answering():
            self.crowd.busy(self)

    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.crowd.idle(self)
        super().on_response_complete()  # which begins with the next request, if there is one
        if self.half_closed and not self.is_answering():
            self.transport.close()

    def eof_received(self) -> bool:
        """Whether to go on: the client sends no more; it may have gone, or wait for the answer."""
        if self.is_answering() and not self.cycle.more_body:
            self.half_closed = True
        elif not self.is_answering() and self.conn.trailing_data[0]:
            self.refuse(400, "the request ends in its head", note=unfinished)
        return self.half_closed

    def look(self) -> None:
        now, seen = self.loop.time(), (self.waits_for(), self.cycle)
        if seen != self.seen:  # the request is part of it: a new one has time of its own
            self.seen, self.since = seen, now
        elif now - self.since > SECONDS.get(seen[0], float("inf")):
            if seen[0] != "body" and not (seen[0] == "head" and self.conn.trailing_data[0]):
                return self.transport.abort()
            self.refuse(408, f"the {seen[0]} of the request took more than {SECONDS[seen[0]]:.0f} s")
        self.watch = self.loop.call_later(LOOK, self.look)

    def waits_for(self) -> str:
        """head, body, write or, once it has been answered, the rest of a body; else work or nothing."""
        if self.is_answering() and self.cycle.more_body and not self.transport.is_closing():
            return "body"
        if self.transport.get_write_buffer_size() or self.transport.is_closing():
            return "write"
        if self.is_answering():
            return "work"
        if self.conn.their_state is h11.SEND_BODY:
            return "rest"
        return "head" if self.timeout_keep_alive_task is None else "nothing"  # that is uvicorn's to end

    def send_400_response(self, msg: str) -> None:
        self.refuse(self.conn.status, self.conn.reason)

    def refuse(self, status: int, reason: str, headers: str = "", note: Any = log.info) -> None:
        """An answer by the connection itself, as long as none has begun; then it is closed."""
        number = (self.scope["state"].get("request_id") if self.is_answering() else None) or new_id()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(raw_answer(status, reason, number, headers))
            note(f"request {number}: {reason}: {status}")
        self.transport.close()


def raw_answer(status: int, text: str, number: str, headers: str = "") -> bytes:
    body = to_json(refusal_body(status, text, number))
    head = (
        f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n"
        f"Cache-Control: no-store\r\nX-Request-Id: {number}\r\nConnection: close\r\n{headers}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body
