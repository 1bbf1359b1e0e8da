"""The images of a request (raw, form or JSON with base64), and what they would cost to decode."""

import binascii
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitkit.data.decode import jpeg_scans, pixels_by_header
from vitkit.data.names import SUFFIXES_OF
from vitkit.server.guard import Refusal
from vitkit.server.settings import MOST_IMAGES, MOST_SCANS, Settings

Images = list[tuple[str, bytes]]  # names and encoded images


def check_cost(images: Images, settings: Settings) -> None:
    """Refuse a request that would keep decoders from others: JPEGs of many scans, or too many pixels in all.

    An image that is too large by itself is left to the decoder, which names it in its place of the answer.
    """
    for name, content in images:
        if jpeg_scans(content, MOST_SCANS) > MOST_SCANS:
            raise Refusal(
                422,
                f"{name!r} is a JPEG of more than {MOST_SCANS} scans, each a pass over all its pixels; "
                "save it again, as baseline or as an ordinary progressive JPEG",
                code="image.too-large",
            )
    sizes = [pixels_by_header(content) for _, content in images]
    total = sum(size for size in sizes if size <= settings.max_pixels)
    if total > settings.request_pixels:
        raise Refusal(
            413,
            f"the images of this request have {total} pixels together; at most {settings.request_pixels} "
            "are decoded for one request: send them in several",
        )


RAW = (
    "application/octet-stream", "", "image/jpg", "image/heif",
    *(f"image/{kind.lower()}" for kind in SUFFIXES_OF),  # what is not read here is refused by name
)  # fmt: skip
MOST_FIELDS = 8
LONGEST_NAME = 200
MOST_COMMAS = 10_000  # of a JSON body: all else is long strings, so reading it takes milliseconds
PIECE = 2**18  # characters of base64 read at a time; meanwhile no other thread runs


class InMemory(MultiPartParser):
    """Starlette's parser; the whole body is in memory and small, so no part of it goes to a disk."""

    spool_max_size = sys.maxsize


async def read_images(
    request: Request,
    settings: Settings,
    hold: Callable[[int], None],
    aside: Callable[..., Awaitable[Any]],
) -> tuple[Images, bool]:
    """The images, and whether the body is one of them as it is.

    `hold` is called with the number of bytes as they come, `aside` with the size of what a function is to
    take apart: see Desk.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (*RAW, "multipart/form-data", "application/json"):
        raise Refusal(
            415,
            "send image/jpeg, image/png, image/webp or application/octet-stream, multipart/form-data with "
            "files, or application/json",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "send the body as it is, without Content-Encoding")
    body = await read_body(request, settings.max_bytes, hold)
    return await aside(len(body), parsed, kind, request.headers, body, settings), kind in RAW


def parsed(kind: str, headers: Headers, body: bytes, settings: Settings) -> Images:
    """The images of a whole body, which are worth decoding by their number and their headers."""
    if kind in RAW:
        images = [("image", body)]
    else:
        images = from_form(headers, body) if kind == "multipart/form-data" else from_json(body)
    if not images:
        raise Refusal(422, "there is no image in the request")
    if len(images) > MOST_IMAGES:
        raise Refusal(422, f"at most {MOST_IMAGES} images in a request")
    check_cost(images, settings)
    return images


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


def from_form(headers: Headers, body: bytes) -> Images:
    async def stream() -> AsyncIterator[bytes]:
        yield body
        yield b""

    parser = InMemory(headers, stream(), max_files=MOST_IMAGES, max_fields=MOST_FIELDS)
    try:
        form = at_once(parser.parse())
    except (MultiPartException, ValueError) as error:  # ValueError: of a boundary or a header that is none
        text = str(getattr(error, "message", "")) or "it cannot be taken apart"
        raise Refusal(422, f"multipart/form-data: {text}") from None
    files = [part for _, part in form.multi_items() if not isinstance(part, str)]
    images = [(named(part.filename), part.file.read()) for part in files]
    at_once(form.close())
    return images


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing, in any thread."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("a form in memory was waited for")


def from_json(body: bytes) -> Images:
    if body.count(b",") > MOST_COMMAS:
        raise Refusal(422, f"JSON of more than {MOST_COMMAS} values is not read")
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
        return named(name), from_base64(data)
    except ValueError:
        raise Refusal(422, f"images[{number}].data is not base64") from None


def from_base64(data: str) -> bytes:
    """In pieces, of which only the last may be padded."""
    places = range(0, len(data), PIECE)
    if places and data.find("=", 0, places[-1]) >= 0:
        raise ValueError("padding inside")
    return b"".join(binascii.a2b_base64(data[at : at + PIECE], strict_mode=True) for at in places)


def named(name: str | None) -> str:
    return (name or "image")[:LONGEST_NAME]
