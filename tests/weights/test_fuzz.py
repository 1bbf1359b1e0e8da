"""Sound weight files with random damage: each one loads or is refused, and no other error comes out."""

import io
import random
import re
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import vitkit

TRIES = 400
SIZES = {"width": 32, "depth": 1, "heads": 2, "hidden": 32, "image_size": 32, "classes": 3}
NUMBERS = [
    b"0",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b'"x"',
    b"[]",
    b"{}",
    b"0.5",
    b"7" * 20,
    b"9" * 400,
]
NUMBERS += [str(2**power).encode() for power in (16, 31, 32, 62, 63, 64)]


def place(rng: random.Random, data: bytes) -> int:
    """Anywhere, but mostly near an end, where files keep what describes the rest."""
    edge = rng.randrange(min(len(data), 4000) + 1)
    return rng.choice([edge, len(data) - edge, rng.randrange(len(data) + 1)])


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, lost, put in, repeated, or the rest cut off."""
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, length = place(rng, data), rng.choice([1, 2, 4, 30])
        piece = rng.choice([rng.randbytes(length), bytes(length), b"\xff" * length, data[at - 40 : at]])
        overwritten, cut = data[:at] + piece + data[at + len(piece) :], data[:at]
        data = rng.choice([overwritten, overwritten, cut + piece + data[at:], cut + data[at + length :], cut])
    return data


def renumbered(rng: random.Random, data: bytes) -> bytes:
    """Another number, or something that is none, in the place of one."""
    numbers = list(re.finditer(rb"(?<=[ :(\[,])-?\d[\d.e-]*", data))
    if not numbers:
        return damaged(rng, data)
    result = rng.choice(numbers)
    return data[: result.start()] + rng.choice(NUMBERS) + data[result.end() :]


def hurt_inside(rng: random.Random, data: bytes) -> bytes:
    """Damage to one part in a container that is whole: lengths and checksums fit."""
    hurt = rng.choice([damaged, renumbered])
    if not data.startswith(b"PK"):
        end = 8 + int.from_bytes(data[:8], "little")
        header = hurt(rng, data[8:end])
        return len(header).to_bytes(8, "little") + header + data[end:]
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        victim = rng.choice([names[0], rng.choice(names), None])
        for name in names:
            new.writestr(name, hurt(rng, old.read(name)) if name == victim else old.read(name))
        new.comment = old.comment if victim else hurt(rng, old.comment or b"{}")
    return out.getvalue()


def fuzzed(folder: Path, name: str, tries: int) -> tuple[Counter[str], list[str]]:
    """How often a damaged file was loaded or refused, and whatever else came out."""
    path = folder / name
    model = vitkit.build("ViT-Ti/16", seed=0, **SIZES)
    vitkit.save(model, path, format="timm" if path.suffix == ".pth" else None)
    good, outcomes, leaks = path.read_bytes(), Counter[str](), []
    for seed in range(tries):
        rng = random.Random(seed)
        path.write_bytes(rng.choice([damaged, hurt_inside])(rng, good))
        try:
            vitkit.load(path, heads=SIZES["heads"])
            outcomes["loaded"] += 1
        except vitkit.WeightsError:
            outcomes["refused"] += 1
        except BaseException as error:
            leaks.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    return outcomes, leaks


NAMES = ["own.safetensors", "official.npz", "timm.pth"]


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_loads_or_is_refused_and_nothing_else(tmp_path: Path, name: str):
    outcomes, leaks = fuzzed(tmp_path, name, TRIES)
    assert not leaks, "\n".join(leaks)
    assert outcomes["loaded"] and outcomes["refused"] > TRIES / 2, outcomes
