"""What runs in a decoding process: one image after the other, within limits that the system enforces."""

import json
import os
import re
import resource
import signal
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, decode, jpeg_size
from vitkit.data.views import View, apply

DONE, REFUSED = b"\0", b"\1"
SPARE = 512 * 2**20  # bytes beside the pixels
BYTES_A_PIXEL = 24  # of an image and of all that is made of it on the way to RGB


def question(content: bytes, view: View, max_pixels: int) -> bytes:
    """An image and what is wanted of it, for the pipe."""
    return json.dumps({"view": asdict(view), "max_pixels": max_pixels}).encode() + b"\n" + content


def main(pipe: Connection, max_pixels: int) -> None:
    """Answer until nobody asks any more. Nothing but plain bytes goes either way."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever sends them to the group means the service
    torch.set_num_threads(1)
    limit(max_pixels)
    while True:
        try:
            asked = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        head, _, content = asked.partition(b"\n")
        try:
            reply = DONE + answer(content, **json.loads(head)).numpy().tobytes()
        except BadImage as error:
            reply = refusal(error.reason, plain(str(error)))
        except (MemoryError, RuntimeError, ValueError):  # torch raises RuntimeError where memory is short
            reply = refusal("too-large", "it needs more memory than an image may")
        pipe.send_bytes(reply)


def refusal(reason: str, text: str) -> bytes:
    return REFUSED + f"{reason}\n{text}".encode()


def limit(max_pixels: int) -> None:
    """No more memory than now plus what the largest image needs, no file written, few opened, no core."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = now + SPARE + BYTES_A_PIXEL * max_pixels
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def answer(content: bytes, view: dict, max_pixels: int) -> Tensor:
    """An image as a model wants it, uint8 (3, h, w): the pixels that `vitkit predict` gives it."""
    wanted = View(**(view | {"size": tuple(view["size"])}))
    rng = np.random.default_rng(0)  # such a view chooses nothing
    if size := jpeg_size(content):
        if size[0] * size[1] > max_pixels:
            raise BadImage("too-many-pixels", f"{size[1]} x {size[0]} pixels; at most {max_pixels} are read")
        return apply(content, wanted, rng)  # decoded no larger than needed
    return apply(decode(content, max_pixels=max_pixels), wanted, rng)


def plain(text: str) -> str:
    """Without the addresses of objects, which some decoders put into their errors."""
    return re.sub(r"<[^<>]* at 0x[0-9a-fA-F]+>", "the file", text)
