"""The decoding process: decodes one image at a time, within limits that the operating system enforces."""

import json
import os
import re
import signal
import struct
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage, decode, jpeg_size
from vitkit.data.views import View, apply
from vitkit.io.system import RELOAD_SIGNALS

OK, FAILED = b"\0", b"\1"  # the first byte of a reply
SIZE = struct.Struct("<II")  # height and width of the image itself, before the pixels of a reply
HEADROOM = 512 * 2**20  # bytes of memory besides the pixels
BYTES_PER_PIXEL = 24  # of an image and its copies on the way to RGB


def encode_request(content: bytes, view: View, max_pixels: int) -> bytes:
    """A request for the pipe: the image, and the view to decode it for."""
    return json.dumps({"view": asdict(view), "max_pixels": max_pixels}).encode() + b"\n" + content


def main(pipe: Connection, max_pixels: int) -> None:
    """Serve requests until the pipe is closed. Only raw bytes cross the pipe, never pickles."""
    for number in (signal.SIGINT, signal.SIGTERM, *RELOAD_SIGNALS):
        signal.signal(number, signal.SIG_IGN)  # sent to the process group, but meant for the service
    torch.set_num_threads(1)
    set_limits(max_pixels)
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        head, _, content = request.partition(b"\n")
        try:
            pixels, size = decode_view(content, **json.loads(head))
            reply = OK + SIZE.pack(*size) + pixels.numpy().tobytes()
        except BadImage as error:
            reply = error_reply(error.reason, without_addresses(str(error)))
        except (MemoryError, RuntimeError, ValueError):  # torch raises RuntimeError when out of memory
            reply = error_reply("too-large", "decoding needs more memory than is allowed")
        pipe.send_bytes(reply)


def error_reply(reason: str, text: str) -> bytes:
    return FAILED + f"{reason}\n{text}".encode()


def set_limits(max_pixels: int) -> None:
    """Limit memory to the current use plus what the largest image needs; no file writes, no core dumps.

    macOS has no limit of memory that holds, and Windows none of these limits.
    """
    if sys.platform == "win32":
        return
    import resource

    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="utf-8") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = now + HEADROOM + BYTES_PER_PIXEL * max_pixels
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def decode_view(content: bytes, view: dict, max_pixels: int) -> tuple[Tensor, tuple[int, int]]:
    """The model's input, uint8 (3, h, w): the same pixels as `vitkit predict` uses; and the image's size."""
    transform = View(**(view | {"size": tuple(view["size"])}))
    rng = np.random.default_rng(0)  # unused: an evaluation view is deterministic
    if size := jpeg_size(content):
        if size[0] * size[1] > max_pixels:
            message = f"{size[1]} x {size[0]} pixels; at most {max_pixels} are allowed"
            raise BadImage("too-many-pixels", message)
        return apply(content, transform, rng), size  # decodes no larger than needed
    pixels = decode(content, max_pixels=max_pixels)
    return apply(pixels, transform, rng), (pixels.shape[0], pixels.shape[1])


def without_addresses(text: str) -> str:
    """An error message without the memory addresses that some decoders include."""
    return re.sub(r"<[^<>]* at 0x[0-9a-fA-F]+>", "the file", text)
