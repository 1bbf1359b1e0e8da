"""Where connections come in: never more than the process may have open, and never a tight loop."""

import errno
import resource
import socket
from typing import Any

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
