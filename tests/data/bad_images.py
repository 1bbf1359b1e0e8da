"""Bad and odd files by kind and seed: what to write, and whether it is refused (and why) or used."""

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from test_decode import EXIF, TEXT, chunk, png, saved, tiff

SEEDS = range(5)
USED = frozenset()  # no reason to refuse it
CUT = frozenset({"truncated", "damaged"})
NONE, OTHER = frozenset({"not-an-image"}), frozenset({"unsupported-format"})
BIG, EMPTY, ZERO = frozenset({"too-many-pixels"}), frozenset({"empty"}), frozenset({"zero-size", "damaged"})
FLOAT = frozenset({"float-out-of-range"})


@dataclass(frozen=True)
class Kind:
    """One sort of file: its content or how to make it, its ending, and the reasons to refuse it."""

    make: Callable[[np.random.Generator], bytes] | Callable[[Path], None]
    reasons: frozenset[str] = USED
    suffix: str = ".jpg"


def scene(rng, height: int = 0, width: int = 0) -> np.ndarray:
    """A picture of its own: a ramp of colours under noise."""
    height, width = height or int(rng.integers(20, 60)), width or int(rng.integers(20, 60))
    y, x = np.mgrid[:height, :width]
    ramp = np.stack([x * 4 % 200, y * 5 % 200, (x + y) * 3 % 200], axis=2)
    return (ramp + rng.integers(0, 50, ramp.shape)).astype(np.uint8)


def gray(rng) -> np.ndarray:
    return scene(rng)[..., 0]


def jpeg(rng, **options) -> bytes:
    return saved(scene(rng, 48, 56), "JPEG", quality=90, **options)


def cut(kind: str, share: float = 0.5, **options):
    def make(rng) -> bytes:
        data = saved(scene(rng, 48, 56), kind, **options)
        return data[: int(len(data) * share)]

    return make


def flipped(rng) -> bytes:
    """Bits of the Huffman tables turned: no decoder can make sense of the rest."""
    data = bytearray(jpeg(rng))
    start = data.index(b"\xff\xc4") + 5  # behind the marker, the length and the table's number
    for at in rng.choice(16, 12, replace=False):  # how many codes there are of each length
        data[start + at] ^= 0x80
    return bytes(data)


def zeros_in(data: bytes, start: int, count: int) -> bytes:
    return data[:start] + bytes(count) + data[start + count :]


def several(rng, kind: str) -> bytes:
    more = [Image.fromarray(scene(rng, 30, 30)) for _ in range(2)]
    return saved(scene(rng, 30, 30), kind, save_all=True, append_images=more)


def closed(path: Path) -> None:
    """A file that may not be read or, for root who may read all, a link to nothing."""
    if os.geteuid():
        path.touch(mode=0)
    else:
        path.symlink_to("nothing at all")


def noise(rng, count: int = 1) -> bytes:
    return rng.integers(97, 123, count, np.uint8).tobytes()  # letters: the start of no format


