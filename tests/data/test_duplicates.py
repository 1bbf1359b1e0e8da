"""Training images that stand in a test set: found by their pixels and by their looks, and no others."""

import io

import numpy as np
import pytest
from PIL import Image

from vitkit.data.duplicates import against
from vitkit.data.sources.source import from_rows


def photo(number: int) -> Image.Image:
    """A smooth random picture, so that hashes have something to tell."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 255, (9, 12, 3), dtype=np.uint8))
    return small.resize((160, 120), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def source(name: str, images: dict[str, bytes]):
    return from_rows(name, [(key, "x") for key in images], images.__getitem__)


@pytest.fixture
def sets():
    train = source("train", {f"t{i}": encoded(photo(i)) for i in range(40)} | {"broken": b"no image"})
    first = source("first", {
        "other": encoded(photo(100)), "same as t3": encoded(photo(3), "WEBP", lossless=True),
        "bad": b"no image", "jpeg of t7": encoded(photo(7), "JPEG", quality=60),
    })  # fmt: skip
    second = source("second", {
        "small t9": encoded(photo(9).resize((80, 60))), "t3 again": encoded(photo(3)),
        "light t11": encoded(photo(11).point(lambda v: min(255, v * 9 // 10 + 10))),
    })  # fmt: skip
    return train, first, second


@pytest.mark.parametrize("workers", [1, 3])
def test_copies_are_found_with_what_they_are_copies_of(sets, workers):
    train, *others = sets
    output = []
    kept, removed = against(train, others, workers=workers, advance=output.append)
    assert [(one.key, one.reason, one.match) for one in removed] == [
        ("t3", "same pixels", "first:same as t3"),
        ("t7", "looks alike", "first:jpeg of t7"),
        ("t9", "looks alike", "second:small t9"),
        ("t11", "looks alike", "second:light t11"),
    ]
    gone = [one.number for one in removed]
    assert kept.tolist() == [i for i in range(41) if i not in gone] and sum(output) == 41 + 4 + 3
    assert "broken" in train.take(kept).keys


def test_by_pixels_alone(sets):
    train, *others = sets
    kept, removed = against(train, others, near=False)
    assert [one.key for one in removed] == ["t3"] and len(kept) == 40


def test_nothing_to_compare_with(sets):
    train, first, _ = sets
    assert against(train, [])[1] == []
    nothing = first.take(np.array([2]))  # which cannot be read
    kept, removed = against(train, [nothing])
    assert len(kept) == 41 and removed == []
    empty = train.take(np.array([], dtype=int))
    kept, removed = against(empty, [first])
    assert len(kept) == 0 and removed == []


def test_pixels_in_memory(sets):
    from vitkit.data.sources.source import digits

    data = digits()
    kept, removed = against(data.take(np.arange(100)), [data.take(np.arange(95, 200))])
    assert {one.number for one in removed} >= set(range(95, 100)) and len(kept) + len(removed) == 100
    assert all(one.reason == "same pixels" for one in removed)  # too small to have looks
