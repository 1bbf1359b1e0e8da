"""Batches: the same bits for any number of workers and processes, from any step on; views of files too."""

import io
import multiprocessing
import os
import signal
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from vitkit.data import decode as decoder
from vitkit.data import views
from vitkit.data.decode import BadImage, decode, decode_box, jpeg_size
from vitkit.data.loader import BadFiles, evaluation_batches, train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source, from_rows
from vitkit.data.views import CROPS, RESIZED, View, apply, fitted

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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_ends_them_and_none_is_made_beyond_it(workers):
    assert equal(take(7), take(99, stop=7, workers=workers))
    assert equal(take(7)[4:], take(99, start=4, stop=7, workers=workers))


def test_a_batch_holds_what_each_of_its_places_gives_alone():
    data, order = source(), Order(25, 8, seed=3)
    for step, batch in enumerate(take(7)):
        assert batch["index"].tolist() == [order.sample(step, place) for place in range(8)]
        for place, image in enumerate(batch["image"]):
            content = data.fetch(order.sample(step, place))
            assert torch.equal(image, apply(content, VIEW, order.rng(step, place)))


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
    assert sorted(named) == ["11", "3"] and set(bad.reasons) == {"11", "3"}
    for good, gapped in zip(clean, batches, strict=True):
        kept = ~torch.isin(good["index"], torch.tensor([3, 11]))
        assert torch.equal(good["image"][kept], gapped["image"])


def test_too_many_bad_files_stop_the_run_with_their_names():
    with refused("data.too-many-bad", "2 of 25", "--max-bad"):
        take(10, data=source(bad=(3, 11)), bad=BadFiles(0.05))


@pytest.mark.parametrize("workers", [0, 3])
def test_evaluation_covers_every_image_exactly_once_in_order(workers):
    view = View(size=(16, 16), crop="squash")
    batches = list(evaluation_batches(source(), view, 8, workers=workers))
    assert torch.cat([b["index"] for b in batches]).tolist() == list(range(25))
    shares = [list(evaluation_batches(source(), view, 4, places=slice(rank, None, 3))) for rank in range(3)]
    assert sorted(i for share in shares for b in share for i in b["index"].tolist()) == list(range(25))


def test_an_order_over_other_data_is_refused():
    with refused("request.value", 24, 25):
        next(train_batches(source(), VIEW, Order(24, 8)))


def test_workers_end_with_their_stream_and_do_not_answer_signals():
    before = set(multiprocessing.active_children())
    stream = train_batches(source(), VIEW, Order(25, 8), workers=2)
    for _ in range(2):  # one from each worker, so that both are ready for signals
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


