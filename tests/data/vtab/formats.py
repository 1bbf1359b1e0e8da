"""Small files in the formats in which VTAB's data sets are published, made by rules a test can repeat."""

import gzip
import io
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.datasets.pixel_files import NORB_FILES, SPRITES
from vitkit.datasets.tfrecord import masked_crc


def picture(number: int, kind: str = "PNG", size: tuple[int, int] = (6, 8)) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((*size, 3), number % 256, np.uint8)).save(out, kind)
    return out.getvalue()


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cifar100(root: Path, train: int = 2000, test: int = 40) -> None:
    """Image i is of class i % 100, and its red, green and blue are constant."""
    for split, count in (("train", train), ("test", test)):
        rows = np.empty((count, 3074), np.uint8)
        rows[:, 0], rows[:, 1] = 7, np.arange(count) % 100
        rows[:, 2:] = np.repeat((np.arange(count)[:, None] + np.array([0, 50, 100])) % 256, 1024, axis=1)
        put(root / f"{split}.bin", rows.tobytes())


def svhn(root: Path, train: int = 2000, test: int = 30, compressed: bool = True) -> None:
    from scipy.io import savemat

    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        images = np.zeros((32, 32, 3, count), np.uint8)
        images[1, 2] = np.arange(count) % 256
        labels = (np.arange(count) % 10 + 1)[:, None].astype(np.float64)
        savemat(root / f"{split}_32x32.mat", {"X": images, "y": labels}, do_compression=compressed)


def flowers102(root: Path, count: int = 30) -> None:
    from scipy.io import savemat

    for i in range(1, count + 1):
        put(root / "jpg" / f"image_{i:05d}.jpg", picture(i, "JPEG"))
    savemat(root / "imagelabels.mat", {"labels": np.arange(count)[None] % 5 + 1.0})
    numbers = np.arange(1, count + 1)
    parts = {"trnid": numbers[:10], "valid": numbers[10:20], "tstid": numbers[20:]}
    savemat(root / "setid.mat", {name: part[None].astype(np.uint16) for name, part in parts.items()})


def matrix(values: np.ndarray) -> bytes:
    """NORB's own format."""
    magic = {"u1": 0x1E3D4C55, "i4": 0x1E3D4C54}[values.dtype.str[1:]]
    sides = values.shape + (1,) * (3 - values.ndim)
    return struct.pack(f"<Ii{len(sides)}i", magic, values.ndim, *sides) + values.tobytes()


def smallnorb(root: Path, train: int = 900, test: int = 500, zipped: bool = False) -> None:
    """Instance 4, elevation i % 9, azimuth 2 * (i % 18), lighting i % 6; both cameras see a number."""
    for split, count in (("train", train), ("test", test)):
        i = np.arange(count)
        images = np.zeros((count, 2, 96, 96), np.uint8)
        images[:, 0], images[:, 1] = (i % 200)[:, None, None], 255
        info = np.stack([0 * i + 4, i % 9, 2 * (i % 18), i % 6], axis=1).astype(np.int32)
        for part, values in (("dat", images), ("info", info), ("cat", (i % 5).astype(np.int32))):
            content = matrix(values)
            name = f"{NORB_FILES[split]}-{part}.mat"
            put(root / (name + ".gz" * zipped), gzip.compress(content, 1) if zipped else content)


class Trap:
    """What a pickled member of an archive could do."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def dsprites(root: Path, count: int = 1280, trap: Path | None = None) -> None:
    """Orientation i % 40, x i % 32, and a pixel set for each; the metadata is pickled, as published."""
    i = np.arange(count)
    images = np.zeros((count, 64, 64), np.uint8)
    images[i, i % 64, i // 64] = 1
    latents = np.stack([0 * i, i % 3, i % 6, i % 40, i % 32, i // 32 % 32], axis=1)
    root.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        root / SPRITES, imgs=images, latents_classes=latents, latents_values=latents / 2.0,
        metadata=np.array(Trap(trap or root / "trap"), dtype=object),
    )  # fmt: skip


def clevr(root: Path, scenes: dict[str, list[list[float]]]) -> None:
    """Depths of the objects of each scene of train and val."""
    for word, depths in scenes.items():
        output = []
        for i, objects in enumerate(depths):
            name = f"CLEVR_{word}_{i:06d}.png"
            put(root / "images" / word / name, picture(i))
            things = [{"size": "small", "pixel_coords": [10, 20, depth]} for depth in objects]
            output.append({"image_index": i, "image_filename": name, "objects": things})
        put(root / "scenes" / f"CLEVR_{word}_scenes.json", json.dumps({"scenes": output}))


def kitti_line(kind: str, z: float) -> str:
    return f"{kind} 0.00 0 -1.58 587.01 173.33 614.12 200.12 1.65 1.67 3.64 -0.65 1.71 {z} -1.59"


def kitti(root: Path, scenes: list[list[tuple[str, float]]], videos: int = 20) -> None:
    """Objects of each image; image i is of video i % videos, through a list that is turned around."""
    for i, objects in enumerate(scenes):
        put(root / "training/image_2" / f"{i:06d}.png", picture(i))
        text = "\n".join(kitti_line(*one) for one in objects)
        put(root / "training/label_2" / f"{i:06d}.txt", text + "\n")
    count = len(scenes)
    lines = [f"2011_09_26 2011_09_26_drive_{i % videos:04d}_sync {i:010d}" for i in range(count)]
    put(root / "mapping/train_mapping.txt", "\n".join(reversed(lines)) + "\n")
    put(root / "mapping/train_rand.txt", ",".join(str(count - i) for i in range(count)))


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(packed: bool = True, **features: bytes | int) -> bytes:
    """A tf.train.Example."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, int):
            listed = field(1, varint(value)) if packed else varint(1 << 3) + varint(value)
            feature = field(3, listed)
        else:
            feature = field(1, field(1, value))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def record(content: bytes) -> bytes:
    head = struct.pack("<Q", len(content))
    return head + struct.pack("<I", masked_crc(head)) + content + struct.pack("<I", masked_crc(content))


def dmlab(root: Path, train: int = 20, others: int = 6) -> None:
    """Frame i is of class i % 6; train lies in two files, and numbers are packed in every second example."""
    for split, count in (("train", train), ("validation", others), ("test", others)):
        result = [
            record(example(i % 2 == 0, image=picture(i, "JPEG"), filename=b"%05d.jpg" % i, label=i % 6))
            for i in range(count)
        ]
        parts = [result[: count // 2], result[count // 2 :]] if split == "train" else [result]
        for number, part in enumerate(parts):
            name = f"dmlab-{split}.tfrecord-{number:05d}-of-{len(parts):05d}"
            put(root / name, b"".join(part))
