"""Worker processes: none outlives its parent, and the folder for temporary files can hold their sockets."""

import ctypes
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time

from vitkit.errors import Error

PR_SET_PDEATHSIG = 1
GLANCE = 1.0  # seconds between two looks whether the parent lives


def end_with_parent(parent: int, by_main_thread: bool) -> None:
    """In a worker, first of all: it ends when the process `parent` does, also if that is gone already.

    Linux tells a process that the thread which forked it has ended. Where that was the main thread, this is
    the end of the process; of another one it is not, and a thread of the worker looks after its parent.
    """
    if by_main_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before it could be asked for
        os.kill(os.getpid(), signal.SIGKILL)


def watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(GLANCE)
    os.kill(os.getpid(), signal.SIGKILL)


def check_sockets() -> None:
    """Workers hand over tensors through sockets in the folder for temporary files: one is opened for a try.

    A name of more than 107 bytes is none for a socket, and a worker that cannot open one would be waited
    for in vain.
    """
    folder = tempfile.gettempdir()
    try:
        multiprocessing.connection.Listener(family="AF_UNIX").close()
    except OSError as error:
        raise Error(
            f"worker processes cannot open a socket in the folder for temporary files, {folder!r} "
            f"({len(os.fsencode(folder))} bytes): {error}. Set TMPDIR to a folder with a short name, such as "
            "TMPDIR=/tmp",
            code="file.not-writable",
        ) from None
