"""Every kind of image file gives the right pixels or a BadImage with the right reason, and nothing else."""

import os
import pickle
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pytest
from PIL import Image

from vitkit.data import decode as decoder
from vitkit.data.decode import BadImage, decode, read

H, W = 40, 56
Y, X = np.mgrid[:H, :W]
SCENE = np.stack([X * 4, Y * 5, 220 - X * 2 - Y], axis=2).astype(np.uint8)
SCENE += np.random.default_rng(0).integers(0, 16, SCENE.shape, np.uint8)
GRAY, ALPHA = (X * 3 + Y * 2).astype(np.uint8), (255 - Y * 6).astype(np.uint8)
DEEP = (GRAY.astype(np.uint16) << 8) + 77
EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0%c\0\0\0\0\0\0"
ORIENTED = {
    1: SCENE, 2: np.fliplr(SCENE), 3: np.rot90(SCENE, 2), 4: np.flipud(SCENE), 5: np.rot90(np.fliplr(SCENE)),
    6: np.rot90(SCENE, -1), 7: np.rot90(np.flipud(SCENE)), 8: np.rot90(SCENE),
}  # fmt: skip


def saved(pixels=SCENE, kind="PNG", mode=None, **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width, height, depth, colour, rows, *before):
    head = chunk(b"IHDR", struct.pack(">IIBB3x", width, height, depth, colour))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + bytes(row) for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + pixels + chunk(b"IEND", b"")


