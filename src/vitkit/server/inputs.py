"""Read the images of a request (raw, form or base64 in JSON) and check the cost of decoding them."""

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
from vitkit.server.guard import RequestError
from vitkit.server.settings import MAX_IMAGES, MAX_SCANS, Settings

Images = list[tuple[str, bytes]]  # names and encoded images


def check_cost(images: Images, settings: Settings) -> None:
    """Refuse a request that would occupy the decoders: a JPEG with many scans, or too many pixels in total.

    A single image that is too large is left to the decoder, which reports it as the result of that image.
    """
    for name, content in images:
        if jpeg_scans(content, MAX_SCANS) > MAX_SCANS:
            raise RequestError(
                422,
                f"{name!r} is a JPEG with more than {MAX_SCANS} scans, which is slow to decode; "
                "save it again as a baseline or an ordinary progressive JPEG",
                code="image.too-large",
            )
    sizes = [pixels_by_header(content) for _, content in images]
    total = sum(size for size in sizes if size <= settings.max_pixels)
    if total > settings.request_pixels:
        raise RequestError(
            413,
            f"the images of this request have {total} pixels in total, more than the limit of "
            f"{settings.request_pixels}; send them in several requests",
        )


RAW = (
    "application/octet-stream", "", "image/jpg", "image/heif",
    *(f"image/{kind.lower()}" for kind in SUFFIXES_OF),  # unsupported formats get an error that names them
)  # fmt: skip
MAX_FIELDS = 8
MAX_NAME = 200
MAX_COMMAS = 10_000  # of a JSON body: a bound on its number of values, and so on the time to parse it
PIECE = 2**18  # characters of base64 decoded at a time, which holds the GIL


class InMemoryParser(MultiPartParser):
    """Starlette's form parser without temporary files: the body is small and already in memory."""

    spool_max_size = sys.maxsize


async def read_images(
    request: Request,
    settings: Settings,
    add_bytes: Callable[[int], None],
    offload: Callable[..., Awaitable[Any]],
) -> tuple[Images, bool]:
    """The images, and whether the body is a single raw image.

    `add_bytes` counts the bytes as they arrive and `offload` runs the parser: see AdmissionControl.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (*RAW, "multipart/form-data", "application/json"):
        raise RequestError(
            415,
            "unsupported Content-Type; send image/jpeg, image/png, image/webp, application/octet-stream, "
            "multipart/form-data with files, or application/json",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(415, "send the body uncompressed, without Content-Encoding")
    body = await read_body(request, settings.max_bytes, add_bytes)
    return await offload(len(body), parse_images, kind, request.headers, body, settings), kind in RAW


def parse_images(kind: str, headers: Headers, body: bytes, settings: Settings) -> Images:
    """The images of a complete body, with their number and decoding cost checked."""
    if kind in RAW:
        images = [("image", body)]
    else:
        images = from_form(headers, body) if kind == "multipart/form-data" else from_json(body)
    if not images:
        raise RequestError(422, "there is no image in the request")
    if len(images) > MAX_IMAGES:
        raise RequestError(422, f"a request may have at most {MAX_IMAGES} images")
    check_cost(images, settings)
    return images


async def read_body(request: Request, max_bytes: int, add_bytes: Callable[[int], None]) -> bytes:
    """The whole body, or a 413 as soon as it is known to be too large."""
    too_large = RequestError(413, f"the body has more than {max_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if len(declared) > 18 or int(declared) > max_bytes:  # h11 has checked that these are digits
        raise too_large
    body = bytearray()
    async for part in request.stream():
        add_bytes(len(part))
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def from_form(headers: Headers, body: bytes) -> Images:
    async def stream() -> AsyncIterator[bytes]:
        yield body
        yield b""

    parser = InMemoryParser(headers, stream(), max_files=MAX_IMAGES, max_fields=MAX_FIELDS)
    try:
        form = run_sync(parser.parse())
    except (MultiPartException, ValueError) as error:  # ValueError: an invalid boundary or header
        text = str(getattr(error, "message", "")) or "it cannot be parsed"
        raise RequestError(422, f"multipart/form-data: {text}") from None
    files = [part for _, part in form.multi_items() if not isinstance(part, str)]
    images = [(clip_name(part.filename), part.file.read()) for part in files]
    run_sync(form.close())
    return images


def run_sync(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("the form parser suspended, although the form is in memory")


def from_json(body: bytes) -> Images:
    if body.count(b",") > MAX_COMMAS:
        raise RequestError(422, f"the JSON has more than {MAX_COMMAS} values")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(422, "the body is not JSON") from None
    entries = content.get("images") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise RequestError(422, 'the JSON must be {"images": [{"name": "...", "data": "<base64>"}]}')
    return [from_entry(number, entry) for number, entry in enumerate(entries[: MAX_IMAGES + 1])]


def from_entry(number: int, entry: object) -> tuple[str, bytes]:
    data = entry.get("data") if isinstance(entry, dict) else None
    name = entry.get("name", f"image {number}") if isinstance(entry, dict) else ""
    if not isinstance(data, str) or not isinstance(name, str):
        raise RequestError(422, f'images[{number}] must be {{"name": "...", "data": "<base64>"}}')
    try:
        return clip_name(name), from_base64(data)
    except ValueError:
        raise RequestError(422, f"images[{number}].data is not base64") from None


def from_base64(data: str) -> bytes:
    """Decode in pieces, of which only the last may be padded."""
    starts = range(0, len(data), PIECE)
    if starts and data.find("=", 0, starts[-1]) >= 0:
        raise ValueError("padding inside")
    return b"".join(binascii.a2b_base64(data[i : i + PIECE], strict_mode=True) for i in starts)


def clip_name(name: str | None) -> str:
    return (name or "image")[:MAX_NAME]