def natural(height: int, width: int) -> np.ndarray:
    """Random, but as smooth as photographs are: the strength of a wave falls with its frequency."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)) + 1e-3
    waves = [np.exp(2j * np.pi * rng.random(frequency.shape)) / frequency**1.5 for _ in range(4)]
    planes = np.stack([np.fft.irfft2(waves[0] + wave / 2, (height, width)) for wave in waves[1:]], axis=2)
    return np.clip(128 + 50 * planes / planes.std(), 0, 255).astype(np.uint8)


def jpeg(pixels: np.ndarray, orientation: int = 1, **options) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[274] = orientation
    Image.fromarray(pixels).save(file, "JPEG", quality=90, exif=exif, **options)
    return file.getvalue()


SCENE = natural(595, 803)  # no multiples of 2, 4, 8 or 16
KINDS = {
    "4:2:0": {"subsampling": "4:2:0"}, "4:2:2": {"subsampling": "4:2:2"}, "4:4:4": {"subsampling": "4:4:4"},
    "progressive": {"progressive": True}, "restarts": {"restart_marker_rows": 2},
}  # fmt: skip


@pytest.fixture(params=["simplejpeg", "Pillow"])
def path(request, monkeypatch):  # both ways through a JPEG
    if request.param == "Pillow":
        monkeypatch.setattr(decoder, "simplejpeg", None)
    assert decoder.simplejpeg or request.param == "Pillow", "these tests need simplejpeg"
    return request.param


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().mean().item()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_view_of_a_file_is_that_of_its_pixels_though_less_is_decoded(orientation, path, monkeypatch):
    scales = set()

    def noted(*given):
        pixels, box = decode_box(*given)
        scales.add(given[1][3] / box[3])
        return pixels, box

    monkeypatch.setattr(views, "decode_box", noted)
    file = jpeg(SCENE, orientation)
    full = decode(file)
    assert jpeg_size(file) == full.shape[:2] == ((595, 803) if orientation < 5 else (803, 595))
    for crop in CROPS:
        view = View(size=(56, 48), crop=crop, flip=True, resize=100 if crop in RESIZED else None)
        h, w = fitted(full.shape[:2], view.size) if crop == "fit" else view.size  # without padding
        for seed in range(6):
            drawn, drawn_in_full, elsewhere = (np.random.default_rng(seed) for _ in range(3))
            seen, exact = apply(file, view, drawn), apply(full, view, drawn_in_full)
            assert drawn.bit_generator.state == drawn_in_full.bit_generator.state
            seen, exact = seen[:, :h, :w], exact[:, :h, :w]
            assert distance(seen, exact) <= 2
            moved = apply(np.roll(full, (4, 4), (0, 1)), view, elsewhere)
            assert distance(moved[:, :h, :w], exact) > 4
    assert scales == {2, 4, 8}


def test_a_box_is_reduced_only_as_long_as_nothing_is_enlarged_from_it(path):
    file = jpeg(SCENE)
    for height, scale in ((99, 1), (100, 2), (199, 2), (200, 4), (399, 4), (400, 8)):
        pixels, box = decode_box(file, (7, 9, height, 500), (50, 50))
        assert pixels.shape[1] == -(-803 // scale) and box == tuple(n / scale for n in (7, 9, height, 500))
    tiny, view = jpeg(SCENE[:60, :60]), View(size=(56, 48), crop="inception")
    for seed in range(9):
        results = [apply(content, view, np.random.default_rng(seed)) for content in (tiny, decode(tiny))]
        assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1, 2, 8])
def test_rows_below_a_box_are_left_out_and_no_bit_changes(kind, scale, path):
    file = jpeg(SCENE, **KINDS[kind])
    for height in (128, 135, 136, 143, 144, 145):
        box = (16, 8, height, 720)
        pixels, found = decode_box(file, box, (height // scale, 720 // scale))
        assert (len(pixels) < 600 // scale // 2) == (kind not in ("progressive", "restarts"))
        whole = decode(file, shorter=595 // scale)
        last, right = -(-(16 + height) // scale), 728 // scale
        assert found == tuple(side / scale for side in box)
        assert np.array_equal(pixels[16 // scale : last, :right], whole[16 // scale : last, :right])


def test_damage_is_noticed_down_to_the_box(path):
    file = jpeg(SCENE)
    broken = file[: len(file) // 2] + b"\xff\xd9"  # about 300 of 595 rows
    above, below = (0, 0, 150, 803), (300, 0, 295, 803)
    assert np.array_equal(decode_box(broken, above, None)[0][:150], decode(file)[:150])
    with pytest.raises(BadImage, match="truncated"):
        decode_box(broken[:-2], above, None)
    if path == "simplejpeg":  # Pillow passes over it
        for box in (below, None):
            with pytest.raises(BadImage):
                decode_box(broken, box, None)


def test_damaged_files_raise_nothing_but_bad_image(path):
    rng, outcomes = np.random.default_rng(3), []
    file, view = np.frombuffer(jpeg(SCENE[:90, :120], 6), np.uint8), View(size=(24, 20), crop="inception")
    for seed in range(600):
        broken = file.copy()
        broken[rng.integers(rng.choice([200, len(file)]), size=rng.integers(1, 5))] = rng.integers(256)
        try:
            outcomes.append(tuple(apply(broken.tobytes(), view, np.random.default_rng(seed)).shape))
        except BadImage as error:
            outcomes.append(error.reason)
    assert 0.05 < outcomes.count((3, 24, 20)) / 600 < 0.95


def test_neither_workers_nor_the_decoder_change_a_bit_of_reduced_photos(monkeypatch):
    files = {f"{i}": jpeg(np.roll(SCENE, i * 50, axis=1), 1 + i % 8) for i in range(9)}
    photos = from_rows("photos", [(name, "a") for name in files], files.__getitem__)
    plain = take(3, data=photos)
    assert equal(plain, take(3, data=photos, workers=2))
    monkeypatch.setattr(decoder, "simplejpeg", None)
    assert equal(plain, take(3, data=photos))
