"""Standard output that is closed, full, or read by somebody who leaves early."""

import contextlib
import os
import sys
from collections.abc import Iterator


def open_closed_streams() -> None:
    """Standard output and error that the caller has closed (>&-) lead nowhere.

    Their numbers are taken too: else the next file to be opened would have one, and a library that prints
    would print into it.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            discard(number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="replace", closefd=False))


@contextlib.contextmanager
def flushed_output() -> Iterator[None]:
    """Output that cannot be written is an error here, with its name, and not when Python ends."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is None and unwritable():
            raise OSError(error.errno, error.strerror, "standard output") from None
        raise


def unwritable() -> bool:
    """Whether text waits that cannot be written; it is discarded, for Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
        return True
    return False


def discard(number: int) -> None:
    """Let a file number lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
