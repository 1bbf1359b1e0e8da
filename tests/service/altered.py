"""A service in which something is switched off or broken, for controls of the tests beside it."""

import multiprocessing
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from multiprocessing.connection import Connection
from pathlib import Path

from launch import Service

from vitkit.server.process import serve
from vitkit.server.settings import Settings


def run(model: str, change: Callable[[], None], workers: int, files: int, say: Connection) -> None:
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    change()
    with open(f"{model}.log", "w") as file, redirect_stderr(file):
        serve(Settings(model=model, port=0, device="cpu", workers=workers), say.send)


@contextmanager
def altered(model: Path, change: Callable[[], None], workers: int = 2, files: int = 0) -> Iterator[Service]:
    """As launch.service; `change` is called before anything is served, in the process that does so."""
    spawn = multiprocessing.get_context("spawn")
    hear, say = spawn.Pipe(duplex=False)
    process = spawn.Process(target=run, args=(str(model), change, workers, files, say))
    process.start()
    try:
        assert hear.poll(120), "it did not start"
        yield Service(re.search(r"http://\S+", hear.recv())[0], process, Path(f"{model}.log"))
    finally:
        process.terminate()
        process.join(40)
        process.kill()
