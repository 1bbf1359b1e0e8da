"""Decoded images: the decoder's pixels, made once, whole or not at all, and errors as without them."""

import errno
import multiprocessing
import os
import re
import shutil
import signal
import time
import zlib
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bad_images import REFUSED, fill, jpeg, scene
from refusals import refused
from test_cli import run
from test_decode import EXIF, ORIENTED, saved
from together import batches, go, losses, small, together

from vitkit.data import decoded_cache as cache
from vitkit.data.decode import BadImage, decode
from vitkit.data.decoded_cache import decoded
from vitkit.data.loader import train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source, digits, from_rows
from vitkit.data.splits import fingerprint, fingerprints, subset
from vitkit.data.views import View, apply
from vitkit.datasets.opening import open_data

forks = multiprocessing.get_context("fork")


def folder_of(root: Path, count: int = 12, kinds: tuple[str, ...] = ("JPEG", "PNG")) -> Path:
    """Images of several sizes in two classes."""
    for number in range(count):
        kind, label = kinds[number % len(kinds)], ("cat", "dog")[number % 2]
        (root / label).mkdir(parents=True, exist_ok=True)
        picture = scene(np.random.default_rng(number), 40 + number % 5, 60)
        (root / label / f"{number:03d}.{kind.lower()}").write_bytes(saved(picture, kind))
    return root


def opened(root: Path) -> Source:
    return open_data(root)["all"]


def outcome(source: Source, number: int) -> np.ndarray | str:
    """The pixels of an image, or why there are none."""
    try:
        content = source.fetch(number)
        return decode(content) if isinstance(content, bytes) else content
    except BadImage as error:
        return f"{error.reason}: {error}"


def same_outcomes(one: Source, other: Source) -> bool:
    result = ([outcome(source, n) for n in range(len(source))] for source in (one, other))
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(*result, strict=True))


def never(*words, **options):
    raise AssertionError("nothing was to be decoded")


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_and_errors_are_those_of_the_decoder_for_every_kind_of_file(tmp_path, workers):
    names = fill(tmp_path / "data", good=3)
    plain = opened(tmp_path / "data")
    kept = decoded(plain, tmp_path / "cache", workers)
    assert len(plain) == len(names) and same_outcomes(plain, kept)
    for number, key in enumerate(kept.keys):
        if names[key] not in REFUSED:
            pixels = kept.fetch(number)
            assert isinstance(pixels, np.ndarray) and not pixels.flags.writeable, key
    assert [fingerprint(plain, n) for n in range(9)] == [fingerprint(kept, n) for n in range(9)]


def test_images_on_their_side_are_kept_upright(tmp_path):
    files = {str(turn): saved(ORIENTED[1], "PNG", exif=EXIF % turn) for turn in ORIENTED}
    source = from_rows("turned", [(name, "one") for name in files], files.__getitem__)
    kept = decoded(source, tmp_path, 0)
    for number, name in enumerate(files):
        assert np.array_equal(kept.fetch(number), decode(files[name]))
    assert {kept.fetch(n).shape for n in range(8)} == {decode(data).shape for data in files.values()}
    assert len({kept.fetch(n).shape for n in range(8)}) == 2


def test_the_second_opening_decodes_nothing(tmp_path, monkeypatch):
    folder_of(tmp_path / "data")
    first = decoded(opened(tmp_path / "data"), tmp_path / "cache", 0)
    monkeypatch.setattr(cache, "decode", never)
    monkeypatch.setattr(cache, "sizes_of", never)
    assert same_outcomes(first, decoded(opened(tmp_path / "data"), tmp_path / "cache", 0))


def test_a_source_of_pixels_is_returned_as_it_is(tmp_path):
    source = digits()
    assert decoded(source, tmp_path / "cache", 2) is source and not (tmp_path / "cache").exists()


def test_changed_added_and_reordered_files_have_pixels_of_their_own(tmp_path):
    root, made = folder_of(tmp_path / "data"), tmp_path / "cache"
    source = opened(root)
    decoded(source, made, 0)
    backwards = source.take(np.arange(len(source))[::-1])
    assert same_outcomes(backwards, decoded(backwards, made, 0))
    (root / "cat" / "000.jpeg").write_bytes(jpeg(np.random.default_rng(99)))
    assert same_outcomes(opened(root), decoded(opened(root), made, 0))
    (root / "cat" / "999.jpg").write_bytes(jpeg(np.random.default_rng(100)))
    assert same_outcomes(opened(root), decoded(opened(root), made, 0))
    assert len(list(made.glob("*.pixels"))) == 4


def slowly(data: bytes) -> np.ndarray:
    time.sleep(0.2)
    return decode(data)


