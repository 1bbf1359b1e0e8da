"""Batches: the same bits for any number of workers and processes, from any step on."""

import io
import multiprocessing
import os
import signal
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.data.batches import BadFiles, TooManyBad, evaluation_batches, train_batches
from vitkit.data.order import Order
from vitkit.data.sources import Source, from_rows
from vitkit.data.views import View

VIEW = View(size=(24, 20), crop="inception", flip=True, randaugment=(2, 9))


def encoded(number: int, kind: str) -> bytes:
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 255, (30 + number % 7, 41, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def source(bad: tuple[int, ...] = (), count: int = 25) -> Source:
    """Encoded images of several formats; some of them broken."""
    kinds = ("JPEG", "PNG", "WEBP")
    files = {f"{i}": b"broken" if i in bad else encoded(i, kinds[i % 3]) for i in range(count)}
    return from_rows("test", [(name, f"class {int(name) % 4}") for name in files], files.__getitem__)


def take(n: int, **options) -> list[dict[str, torch.Tensor]]:
    data = options.pop("data", None) or source()
    view = options.pop("view", VIEW)
    return list(islice(train_batches(data, view, Order(len(data), 8, seed=3), **options), n))


def equal(a, b) -> bool:
    return all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_no_bit(workers):
    assert equal(take(7), take(7, workers=workers))


def test_a_later_start_gives_the_same_batches():
    assert equal(take(7)[4:], take(3, start=4, workers=2))


def test_processes_share_a_global_batch_by_places():
    whole = take(4)
    parts = [take(4, places=range(rank, 8, 2)) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        for rank in (0, 1):
            assert torch.equal(batch["image"][rank::2], parts[rank][step]["image"])
            assert torch.equal(batch["index"][rank::2], parts[rank][step]["index"])


def test_every_sample_comes_once_an_epoch_with_another_view_each_time():
    batches = take(
        25, view=View(size=(24, 20), crop="inception")
    )  # eight epochs of 25 images, in batches of 8
    stream = torch.cat([b["index"] for b in batches]).tolist()
    for epoch in range(8):
        assert sorted(stream[epoch * 25 : (epoch + 1) * 25]) == list(range(25))
    first = [b["image"][b["index"] == 3] for b in batches]
    views = [image[0] for image in first if len(image)]
    assert len(views) == 8 and not any(torch.equal(views[0], other) for other in views[1:])


def test_a_bad_file_leaves_a_gap_is_named_once_and_nothing_takes_its_place():
    named = []
    bad = BadFiles(0.2, lambda key, why: named.append(key))
    clean = take(10)
    batches = take(10, data=source(bad=(3, 11)), bad=bad, workers=2)
    assert sorted(named) == ["11", "3"] and set(bad.found) == {"11", "3"}
    for good, gapped in zip(clean, batches, strict=True):
        kept = ~torch.isin(good["index"], torch.tensor([3, 11]))
        assert torch.equal(good["image"][kept], gapped["image"])


def test_too_many_bad_files_stop_the_run_with_their_names():
    with pytest.raises(TooManyBad, match=r"2 of 25 images are unusable.*--max-bad"):
        take(10, data=source(bad=(3, 11)), bad=BadFiles(0.05))


@pytest.mark.parametrize("workers", [0, 3])
def test_evaluation_covers_every_image_exactly_once_in_order(workers):
    view = View(size=(16, 16), crop="squash")
    batches = list(evaluation_batches(source(), view, 8, workers=workers))
    assert torch.cat([b["index"] for b in batches]).tolist() == list(range(25))
    shares = [list(evaluation_batches(source(), view, 4, places=slice(rank, None, 3))) for rank in range(3)]
    assert sorted(i for share in shares for b in share for i in b["index"].tolist()) == list(range(25))


def test_an_order_over_other_data_is_refused():
    with pytest.raises(ValueError, match="does not fit a source of 25"):
        next(train_batches(source(), VIEW, Order(24, 8)))


def test_workers_end_with_their_stream_and_do_not_answer_signals():
    before = set(multiprocessing.active_children())
    stream = train_batches(source(), VIEW, Order(25, 8), workers=2)
    next(stream)
    mine = set(multiprocessing.active_children()) - before
    assert len(mine) == 2
    for process in mine:
        os.kill(process.pid, signal.SIGTERM)
    for _ in range(6):
        next(stream)
    stream.close()
    for process in mine:
        process.join(10)
        assert not process.is_alive()
