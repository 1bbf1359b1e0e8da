"""A service of our own on a free loopback port, and a client that costs little, for the tests beside it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from vitkit.models.variants import Model, build

HOST = "127.0.0.1"
START = float(os.environ.get("VITKIT_TEST_START", 300))  # seconds until a service must have started
TINY = {"width": 32, "depth": 2, "heads": 2, "hidden": 48, "patch": 8, "image_size": (32, 32), "classes": 5}


def randomised(model: Model, scale: float = 0.3) -> Model:
    """Random numbers in every parameter, so that answers to different pictures differ."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return model.eval()


def tiny(seed: int | None = None, **options: Any) -> Model:
    """A two-layer ViT of 32 pixels."""
    return randomised(build("ViT-Ti/8", seed=seed, **(TINY | options)))


@dataclass(frozen=True)
class Service:
    """One that runs: where it is, its process, and what it has logged."""

    url: str
    process: subprocess.Popen
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def memory(self) -> float:
        """Megabytes of the service itself; decoders are limited by the system."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def decoders(self) -> list[psutil.Process]:
        """Those without children of their own: the process that forks them has some."""
        result = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # gone meanwhile
                result += [process] if process.ppid() != self.process.pid else []
        return result

    def files(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def logged(self, text: str, seconds: float = 10) -> bool:
        """Whether the log has it, soon: it is written by a thread of its own."""
        until = time.monotonic() + seconds
        while text not in self.log.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        return text in self.log.read_text()

    def gauge(self, name: str) -> float:
        import httpx

        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        result = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
        assert result, name
        return float(result[1])


@contextmanager
def service(model: Path, *options: str, token: str = "", files: int = 0) -> Iterator[Service]:
    """`files`: the limit of open files that it runs with, if any."""
    log = model.with_name(f"{model.name}.log")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VITKIT_TOKEN": token, "PYTHONFAULTHANDLER": "1"}
    where = () if "--device" in options else ("--device", "cpu")
    with log.open("w") as file:
        process = subprocess.Popen(
            [*(["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"] if files else []),
             sys.executable, "-m", "vitkit", "serve", str(model), "--port", "0", *where, *options],
            stdout=subprocess.PIPE, stderr=file, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
    slow = Timer(START, process.send_signal, [signal.SIGABRT])  # which leaves its threads' stacks in the log
    slow.start()
    try:
        line = process.stdout.readline()
        slow.cancel()
        assert "http://" in line, log.read_text()
        yield Service(re.search(r"http://\S+", line)[0], process, log)
    finally:
        slow.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


def picture(seed: int = 0, size: tuple[int, int] = (48, 64), kind: str = "JPEG") -> bytes:
    """A smooth picture that differs from those of other seeds in every part."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    file = BytesIO()
    small.resize(size[::-1], Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


def post(body: bytes, path: str = "/v1/predict", kind: str = "image/jpeg", more: str = "") -> bytes:
    """A request, ready for the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


class Client:
    """A connection that is kept, and opened anew when the service has closed it."""

    def __init__(self, port: int) -> None:
        self.port, self.writer = port, None

    async def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; a connection closed before the first byte of an answer is tried again."""
        for last in (False, True):
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection(HOST, self.port)
            try:
                self.writer.write(request)
                return await self.answer()
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                begun = isinstance(error, asyncio.IncompleteReadError) and error.partial
                self.close()
                if last or begun:
                    raise
        raise AssertionError

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            self.close()
        return int(head[0].split()[1]), headers, body

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def labels(body: bytes) -> list[tuple[str, float]]:
    """Of the first image of an answer."""
    return [(one["label"], one["probability"]) for one in json.loads(body)["results"][0]["top"]]
