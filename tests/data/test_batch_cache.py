"""Batches that are kept: the same as made ones, whoever made them; damage and lack of room cost only time."""

import shutil
from itertools import islice

import numpy as np
import pytest
import torch

from vitkit.data.batch_cache import RESERVED_FILE, keep_batches, reserved_space
from vitkit.data.decode import BadImage
from vitkit.data.loader import BadFiles, Worker, evaluation_batches, train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.views import View

VIEW = View(size=(16, 16), crop="inception", flip=True)


@pytest.fixture
def kept(tmp_path):
    keep_batches(tmp_path / "batches")
    yield tmp_path / "batches"
    keep_batches(None)


def source(images: int = 40, *, bad: int | None = None, shift: int = 0) -> Source:
    def fetch(i: int) -> np.ndarray:
        if i == bad:
            raise BadImage("broken", "as it happens")
        return np.random.default_rng(i + shift).integers(0, 256, (20, 24, 3), dtype=np.uint8)

    labels = np.arange(images) % 4
    return Source("made", ("a", "b", "c", "d"), [f"{i + shift}" for i in range(images)], labels, fetch)


def refused(what: object) -> np.ndarray:
    raise AssertionError("nothing is to be made")


def taken(of: Source, view: View = VIEW, seed: int = 0, workers: int = 0, steps: int = 6, bad=None):
    order = Order(len(of), 8, seed)
    return list(islice(train_batches(of, view, order, workers=workers, bad=bad), steps))


def same(one, other) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_kept_is_what_would_be_made(tmp_path, workers):
    plain, tested = taken(source()), list(evaluation_batches(source(), VIEW, 16))
    keep_batches(tmp_path)
    try:
        assert same(taken(source(), workers=workers), plain)
        list(evaluation_batches(source(), VIEW, 16))
        shown = Source(**(source().__dict__ | {"fetch": refused}))
        assert same(taken(shown), plain)
        assert same(list(evaluation_batches(shown, VIEW, 16)), tested)
    finally:
        keep_batches(None)


def test_where_all_are_kept_no_process_is_started(kept, monkeypatch):
    plain, tested = taken(source()), list(evaluation_batches(source(), VIEW, 16))
    monkeypatch.setattr(Worker, "start", refused)
    order = Order(40, 8)
    assert same(list(train_batches(source(), VIEW, order, stop=6, workers=2)), plain)
    assert same(list(evaluation_batches(source(), VIEW, 16, workers=2)), tested)
    with pytest.raises(AssertionError, match="nothing is to be made"):
        list(train_batches(source(), VIEW, order, stop=7, workers=2))


def test_other_views_seeds_and_images_have_batches_of_their_own(kept):
    plain = taken(source())
    others = [
        taken(source(), view=View(size=(16, 16), crop="inception")), taken(source(), seed=1),
        taken(source(shift=5)), taken(source(39)),
    ]  # fmt: skip
    assert all(not torch.equal(other[0]["image"], plain[0]["image"]) for other in others)


def test_a_batch_with_an_unusable_image_is_made_each_time_and_told_each_time(kept):
    for _ in range(2):
        result = BadFiles(allowed=1.0)
        batches = taken(source(bad=3), steps=5, bad=result)
        assert list(result.reasons) == ["3"]
        assert sorted(len(batch["image"]) for batch in batches) == [7, 8, 8, 8, 8]


def test_a_damaged_file_is_made_again(kept):
    plain = taken(source())
    for path in kept.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert same(taken(source()), plain)


def test_a_flipped_bit_is_noticed_and_the_batch_made_again(kept):
    plain = taken(source())
    whole = {path: path.read_bytes() for path in kept.glob("*/*")}
    for path, content in whole.items():
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    assert same(taken(source()), plain)
    assert {path: path.read_bytes() for path in kept.glob("*/*")} == whole


def batches(folder) -> set:
    return set(folder.glob("*/*"))


def test_half_of_what_was_free_stays_free(kept):
    before = shutil.disk_usage(kept.parent).free
    taken(source())
    assert batches(kept)
    assert int((kept / RESERVED_FILE).read_text()) == pytest.approx(
        before / 2, rel=0.2
    )  # others use the disk, too


def test_whoever_comes_later_leaves_as_much_free_as_the_first(tmp_path):
    """Else each would halve what the one before has left."""
    assert [reserved_space(tmp_path, free) for free in (1000, 600, 510, 2000)] == [500] * 4


def test_nothing_more_is_kept_when_room_has_run_out(kept):
    plain, there = taken(source()), batches(kept)
    (kept / RESERVED_FILE).write_text(str(shutil.disk_usage(kept).total))
    taken(source(), seed=1, workers=2)
    assert batches(kept) == there
    assert same(taken(source()), plain)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    plain = taken(source())
    keep_batches(tmp_path / "file")
    try:
        assert same(taken(source()), plain)
    finally:
        keep_batches(None)
