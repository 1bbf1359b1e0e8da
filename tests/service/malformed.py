"""Requests that are wrong, each in its own way, and the status that each must get."""

import gzip
import json
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
from launch import picture, post
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "data"))
from bad_images import KINDS, ODD, REFUSED, chunk  # noqa: F401

BOUNDARY = "multipart/form-data; boundary=b"


def progressive(scans: int, size: tuple[int, int] = (48, 64)) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are so many."""
    file = BytesIO()
    Image.open(BytesIO(picture(0, size))).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * (scans - content.count(b"\xff\xda")) + b"\xff\xd9"


def form_of(images: list[bytes]) -> bytes:
    """A request with a form of images, ready for the wire."""
    part = b'--b\r\nContent-Disposition: form-data; name="f"; filename="%d.jpg"\r\n\r\n%b\r\n'
    body = b"".join(part % (number, content) for number, content in enumerate(images))
    return post(body + b"--b--\r\n", kind=BOUNDARY)


def image(kind: str, seed: int = 0) -> bytes:
    return KINDS[kind].make(np.random.default_rng([seed, *kind.encode()]))


def images() -> dict[str, tuple[bytes, int]]:
    """Every kind of odd or bad image, and 200 or 422."""
    made = {kind: (image(kind), 422) for kind in REFUSED if kind not in ("pipe", "closed")}
    return made | {kind: (image(kind), 200) for kind in ODD}


def requests() -> dict[str, tuple[bytes, int]]:
    """Whole requests: bad images, and good ones asked for in a wrong way."""
    good = picture(1)
    result = {f"image: {kind}": (post(data), status) for kind, (data, status) in images().items()
             if status == 422}  # fmt: skip
    part = b'--b\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n'
    return result | {
        "text/plain": (post(good, kind="text/plain"), 415),
        "form fields": (post(b"a=b", kind="application/x-www-form-urlencoded"), 415),
        "gzip": (post(gzip.compress(good), more="Content-Encoding: gzip\r\n"), 415),
        "top": (post(good, "/v1/predict?top=-1"), 422),
        "target": (post(good, "/v1/attention?target=nobody"), 422),
        "JSON": (post(b"{", kind="application/json"), 422),
        "JSON of another kind": (post(b"[]", kind="application/json"), 422),
        "base64": (post(json.dumps({"images": [{"data": "?"}]}).encode(), kind="application/json"), 422),
        "no part": (post(b"--b--\r\n", kind=BOUNDARY), 422),
        "no end": (post(part + good, kind=BOUNDARY), 422),
        "no boundary": (post(part + good, kind="multipart/form-data"), 422),
        "too large": (post(bytes(10**7 + 1)), 413),
        "33 files": (post((part + b"x\r\n") * 33 + b"--b--\r\n", kind=BOUNDARY), 422),
        "9 fields": (post(part.replace(b'; filename="a"', b"") * 9 + b"--b--\r\n", kind=BOUNDARY), 422),
    }