def tiff(width, height, bits, body, order="<", **more):
    """One strip, as it lies; numbers of tags over the usual ones."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 0, 277: 1, 278: height, 279: len(body)}
    tags |= {int(name[1:]): value for name, value in more.items()}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    rows = [struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())]
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HIH", 42, 8, len(tags))
    return head + b"".join(rows) + bytes(4) + body


def on_white(colour, alpha):
    return colour * (alpha / 255) + 255 - alpha


def lab_to_rgb(lightness, a, b):  # CIE Lab under D50 to sRGB
    fy = (lightness + 16) / 116
    f = np.stack([fy + a / 500, fy, fy - b / 200], axis=2)
    xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * [0.9642, 1.0, 0.8249]
    to_rgb = [[3.1339, -1.6169, -0.4906], [-0.9788, 1.9161, 0.0335], [0.0719, -0.2290, 1.4052]]
    linear = np.clip(xyz @ np.array(to_rgb).T, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def modes():
    """Name, file, what its pixels are by hand."""
    index, table = GRAY // 4, (np.arange(192) * 37 % 256).astype(np.uint8).reshape(64, 3)
    palette = Image.fromarray(index)
    palette.putpalette(table.tobytes())
    clear = np.where(np.arange(64) % 2, 255, 60).astype(np.uint8)
    planes = np.stack([X * 2 + 60, Y * 2 + 80, 200 - Y * 2, GRAY // 2], axis=2).astype(np.uint8)
    cmyk = saved(Image.frombytes("CMYK", (W, H), planes.tobytes()), "JPEG", quality=100, subsampling=0)
    transform = cmyk.index(b"Adobe") + 11
    ycck = cmyk[:transform] + b"\2" + cmyk[transform + 1 :]
    y, cb, cr, k = (255.0 - planes).transpose(2, 0, 1) - [[[0]], [[128]], [[128]], [[0]]]
    ycc = np.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], axis=2).clip(0, 255)
    lab = np.stack([(X + 30) * 255 // 100, (Y - 20) % 256, (10 - Y // 2) % 256], axis=2).astype(np.uint8)
    rgb16 = png(W, H, 16, 2, [row.tobytes() for row in (SCENE.astype(int) * 256 + 99).astype(">u2")])
    rgba, clear_scene = np.dstack([SCENE, ALPHA]), on_white(SCENE, ALPHA[..., None])
    raw, high, ink = DEEP.astype("<u2").tobytes(), DEEP >> 8, k[..., None] / 255
    return {
        "L": (saved(GRAY), GRAY), "LA": (saved(np.dstack([GRAY, ALPHA])), on_white(GRAY, ALPHA)),
        "1": (saved(GRAY > 99), (GRAY > 99) * 255), "P": (saved(palette), table[index]),
        "P+tRNS": (saved(palette, transparency=clear.tobytes()), on_white(table, clear[:, None])[index]),
        "RGBA": (saved(rgba), clear_scene), "RGBA webp": (saved(rgba, "WEBP", lossless=True), clear_scene),
        "CMYK": (cmyk, (255.0 - planes[..., :3]) * ink), "YCCK": (ycck, (255 - ycc) * ink),
        "I;16": (saved(DEEP), high), "I;16 tiff": (tiff(W, H, 16, raw), high),
        "I;16B": (tiff(W, H, 16, DEEP.astype(">u2").tobytes(), ">"), high),
        "I;16 white is zero": (tiff(W, H, 16, raw, t262=0), 255 - high),
        "I;12": (tiff(2, 1, 12, b"\xff\xf1\x23"), [[255, 18]]), "I": (saved(np.int32(DEEP), "TIFF"), high),
        "F": (saved(np.float32(GRAY / 255), "TIFF"), GRAY), "RGB16": (rgb16, SCENE),
        "Lab": (tiff(W, H, 8, lab.tobytes(), t262=8, t277=3), lab_to_rgb(X + 30, Y - 20, 10 - Y // 2)),
        "L4 key": (png(2, 1, 4, 0, [b"\x3a"], chunk(b"tRNS", b"\0\3")), [[255, 170]]),
        "I;16 key": (png(2, 1, 16, 0, [b"\1\2\3\4"], chunk(b"tRNS", b"\1\2")), [[255, 3]]),
        "RGB key": (png(2, 1, 8, 2, [b"abcddd"], chunk(b"tRNS", b"\0a\0b\0c")), [[255, 100]]),
    }  # fmt: skip


MODES = modes()
JPEG, PROGRESSIVE = saved(kind="JPEG", quality=90), saved(kind="JPEG", quality=90, progressive=True)
PNG, SCAN, LAST = saved(), JPEG.index(b"\xff\xda"), PROGRESSIVE.rindex(b"\xff\xda")
FRAMES = {"save_all": True, "append_images": [Image.fromarray(SCENE[::-1])]}
SEEDS = {
    "JPEG": JPEG, "progressive": PROGRESSIVE, "rotated": saved(kind="JPEG", exif=EXIF % 6), "PNG": PNG,
    "palette": MODES["P+tRNS"][0], "WEBP": saved(kind="WEBP"), "lossless": saved(kind="WEBP", lossless=True),
    "BMP": saved(kind="BMP"), "TIFF": saved(kind="TIFF"), "GIF": saved(kind="GIF"), "CMYK": MODES["CMYK"][0],
    "lzw": saved(kind="TIFF", compression="tiff_lzw"), "frames": saved(kind="GIF", **FRAMES),
}  # fmt: skip
CUT, SIZE, BIG = {"truncated", "damaged"}, struct.pack(">HH", H, W), {"too-many-pixels"}
NONE, OTHER, FLOAT = {"not-an-image"}, {"unsupported-format"}, {"float-out-of-range"}
TILE = {"t259": 8, "t322": 20000, "t323": 20000, "t324": 150, "t325": 9}
VP8X = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\0\xff\xff\0"
TEXT = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7)))
REFUSED = {
    "0 bytes": (b"", {"empty"}), "1 byte": (b"\xff", NONE), "text": (b"hi", NONE), "nuls": (bytes(99), NONE),
    "html": (b"<!DOCTYPE html><title>404</title>", NONE), "header only": (JPEG[:20], {"truncated"}),
    "header, no scan": (JPEG[:SCAN], {"truncated"}), "without its last byte": (JPEG[:-1], {"truncated"}),
    **{f"{kind} cut at {part}": (file[: int(len(file) * part)], CUT)
       for kind, file in SEEDS.items() for part in (0.1, 0.5, 0.9) if (kind, part) != ("frames", 0.9)},
    "99 %": (JPEG[: len(JPEG) * 99 // 100], {"truncated"}), "gzip": (zlib.compress(JPEG, wbits=31), OTHER),
    "bad IHDR CRC": (PNG[:29] + b"nope" + PNG[33:], CUT), "bad IDAT": (PNG[:60] + bytes(99) + PNG[159:], CUT),
    "SVG": (b'<?xml?><svg width="9"/>', OTHER), "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n", OTHER),
    "no width": (png(0, 9, 8, 0, [b""] * 9), {"zero-size", "damaged"}),
    "no height": (JPEG.replace(SIZE, b"\0\0" + SIZE[2:]), {"zero-size"}), "huge WebP": (VP8X, BIG),
    "169 megapixels": (png(13000, 13000, 8, 0, []), BIG), "361 MP": (png(19000, 19000, 8, 0, []), BIG),
    "10 gigapixels": (png(10**5, 10**5, 8, 0, []), BIG), "huge TIFF": (tiff(60000, 60000, 8, b"abc"), BIG),
    "huge JPEG": (JPEG.replace(SIZE, b"\xff" * 4), BIG), "huge tile": (tiff(1, 1, 8, bytes(9), **TILE), BIG),
    "huge GIF": (b"GIF89a" + b"\xff" * 4 + SEEDS["GIF"][10:], BIG),
    "huge BMP": (SEEDS["BMP"][:18] + b"\0\0\1\0\0\0\1\0" + SEEDS["BMP"][26:], BIG),
    "zTXt bomb": (png(1, 1, 8, 0, [b"a"], TEXT), CUT), "no strip": (tiff(9, 9, 8, bytes(45), t278=5), CUT),
    "scan bomb": (PROGRESSIVE[:-2] + PROGRESSIVE[LAST:-2] * 3000 + b"\xff\xd9", CUT),
    "> 1": (saved(np.float32(GRAY), "TIFF"), FLOAT), "NaN": (saved(np.float32(Y * np.nan), "TIFF"), FLOAT),
    "int above 16 bits": (saved(np.int32(DEEP) * 9, "TIFF"), {"int-out-of-range"}),
}  # fmt: skip
TALL, WIDE = np.zeros((5000, 1, 3), np.uint8), np.zeros((1, 20000, 3), np.uint8)
FIXED = {
    "bad EXIF value": (saved(exif=EXIF % 9), SCENE), "bad ICC": (saved(icc_profile=b"none"), SCENE),
    "garbage EXIF": (saved(exif=b"Exif\0\0MM\0*\xff\xff"), SCENE), "no IEND": (PNG[:-12], SCENE),
    "trailing garbage": (PNG + b"garbage" * 99, SCENE), "BMP": (saved(kind="BMP"), SCENE),
    "GIF frames": (saved(GRAY, "GIF", save_all=True, append_images=[Image.fromarray(ALPHA)]), GRAY),
    "WebP frames": (saved(kind="WEBP", lossless=True, **FRAMES), SCENE), "1x5000": (saved(TALL), TALL),
    "TIFF pages": (saved(kind="TIFF", **FRAMES), SCENE), "BMP with palette": (saved(GRAY, "BMP"), GRAY),
    "EXIF after the pixels": (PNG[:-12] + chunk(b"eXIf", EXIF[6:] % 6) + PNG[-12:], ORIENTED[6]),
    "TIFF on its side": (saved(kind="TIFF", tiffinfo={274: 6}), ORIENTED[6]), "20000x1": (saved(WIDE), WIDE),
    "1x1": (saved(SCENE[:1, :1]), SCENE[:1, :1]), "bytes after": (JPEG + b"\xff\xda" * 300, decode(JPEG)),
    "stray bytes": (JPEG[:-2] + bytes(20) + JPEG[-2:], decode(JPEG)),
    "padding": (JPEG[:2] + b"\xff\xff\xff" + JPEG[2:], decode(JPEG)),
}  # fmt: skip
NOISY = np.tile(SCENE, (5, 5, 1))[:187, :251]
VARIETIES = {
    f"{mode} {sampling} {way}": saved(NOISY, "JPEG", mode, progressive=way != "plain", subsampling=sampling)
    for way in ("plain", "progressive") for mode in ("RGB", "L") for sampling in ("4:4:4", "4:2:2", "4:2:0")
} | {"stored as RGB": saved(NOISY, "JPEG", keep_rgb=True)}  # fmt: skip
PHOTO, SCANS = VARIETIES["RGB 4:2:0 plain"], VARIETIES["RGB 4:2:0 progressive"].split(b"\xff\xda")
DAMAGED = {  # inside the compressed pixels
    "cut, then ended": PHOTO[: len(PHOTO) * 3 // 4] + b"\xff\xd9",
    "overwritten": b"\xff\xda".join([*SCANS[:2], SCANS[2][:99] + b"flip" * 15 + SCANS[2][159:], *SCANS[3:]]),
}


@pytest.fixture(params=["simplejpeg", "Pillow"])
def path(request, monkeypatch):  # both ways through a JPEG
    if request.param == "Pillow":
        monkeypatch.setattr(decoder, "simplejpeg", None)
    assert decoder.simplejpeg or request.param == "Pillow", "these tests need simplejpeg"


def distance(pixels, reference):
    assert pixels.shape == (*np.shape(reference)[:2], 3) and pixels.dtype == np.uint8
    colours = np.broadcast_to(np.atleast_3d(np.asarray(reference, float)), pixels.shape)
    assert pixels.flags.c_contiguous and pixels.flags.writeable
    return np.abs(pixels - colours).mean()


def refusal(function, *arguments, **options):
    with pytest.raises(BadImage) as caught:
        function(*arguments, **options)
    return caught.value


@pytest.mark.parametrize("name", REFUSED)
def test_bad_files_are_refused_with_their_reason(name, path, recwarn):
    error = refusal(decode, REFUSED[name][0])
    assert error.reason in REFUSED[name][1]
    assert 0 < len(str(error)) <= 200 and "\n" not in str(error)
    assert not [w for w in recwarn if issubclass(w.category, Image.DecompressionBombWarning)]
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, str(again)) == (error.reason, str(error))


@pytest.mark.parametrize("name", DAMAGED)
def test_simplejpeg_notices_damage_that_pillow_passes_over(name, monkeypatch):
    assert refusal(decode, DAMAGED[name]).reason in CUT
    monkeypatch.setattr(decoder, "simplejpeg", None)
    assert decode(DAMAGED[name]).shape == NOISY.shape


@pytest.mark.parametrize("name", MODES | FIXED)
def test_odd_files_have_the_pixels_computed_by_hand(name, path):
    data, reference = (MODES | FIXED)[name]
    assert distance(decode(data), reference) <= (0 if name in FIXED else 1 if name.startswith("I") else 2)


@pytest.mark.parametrize("orientation", ORIENTED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_comes_upright(kind, orientation, path):
    options = {"exif": EXIF % orientation, "lossless": True, "quality": 100, "subsampling": 0}
    assert distance(decode(saved(kind=kind, **options)), ORIENTED[orientation]) <= (kind == "JPEG")


@pytest.mark.control("vitkit.data.decode._rgb")
@pytest.mark.parametrize("name", ["I;16", "F", "RGBA", "P+tRNS"])
def test_control_pillows_own_conversion_gives_other_pixels(name, switched_off):
    switched_off("vitkit.data.decode._rgb", lambda image: np.array(image.convert("RGB")))
    with pytest.raises(AssertionError):
        test_odd_files_have_the_pixels_computed_by_hand(name, None)


@pytest.mark.control("vitkit.data.decode._orientation")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_control_without_its_orientation_a_photo_is_not_upright(kind, switched_off):
    switched_off("vitkit.data.decode._orientation", lambda exif: 1)
    test_a_photo_comes_upright(kind, 1, None)
    with pytest.raises(AssertionError):
        test_a_photo_comes_upright(kind, 6, None)


@pytest.mark.parametrize("name", VARIETIES)
def test_simplejpeg_and_pillow_give_the_same_bits(name, monkeypatch):
    full, half = decode(VARIETIES[name]), decode(VARIETIES[name], shorter=90)
    box = full[:186, :250].reshape(93, 2, 125, 2, 3).mean(axis=(1, 3))
    assert full.shape == (187, 251, 3) and half.shape == (94, 126, 3)
    assert np.abs(half[:93, :125] - box).mean() < 4, "a reduced decode is the reduced image"
    monkeypatch.setattr(decoder, "simplejpeg", None)
    assert np.array_equal(full, decode(VARIETIES[name]))
    assert np.array_equal(half, decode(VARIETIES[name], shorter=90))


@pytest.mark.parametrize("shorter, side", [(None, 187), (0, 187), (94, 187), (93, 94), (46, 47), (1, 24)])
def test_a_reduced_decode_is_never_below_the_hint(shorter, side, path):
    assert min(decode(PHOTO, shorter=shorter).shape[:2]) == side >= (shorter or 0)
    assert decode(PNG, shorter=5).shape == SCENE.shape


def test_limits_and_formats_are_the_callers():
    assert decode(PNG, max_pixels=H * W).shape == SCENE.shape
    assert refusal(decode, PNG, max_pixels=H * W - 1).reason == "too-many-pixels"
    assert refusal(decode, PNG, formats=("JPEG", "WEBP")).reason == "unsupported-format"


def test_threads_give_what_one_thread_gives():
    files = list(SEEDS.values())[:8] * 5
    with ThreadPoolExecutor(4) as pool:
        assert all(map(np.array_equal, pool.map(decode, files), map(decode, files)))


def test_only_ordinary_readable_files_are_read(tmp_path):
    good, big, closed, fifo = (tmp_path / name for name in ("good.txt", "big.jpg", "closed.jpg", "fifo.jpg"))
    good.write_bytes(PNG)
    closed.write_bytes(PNG)
    closed.chmod(0)
    os.mkfifo(fifo)
    with big.open("wb") as file:
        file.truncate(decoder.MAX_BYTES + 1)
    assert read(good) == PNG and np.array_equal(decode(read(str(good))), SCENE)
    cases = {tmp_path: "not-a-file", fifo: "not-a-file", "/dev/zero": "not-a-file", big: "too-large"}
    cases |= dict.fromkeys((closed, tmp_path / "none", "a\0b"), "unreadable")
    user, opened, start = os.geteuid(), len(os.listdir("/proc/self/fd")), time.monotonic()
    for file, reason in cases.items():
        os.seteuid(65534 if file == closed and user == 0 else user)  # to root nothing is closed
        try:
            assert refusal(read, file).reason == reason
        finally:
            os.seteuid(user)
    assert time.monotonic() - start < 5 and len(os.listdir("/proc/self/fd")) == opened


def mutant(data, rng):
    """One to eight changes: a bit, a number, a piece lost, doubled, zeroed or swapped; now and then a cut."""
    for _ in range(rng.integers(1, 9)):
        at = int(rng.integers(min(len(data), rng.choice([64, 10**6])) + 1))
        size, bit, change = (int(rng.integers(bound)) for bound in (40, 8, 6))
        piece = data[at : at + size + 1]
        number = int(rng.choice([0, 1, 2**15, 2**31, 2**32 - 1])).to_bytes(4, rng.choice(["big", "little"]))
        flipped = bytes(b ^ 1 << bit for b in piece[:1]) + piece[1:]
        new = (flipped, number[-len(piece) :], b"", piece * 2, bytes(len(piece)), piece[::-1])[change]
        data = data[:at] + new + data[at + len(piece) :]
    return data[: int(rng.integers(len(data) + 1))] if rng.random() < 0.1 else data


def fuzzed(monkeypatch, *, most, seconds):
    """What became of damaged files, and the seconds and megabytes that the worst of them took."""
    rng, slowest, outcomes, files = np.random.default_rng(7), 0.0, [], list(SEEDS.values())
    start, fast, memory = time.monotonic(), decoder.simplejpeg, getrusage(RUSAGE_SELF).ru_maxrss
    while len(outcomes) < most and time.monotonic() - start < seconds:
        monkeypatch.setattr(decoder, "simplejpeg", fast if rng.random() < 0.5 else None)
        data, began = mutant(files[len(outcomes) % len(files)], rng), time.monotonic()
        try:
            outcomes.append(decode(data, max_pixels=2_000_000).dtype.name)
        except BadImage as error:
            outcomes.append(error.reason)
        slowest = max(slowest, time.monotonic() - began)
    return outcomes, slowest, (getrusage(RUSAGE_SELF).ru_maxrss - memory) / 1024


@pytest.mark.filterwarnings("ignore")
def test_thousands_of_damaged_files_raise_nothing_but_bad_image(monkeypatch):
    outcomes, slowest, grown = fuzzed(monkeypatch, most=4000, seconds=12)
    assert len(outcomes) > 300 and 0.05 < outcomes.count("uint8") / len(outcomes) < 0.95
    assert slowest < 2 and grown < 300
