"""HTTP/1.1 connections: limits in total and per address, and timeouts for slow clients."""

import asyncio
import errno
import logging
import socket
import sys
from collections import Counter, defaultdict
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitkit.server.guard import error_body, new_request_id, to_json
from vitkit.server.monitoring import RateLimitedLog


class Connection(Protocol):
    """A connection, as ConnectionLimits sees it."""

    address: str

    def evict(self) -> None: ...


class ConnectionLimits:
    """Counts connections; above the limit, closes the one that has been idle longest."""

    def __init__(self, limit: int) -> None:
        self.limit, self.per_address = limit, max(1, limit // 2)
        self.open: Counter[str] = Counter()
        self.total = 0
        self.waiting: defaultdict[str, dict[Connection, None]] = defaultdict(dict)  # by address, oldest first

    def enter(self, connection: Connection) -> bool:
        """Count a new connection; False if it must be refused because no other is idle."""
        self.open[connection.address] += 1
        self.total += 1
        if self.open[connection.address] > self.per_address:
            return self.evict_from(connection.address)
        if self.total > self.limit:
            busiest = max(self.waiting, key=lambda address: len(self.waiting[address]), default="")
            return self.evict_from(busiest)
        return True

    def evict_from(self, address: str) -> bool:
        waiting = self.waiting.get(address)
        if not waiting:
            return False
        oldest = next(iter(waiting))
        self.busy(oldest)
        oldest.evict()
        return True

    def idle(self, connection: Connection) -> None:
        """The connection waits for a request, or for the rest of a request's head."""
        self.busy(connection)
        self.waiting[connection.address][connection] = None

    def busy(self, connection: Connection) -> None:
        """The connection is serving a request, or is closed."""
        waiting = self.waiting.get(connection.address, {})
        waiting.pop(connection, None)
        if not waiting:
            self.waiting.pop(connection.address, None)

    def leave(self, connection: Connection) -> None:
        self.busy(connection)
        self.total -= 1
        self.open[connection.address] -= 1
        if not self.open[connection.address]:
            del self.open[connection.address]


MAX_CONNECTIONS = 2048
MIN_CONNECTIONS = 16
RESERVE = 200  # file descriptors for decoders, model loading, and connections being opened or closed
ACCEPT_BATCH = 16  # connections accepted before the event loop turns to other work
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def allow_connections() -> int:
    """The connection limit, after raising the limit of open files as far as needed and allowed."""
    if sys.platform == "win32":  # has no such limit
        return MAX_CONNECTIONS
    import resource

    needed = MAX_CONNECTIONS + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return MAX_CONNECTIONS
    soft = needed if hard == resource.RLIM_INFINITY else max(soft, min(needed, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(MIN_CONNECTIONS, soft - RESERVE)


class Listener(socket.socket):
    """A listening socket for asyncio, which calls accept() until it would block.

    It accepts a few connections at a time, so that closed ones can release their file descriptors. When none
    are left, it raises the error once and then reports that it would block, so that asyncio retries after a
    second; asyncio would otherwise log and schedule a retry for each of the two thousand accept() calls.
    """

    accepted = 0
    failed = False

    def accept(self) -> Any:
        if self.failed or self.accepted >= ACCEPT_BATCH:
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
    server = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    return Listener(server.family, server.type, server.proto, server.detach())


log = logging.getLogger("vitkit.server")
SECONDS = {"head": 10.0, "body": 30.0, "write": 30.0, "rest": 2.0}  # timeout of each phase
CHECK_INTERVAL = 1.0  # seconds between two checks of the timeouts
MAX_HEAD = 16 * 1024  # bytes of the request line and headers
MAX_TARGET = 8 * 1024  # bytes of the URL
MAX_METHOD = 20
MAX_HEADERS = 100
MAX_CHUNKS = 10_000  # of a chunked body: each costs as much time as a request
SEND_BUFFER = 128 * 1024  # bytes of a response that the kernel buffers for a client that does not read
log_incomplete = RateLimitedLog(log, "requests ended in their head")
log_overload = RateLimitedLog(log, "connections were refused or closed, because too many are open")


class StrictConnection(h11.Connection):
    """Also refuses valid HTTP that only attackers send; `status` and `reason` describe the error."""

    status, reason = 400, "this is not HTTP/1.1"
    chunks = 0

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.status, self.reason = 431, f"the request head has more than {MAX_HEAD} bytes"
            raise
        if isinstance(event, h11.Request):
            self.chunks = 0
            self.check_head(event)
        elif isinstance(event, h11.Data):
            self.chunks += bool(event.chunk_start)
            self.check(self.chunks <= MAX_CHUNKS, 413, f"the body has more than {MAX_CHUNKS} chunks")
        return event

    def check_head(self, event: h11.Request) -> None:
        """Check the size of a head; h11's own limit does not apply to one that arrives in one piece."""
        names = [name for name, _ in event.headers]
        size = sum(len(name) + len(value) + 4 for name, value in event.headers)
        size += len(event.method) + len(event.target) + len("  HTTP/1.1\r\n\r\n")
        ambiguous = b"content-length" in names and b"transfer-encoding" in names  # request smuggling
        self.check(not ambiguous, 400, "the request has both Content-Length and Transfer-Encoding")
        self.check(len(event.method) <= MAX_METHOD, 400, f"the method has more than {MAX_METHOD} characters")
        self.check(len(event.target) <= MAX_TARGET, 414, f"the URL has more than {MAX_TARGET} bytes")
        self.check(len(names) <= MAX_HEADERS, 431, f"the request has more than {MAX_HEADERS} headers")
        self.check(size <= MAX_HEAD, 431, f"the request head has more than {MAX_HEAD} bytes")

    def check(self, valid: bool, status: int, reason: str) -> None:
        if not valid:
            self.status, self.reason = status, reason
            raise h11.RemoteProtocolError(reason)


class TimedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with connection limits and a timeout for each phase of a request."""

    def __init__(self, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limits = limits
        self.address = ""
        self.conn = StrictConnection(h11.SERVER, MAX_HEAD)
        self.phase: tuple[str, Any] = ("head", None)
        self.phase_start = self.loop.time()
        self.timer: asyncio.TimerHandle | None = None
        self.half_closed = False  # the client has closed its sending side and waits for the response

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body are two writes
        if not self.limits.enter(self):
            return self.refuse(503, "too many connections; try again", "Retry-After: 1\r\n", log_overload)
        self.limits.idle(self)
        self.timer = self.loop.call_later(CHECK_INTERVAL, self.check_timeout)

    def evict(self) -> None:
        """Close an idle connection to make room for a new one."""
        if self.conn.trailing_data[0]:
            return self.refuse(503, "too many connections; try again", "Retry-After: 1\r\n", log_overload)
        log_overload("an idle connection was closed")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer:
            self.timer.cancel()
        self.limits.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.is_answering():
            self.limits.busy(self)

    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.limits.idle(self)
        super().on_response_complete()  # starts the next pipelined request, if there is one
        if self.half_closed and not self.is_answering():
            self.transport.close()

    def eof_received(self) -> bool:
        """Keep a half-closed connection open (True) if its client may still wait for the response."""
        if self.is_answering() and not self.cycle.more_body:
            self.half_closed = True
        elif not self.is_answering() and self.conn.trailing_data[0]:
            self.refuse(400, "the request ends in its head", log_line=log_incomplete)
        return self.half_closed

    def check_timeout(self) -> None:
        """Close the connection if the current phase of the current request takes too long."""
        name, now = self.current_phase(), self.loop.time()
        phase = (name, self.cycle)  # each request has its own timeouts
        if phase != self.phase:
            self.phase, self.phase_start = phase, now
        elif now - self.phase_start > SECONDS.get(name, float("inf")):
            if name != "body" and not (name == "head" and self.conn.trailing_data[0]):
                return self.transport.abort()
            self.refuse(408, f"the {name} of the request took more than {SECONDS[name]:.0f} s")
        self.timer = self.loop.call_later(CHECK_INTERVAL, self.check_timeout)

    def current_phase(self) -> str:
        """What the connection waits for: head, body, write, work, rest (of an unread body) or nothing."""
        if self.is_answering() and self.cycle.more_body and not self.transport.is_closing():
            return "body"
        if self.transport.get_write_buffer_size() or self.transport.is_closing():
            return "write"
        if self.is_answering():
            return "work"
        if self.conn.their_state is h11.SEND_BODY:
            return "rest"
        return "head" if self.timeout_keep_alive_task is None else "nothing"  # left to uvicorn's keep-alive

    def send_400_response(self, msg: str) -> None:
        self.refuse(self.conn.status, self.conn.reason)

    def refuse(self, status: int, reason: str, headers: str = "", log_line: Any = log.info) -> None:
        """Send an error response if no other response has started, and close the connection."""
        known_id = self.scope["state"].get("request_id") if self.is_answering() else None
        request_id = known_id or new_request_id()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(raw_response(status, reason, request_id, headers))
            log_line(f"request {request_id}: {reason}: {status}")
        self.transport.close()


def raw_response(status: int, text: str, request_id: str, headers: str = "") -> bytes:
    body = to_json(error_body(status, text, request_id))
    head = (
        f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n"
        f"Cache-Control: no-store\r\nX-Request-Id: {request_id}\r\nConnection: close\r\n{headers}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body
