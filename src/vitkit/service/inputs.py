"""The images of a request: a raw body, a form with files, or JSON with base64."""

import base64
import binascii
import json
import sys
from collections.abc import AsyncIterator, Callable

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitkit.service.refusal import Refusal
from vitkit.service.settings import MOST_IMAGES

RAW = ("image/jpeg", "image/jpg", "image/png", "image/webp", "application/octet-stream", "")
MOST_FIELDS = 8
LONGEST_NAME = 200
Images = list[tuple[str, bytes]]  # names and encoded images


class InMemory(MultiPartParser):
    """Starlette's parser; the whole body is in memory and small, so no part of it goes to a disk."""

    spool_max_size = sys.maxsize


async def read_images(request: Request, most: int, hold: Callable[[int], None]) -> tuple[Images, bool]:
    """The images, and whether the body is one of them as it is. `hold` is told of bytes as they come."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (*RAW, "multipart/form-data", "application/json"):
        raise Refusal(
            415,
            "send image/jpeg, image/png, image/webp or application/octet-stream, multipart/form-data with "
            "files, or application/json",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "send the body as it is, without Content-Encoding")
    body = await read_body(request, most, hold)
    if kind in RAW:
        return [("image", body)], True
    images = await from_form(request, body) if kind == "multipart/form-data" else from_json(body)
    if not images:
        raise Refusal(422, "there is no image in the request")
    if len(images) > MOST_IMAGES:
        raise Refusal(422, f"at most {MOST_IMAGES} images in a request")
    return images, False


async def read_body(request: Request, most: int, hold: Callable[[int], None]) -> bytes:
    """All of it, or 413 as soon as it is known to be too large."""
    too_large = Refusal(413, f"the body may have {most} bytes")
    declared = request.headers.get("content-length", "0")
    if len(declared) > 18 or int(declared) > most:  # h11 has seen that these are digits
        raise too_large
    body = bytearray()
    async for part in request.stream():
        hold(len(part))
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


async def from_form(request: Request, body: bytes) -> Images:
    async def stream() -> AsyncIterator[bytes]:
        yield body
        yield b""

    parser = InMemory(request.headers, stream(), max_files=MOST_IMAGES, max_fields=MOST_FIELDS)
    try:
        form = await parser.parse()
    except (MultiPartException, ValueError) as error:  # ValueError: of a boundary or a header that is none
        text = str(getattr(error, "message", "")) or "it cannot be taken apart"
        raise Refusal(422, f"multipart/form-data: {text}") from None
    files = [part for _, part in form.multi_items() if not isinstance(part, str)]
    images = [(named(part.filename), part.file.read()) for part in files]
    await form.close()
    return images


def from_json(body: bytes) -> Images:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(422, "the body is not JSON") from None
    entries = content.get("images") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise Refusal(422, 'JSON must be {"images": [{"name": "...", "data": "<base64>"}]}')
    return [from_entry(number, entry) for number, entry in enumerate(entries[: MOST_IMAGES + 1])]


def from_entry(number: int, entry: object) -> tuple[str, bytes]:
    data = entry.get("data") if isinstance(entry, dict) else None
    name = entry.get("name", f"image {number}") if isinstance(entry, dict) else ""
    if not isinstance(data, str) or not isinstance(name, str):
        raise Refusal(422, f'images[{number}] must be {{"name": "...", "data": "<base64>"}}')
    try:
        return named(name), base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(422, f"images[{number}].data is not base64") from None


def named(name: str | None) -> str:
    return (name or "image")[:LONGEST_NAME]