def killed_while_making(root: Path, made: Path, workers: int, monkeypatch) -> None:
    monkeypatch.setattr(cache, "decode", slowly)
    maker = forks.Process(target=decoded, args=(opened(root), made, workers))
    maker.start()
    end = time.monotonic() + 20
    while not any(path.stat().st_size for path in made.glob(".*.partial")):
        assert time.monotonic() < end and maker.is_alive()
        time.sleep(0.01)
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()
    monkeypatch.setattr(cache, "decode", decode)
    assert list(made.glob(".*.partial")) and not list(made.glob("*.pixels"))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_killed_process_leaves_is_removed_and_made_again(tmp_path, workers, monkeypatch):
    """With workers, the next process waits until those of the dead one have noticed."""
    root, made = folder_of(tmp_path / "data"), tmp_path / "cache"
    killed_while_making(root, made, workers, monkeypatch)
    (root / "cat" / "000.jpeg").write_bytes(jpeg(np.random.default_rng(99)))  # so that it has another name
    assert same_outcomes(opened(root), decoded(opened(root), made, 0))
    assert len(list(made.glob("*.pixels"))) == 1 and not list(made.glob(".*.partial"))


def test_two_processes_at_once_make_it_once(tmp_path, monkeypatch):
    root, made, calls = folder_of(tmp_path / "data"), tmp_path / "cache", forks.Value("i")

    def counted(data: bytes) -> np.ndarray:
        with calls.get_lock():
            calls.value += 1
        return slowly(data)

    monkeypatch.setattr(cache, "decode", counted)
    makers = [forks.Process(target=decoded, args=(opened(root), made, 0)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(30)
    assert [maker.exitcode for maker in makers] == [0, 0] and calls.value == 12
    monkeypatch.setattr(cache, "decode", never)
    assert same_outcomes(opened(root), decoded(opened(root), made, 0))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def middle_gone(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:1000] + content[1064:])


def row_changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_flipped_bit_of_the_pixels_is_noticed_named_and_repaired(tmp_path, workers, capfd):
    root, made = folder_of(tmp_path / "data", kinds=("PNG",)), tmp_path / "cache"
    decoded(opened(root), made, 0)
    (path,) = made.glob("*.pixels")
    before = path.read_bytes()
    path.write_bytes(before[:9000] + bytes([before[9000] ^ 1]) + before[9001:])  # in the second image
    capfd.readouterr()
    plain, kept = opened(root), decoded(opened(root), made, 0)
    assert equal(stream(plain), stream(kept, workers)) and same_outcomes(plain, kept)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1 and str(path) in told[0] and repr(plain.keys[1]) in told[0]
    assert path.read_bytes() == before


def test_pixels_are_compared_with_their_checksum_once_a_run_whichever_worker_reads_them(
    tmp_path, monkeypatch
):
    kept, calls = decoded(opened(folder_of(tmp_path / "data")), tmp_path / "cache", 0), []
    monkeypatch.setattr(cache, "zlib", SimpleNamespace(crc32=lambda b: calls.append(1) or zlib.crc32(b)))
    other = forks.Process(target=lambda: [kept.fetch(n) for n in range(len(kept))])
    other.start()
    other.join(30)
    assert other.exitcode == 0 and [kept.fetch(n).ndim for n in range(12)] == [3] * 12 and not calls


def test_a_file_of_an_older_version_is_named_and_not_used(tmp_path):
    source, made, told = opened(folder_of(tmp_path / "data")), tmp_path / "cache", []
    made.mkdir()
    older = made / f"{cache.name_of(source, fingerprints(source).astype('S16'), 1)}.pixels"
    older.write_bytes(b"pixels")
    assert same_outcomes(source, decoded(source, made, 0, log=told.append))
    assert any(str(older) in text for text in told) and older.read_bytes() == b"pixels"


@pytest.mark.parametrize("damage", [cut, empty, middle_gone, row_changed])
def test_a_cut_or_damaged_file_is_made_again(tmp_path, damage):
    root, made = folder_of(tmp_path / "data"), tmp_path / "cache"
    decoded(opened(root), made, 0)
    (path,) = made.glob("*.pixels")
    before = path.read_bytes()
    damage(path)
    assert same_outcomes(opened(root), decoded(opened(root), made, 0)) and path.read_bytes() == before


def test_a_disk_with_too_little_room_is_refused_with_numbers(tmp_path, monkeypatch):
    root, made = folder_of(tmp_path / "data"), tmp_path / "cache"
    real = shutil.disk_usage
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: real(path)._replace(free=50_000))
    monkeypatch.setattr(cache, "decode", never)
    needed = sum(decode(opened(root).fetch(n)).nbytes + cache.ROW.itemsize for n in range(12)) + 32
    with refused("disk.full", made, f"{needed / 1e9:.3g} GB", "5e-05 GB", "--decoded"):
        decoded(opened(root), made, 0)
    assert not list(made.glob("*pixels*"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_disk_that_fills_meanwhile_is_named_and_nothing_is_left(tmp_path, workers, monkeypatch):
    def full(*words):
        raise OSError(errno.ENOSPC, "No space left on device")

    root, made = folder_of(tmp_path / "data"), tmp_path / "cache"
    monkeypatch.setattr(cache.os, "pwrite", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{made}/\w+\.pixels'") as caught:
        decoded(opened(root), made, workers)
    assert "Traceback" not in str(caught.value) and not list(made.glob("*pixels*"))


VIEW = View(size=(24, 20), crop="inception", flip=True, randaugment=(2, 9))


def stream(source: Source, workers: int = 0) -> list[dict[str, torch.Tensor]]:
    return list(islice(train_batches(source, VIEW, Order(len(source), 5, seed=3), workers=workers), 5))


def equal(one: list, other: list) -> bool:
    return all(torch.equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a)


def test_batches_do_not_depend_on_workers_nor_without_jpegs_on_the_cache(tmp_path):
    plain = opened(folder_of(tmp_path / "data", kinds=("PNG", "WEBP", "GIF")))
    kept = decoded(plain, tmp_path / "cache", 2)
    assert equal(stream(plain), stream(kept))
    assert all(equal(stream(kept), stream(kept, workers)) for workers in (1, 2))


def test_jpegs_give_the_same_crops_within_the_rounding_of_their_smaller_decoding(tmp_path):
    y, x = np.mgrid[:300, :400]
    picture = np.stack([x * 0.6, y * 0.8, (x + y) * 0.36], axis=2).astype(np.uint8)
    data = saved(picture, "JPEG", quality=95)
    source = decoded(from_rows("one", [("a", "b")], {"a": data}.__getitem__), tmp_path, 0)
    for seed in range(20):
        view = View(size=(32, 32), crop="inception", flip=True)
        small, whole = (
            apply(content, view, np.random.default_rng(seed)).int() for content in (data, source.fetch(0))
        )
        assert (small - whole).abs().max() <= 8  # another crop of this ramp would differ by dozens


def test_parts_of_a_decoded_source_are_sources(tmp_path):
    plain = opened(folder_of(tmp_path / "data"))
    kept = decoded(plain, tmp_path / "cache", 0)
    some = np.array([7, 2, 2, 11])
    assert same_outcomes(plain.take(some), kept.take(some))
    assert list(kept.take(some).keys) == [plain.keys[i] for i in some]
    assert same_outcomes(subset(plain, count=5), subset(kept, count=5))


TINY = ("--set", "model_options=width=32,depth=1,heads=2,hidden=32", "evaluations=0", "schedule.warmup=1")
MODEL = ("--model", "ViT-Ti/4", "--image-size", 8, "--batch", 8, "--steps", 6, "--max-bad", 0.5)


def test_a_training_names_each_bad_file_once_and_decodes_no_other_twice(tmp_path, capfd, monkeypatch):
    for split in ("train", "test"):
        folder_of(tmp_path / "data" / split, count=40)
    for number, kind in enumerate(("JPEG at 50 %", "text", "no width", "JPEG flipped bits", "0 bytes")):
        content = REFUSED[kind].make(np.random.default_rng(number))
        (tmp_path / "data" / "train" / "cat" / f"bad{number}.jpg").write_bytes(content)
    told = {}
    for name, options in (("plain", ()), ("kept", ("--decoded", tmp_path / "cache"))):
        words = (*options, *MODEL, "--workers", 0, *TINY)
        assert run("finetune", tmp_path / "data", "--out", tmp_path / name, *words) == 0
        told[name] = sorted(re.findall(r"^skipped: .+$", capfd.readouterr().err, re.MULTILINE))
    assert told["plain"] == told["kept"] and len(told["kept"]) == 5
    (path,) = (tmp_path / "cache").glob("*.pixels")
    made, words = path.stat().st_mtime_ns, ("--decoded", tmp_path / "cache", *MODEL, "--workers", 1, *TINY)
    monkeypatch.setattr(cache, "decode", never)
    assert run("finetune", tmp_path / "data", "--out", tmp_path / "again", *words) == 0
    assert path.stat().st_mtime_ns == made
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("kept", "again")]
    assert models[0] == models[1]


@pytest.mark.slow
def test_several_processes_share_what_one_has_made(tmp_path):
    for split in ("train", "test"):
        folder_of(tmp_path / "data" / split, count=40, kinds=("JPEG",))
    recipe = small(12, data=str(tmp_path / "data"))
    for world in (1, 2):
        (tmp_path / str(world)).mkdir()
        options = {"decoded": tmp_path / f"cache-{world}"}
        together(world, go, recipe, tmp_path / str(world), options)
        assert len(list(options["decoded"].glob("*.pixels"))) == 1
    assert batches(tmp_path / "1") == batches(tmp_path / "2")
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=0, abs=1e-5)


def test_a_picture_larger_than_its_header_says_is_left_to_the_decoder(tmp_path, monkeypatch):
    """Whatever a header promises, no image is written over its neighbour."""
    source, real = opened(folder_of(tmp_path / "data")), cache.size_of
    monkeypatch.setattr(cache, "size_of", lambda source, n: real(source, n) - 3 * (n == 4))
    kept = decoded(source, tmp_path / "cache", 0)
    assert isinstance(kept.fetch(4), bytes) and same_outcomes(source, kept)