REFUSED = {
    "0 bytes": Kind(lambda rng: b"", EMPTY),
    "1 byte": Kind(lambda rng: noise(rng), NONE), "text": Kind(lambda rng: noise(rng, 90), NONE),
    "web page": Kind(lambda rng: b"<!DOCTYPE html><title>404 " + noise(rng, 9), NONE),
    "NUL bytes": Kind(lambda rng: bytes(int(rng.integers(9, 999))), NONE),
    "JPEG header": Kind(lambda rng: jpeg(rng)[:20], CUT),
    "JPEG at 10 %": Kind(cut("JPEG", 0.1), CUT), "JPEG at 50 %": Kind(cut("JPEG"), CUT),
    "JPEG at 99 %": Kind(cut("JPEG", 0.99), CUT), "PNG cut": Kind(cut("PNG"), CUT, ".png"),
    "GIF cut": Kind(cut("GIF"), CUT, ".gif"), "TIFF cut": Kind(cut("TIFF"), CUT, ".tif"),
    "WebP cut": Kind(cut("WEBP", lossless=True), CUT, ".webp"), "JPEG flipped bits": Kind(flipped, CUT),
    "bad IHDR": Kind(lambda rng: zeros_in(saved(scene(rng)), 29, 4), CUT, ".png"),
    "bad IDAT": Kind(lambda rng: zeros_in(saved(scene(rng)), 60, 99), CUT, ".png"),
    "gzip of a JPEG": Kind(lambda rng: gzip.compress(jpeg(rng), mtime=0), OTHER),
    "no width": Kind(lambda rng: png(0, 9, 8, 0, [b""] * 9), ZERO, ".png"),
    "SVG": Kind(lambda rng: b'<?xml version="1.0"?><svg width="%d"/>' % rng.integers(9, 99), OTHER),
    "EPS": Kind(lambda rng: b"%!PS-Adobe-3.0 EPSF-3.0\n%" + noise(rng, 20), OTHER),
    "169 megapixels": Kind(lambda rng: png(13000, 13000, 8, 0, [noise(rng)]), BIG, ".png"),
    "361 megapixels": Kind(lambda rng: png(19000, 19000, 8, 0, [noise(rng)]), BIG, ".png"),
    "10 gigapixels": Kind(lambda rng: png(10**5, 10**5, 8, 0, [noise(rng)]), BIG, ".png"),
    "zTXt bomb": Kind(lambda rng: png(1, 1, 8, 0, [noise(rng)], TEXT), CUT, ".png"),
    "float above 1": Kind(lambda rng: saved(gray(rng).astype(np.float32) + 2, "TIFF"), FLOAT, ".tif"),
    "pipe": Kind(os.mkfifo, frozenset({"not-a-file"})), "closed": Kind(closed, frozenset({"unreadable"})),
}  # fmt: skip
ODD = {
    "CMYK": Kind(lambda rng: saved(scene(rng), "JPEG", "CMYK")),
    "L": Kind(lambda rng: saved(gray(rng), "JPEG")),
    "LA": Kind(lambda rng: saved(scene(rng), mode="LA"), suffix=".png"),
    "RGBA": Kind(lambda rng: saved(scene(rng), mode="RGBA"), suffix=".png"),
    "bilevel": Kind(lambda rng: saved(scene(rng), mode="1"), suffix=".png"),
    "palette": Kind(lambda rng: saved(scene(rng), mode="P"), suffix=".png"),
    "palette, one clear": Kind(lambda rng: saved(scene(rng), mode="P", transparency=3), suffix=".png"),
    "16-bit PNG": Kind(lambda rng: saved(gray(rng).astype(np.uint16) * 256), suffix=".png"),
    "16-bit TIFF": Kind(lambda rng: tiff(9, 8, 16, rng.bytes(144)), suffix=".tif"),
    "on its side": Kind(lambda rng: jpeg(rng, exif=EXIF % 6)),
    "EXIF 9": Kind(lambda rng: jpeg(rng, exif=EXIF % 9)),
    "garbage EXIF": Kind(lambda rng: jpeg(rng, exif=b"Exif\0\0MM\0*\xff\xff")),
    "bad ICC": Kind(lambda rng: jpeg(rng, icc_profile=noise(rng, 9))),
    "bytes behind": Kind(lambda rng: saved(scene(rng)) + noise(rng, 500), suffix=".png"),
    "no IEND": Kind(lambda rng: saved(scene(rng))[:-12], suffix=".png"),
    "PNG named JPEG": Kind(lambda rng: saved(scene(rng))), "JPEG named PNG": Kind(jpeg, suffix=".png"),
    "GIF frames": Kind(lambda rng: several(rng, "GIF"), suffix=".gif"),
    "WebP frames": Kind(lambda rng: several(rng, "WEBP"), suffix=".webp"),
    "TIFF pages": Kind(lambda rng: several(rng, "TIFF"), suffix=".tif"),
    "1 x 1": Kind(lambda rng: saved(scene(rng, 1, 1)), suffix=".png"),
    "1 x 5000": Kind(lambda rng: saved(scene(rng, 5000, 1)), suffix=".png"),
    "20000 x 1": Kind(lambda rng: saved(scene(rng, 1, 20000)), suffix=".png"),
    "text chunk": Kind(lambda rng: png(1, 1, 8, 0, [noise(rng)], chunk(b"tEXt", b"a\0b")), suffix=".png"),
}  # fmt: skip
KINDS = REFUSED | ODD


def write(path: Path, kind: str, seed: int) -> None:
    made = KINDS[kind].make
    if made in (os.mkfifo, closed):
        made(path)
    else:
        path.write_bytes(made(np.random.default_rng([seed, *kind.encode()])))


def fill(folder: Path, good: int, classes: tuple[str, ...] = ("cat", "dog")) -> dict[str, str]:
    """A folder of good files with five of every kind among them; each file's name below it -> its kind."""
    names: dict[str, str] = {}
    for label in classes:
        (folder / label).mkdir(parents=True)
    for n in range(good):
        name = f"{classes[n % len(classes)]}/{n:04d}.jpg"
        (folder / name).write_bytes(jpeg(np.random.default_rng([n, 7])))
        names[name] = "good"
    for number, kind in enumerate(KINDS):
        for seed in SEEDS:
            label = classes[(number + seed) % len(classes)]
            name = f"{label}/{kind.replace(' ', '-')}-{seed}{KINDS[kind].suffix}"
            write(folder / name, kind, seed)
            names[name] = kind
    (folder / classes[0] / "folder.jpg").mkdir()  # named like an image, and holds none
    return names
