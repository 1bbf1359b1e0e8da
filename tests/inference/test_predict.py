"""Prediction of many images: in order, as they come, decoded beside the model, never many in memory."""

import threading
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from PIL import Image

import vitkit
from vitkit.commands import predict as tasks
from vitkit.inference import predict as predicting
from vitkit.inference.predict import Prediction, predict_many
from vitkit.tasks.classify import Ranking


@pytest.fixture
def pictures(tmp_path):
    """Twenty pictures, two of them broken, and one name without a file."""
    rng, names = np.random.default_rng(0), []
    for n in range(20):
        names.append(str(tmp_path / f"{n:02d}.png"))
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(names[-1])
    for n in (4, 11):
        (tmp_path / f"{n:02d}.png").write_bytes(b"nothing")
    return [*names, str(tmp_path / "none.png")]


def test_many_are_told_as_each_alone(small, pictures):
    model = small()
    done: list[int] = []
    result = list(predict_many(model, pictures, top=3, batch=4, advance=lambda: done.append(1)))
    assert [p.image for p in result] == pictures and len(done) == len(pictures)
    assert [n for n, p in enumerate(result) if p.error] == [4, 11, 20]
    for p in result:
        if not p.error:
            alone = vitkit.predict(model, p.image, top=3)
            assert [label for label, _ in p.top] == [label for label, _ in alone]
            assert [c for _, c in p.top] == pytest.approx([c for _, c in alone], abs=1e-5)


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_any_batch_and_number_of_threads_gives_the_same(small, pictures, batch):
    model, bad = small(), [pictures[4], pictures[11]]
    assert [p.error != "" for p in predict_many(model, bad, batch=batch)] == [True, True]
    assert list(predict_many(model, [], batch=batch)) == []
    twice = [list(predict_many(model, pictures, batch=batch, threads=t)) for t in (1, 3)]
    assert twice[0] == twice[1]


def test_the_first_is_told_before_the_last_is_read(small, pictures, monkeypatch):
    """Of names without end, never more than two batches are taken ahead of what was told."""
    taken, opened, told = count(), [], 0
    real = predicting.from_file
    monkeypatch.setattr(predicting, "from_file", lambda name, *rest: opened.append(1) or real(name, *rest))
    endless = (pictures[next(taken) % 4] for _ in count())
    stream = predict_many(small(), endless, batch=4)
    for _ in range(30):
        assert next(stream).top
        told += 1
        assert len(opened) <= told + 2 * 4
    stream.close()
    assert next(taken) <= told + 2 * 4
    assert not [t for t in threading.enumerate() if "ThreadPool" in t.name and t.is_alive()]


def test_the_next_batch_is_decoded_while_the_model_works(small, pictures, monkeypatch):
    began, real, model = threading.Event(), predicting.from_file, small()

    def from_file(name, model, tta):
        if name == pictures[2]:  # of the second batch
            began.set()
        return real(name, model)

    def logits(model, images, real=predicting.logits):
        assert began.wait(20), "nothing was decoded beside the model"
        return real(model, images)

    monkeypatch.setattr(predicting, "from_file", from_file)
    monkeypatch.setattr(predicting, "logits", logits)
    assert len(list(predict_many(model, pictures[:4], batch=2))) == 4


def test_an_error_of_ours_is_not_taken_for_a_bad_image(small, pictures, monkeypatch):
    def broken(name, model, tta):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(predicting, "from_file", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        list(predict_many(small(), pictures))


@pytest.mark.parametrize("csv", [False, True])
def test_the_command_tells_each_when_it_is_done(small, pictures, monkeypatch, capsys, csv):
    def slowly(model, images, **options):
        for n, image in enumerate(images):
            if n:
                captured = capsys.readouterr()
                assert f"{n - 1}.png" in captured.out or f"{n - 1}.png: broken" in captured.err
            yield (
                Prediction(image, error="broken") if n == 1 else Prediction(image, Ranking((("cat", 0.75),)))
            )

    monkeypatch.setattr(tasks, "load_model", lambda place, device, view, text: small())
    monkeypatch.setattr(tasks, "predict_many", slowly)
    assert tasks.predict("m", tuple(pictures[:3]), 5, "cpu", csv=csv, emit=None) is False
    assert ",cat,0.75" in (out := capsys.readouterr().out) or "cat 75.0 %" in out


@pytest.mark.parametrize("size", [(16, 24), (24, 16), (16, 16)])
def test_a_centre_crop_of_any_shape_lies_within_the_resized_picture(small, pictures, size):
    model = small(image_size=size)
    model.preprocessing = replace(model.preprocessing, resize="crop", crop=0.875)
    assert len(vitkit.predict(model, pictures[0])) > 0
