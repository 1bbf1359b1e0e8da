"""Prediction of boxes and masks: in pixels of each image, printed, drawn and written to files."""

import csv
import json

import numpy as np
import pytest
import torch
from dense_models import NAMES, detector, photograph, segmenter
from PIL import Image
from refusals import refused
from test_cli import run

import vitkit
from vitkit.data.run_lengths import mask_of, parse_counts
from vitkit.data.views import fitted, normalise
from vitkit.inference.predict import pixels, predict_many
from vitkit.report.target_overlay import class_colour

SIZES = ((40, 90), (97, 33), (32, 48), (8, 8))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Photographs of several sizes in a folder, one of which is broken, and a file of each model."""
    room = tmp_path_factory.mktemp("dense")
    (room / "photos").mkdir()
    for n, size in enumerate(SIZES):
        Image.fromarray(photograph(*size, n)).save(room / "photos" / f"{n}.png")
    (room / "photos" / "broken.png").write_bytes(b"nothing")
    vitkit.save(detector(), room / "detect.safetensors")
    vitkit.save(segmenter(), room / "segment.safetensors")
    return room


def outputs(model, image):
    """The outputs of the model for an image as it is prepared."""
    p = model.preprocessing
    with torch.no_grad():
        return model(normalise(pixels(image, model)[None], p.mean, p.std))[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["fcos", "yolos"])
@pytest.mark.parametrize("resize", ["fit", "squash"])
def test_boxes_are_in_pixels_of_the_image(size, kind, resize):
    model, image = detector(kind=kind), photograph(*size)
    model.preprocessing = model.preprocessing.__class__(resize=resize)
    boxes = vitkit.predict(model, image, reject=0.001)
    rows = outputs(model, image)
    rows = rows[rows[:, 4] >= 0.001]
    assert len(boxes) == len(rows) > 0
    (height, width), view = size, model.config.image_size
    h, w = fitted(size, view) if resize == "fit" else view
    for box, row in zip(boxes, rows, strict=True):
        x0, y0, x1, y1 = row[:4].tolist()
        across, down = view[1] * width / w, view[0] * height / h
        expected = np.clip([x0 * across, y0 * down, x1 * across, y1 * down], 0, [width, height] * 2)
        assert box["box"] == pytest.approx(expected, abs=0.006)
        assert box["label"] == NAMES[int(row[5])] and box["score"] == pytest.approx(float(row[4]))


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_has_the_size_of_the_image_and_its_classes_where_they_are(size):
    model, image = segmenter(), photograph(*size)
    mask = vitkit.predict(model, image)
    assert mask.shape == size and mask.dtype == np.uint8
    maps, (h, w) = outputs(model, image).numpy(), fitted(size, model.config.image_size)
    cell, lines = model.config.cell, []
    for length, own in ((size[0], h), (size[1], w)):
        place = (np.arange(length) + 0.5) * own / length / cell - 0.5
        low = np.floor(place).clip(0).astype(int)
        last = int(np.ceil(own / cell)) - 1
        lines.append((low.clip(max=last), (low + 1).clip(max=last), place.clip(0) - low))
    (top, bottom, down), (left, right, along) = lines
    rows = maps[:, top] * (1 - down)[:, None] + maps[:, bottom] * down[:, None]
    fine = rows[..., left] * (1 - along) + rows[..., right] * along
    first, second = np.sort(fine, 0)[[-1, -2]]
    clear = first - second > 1e-3
    assert clear.mean() > 0.9 and np.array_equal(mask[clear], fine.argmax(0)[clear])


def test_several_images_are_as_each_alone_and_so_are_files(room):
    for model in (detector(), segmenter()):
        images = [photograph(*size, n) for n, size in enumerate(SIZES)]
        together = vitkit.predict(model, images)
        files = [str(room / "photos" / f"{n}.png") for n in range(len(SIZES))]
        for image, one, file in zip(images, together, predict_many(model, files, batch=3), strict=True):
            alone = vitkit.predict(model, image)
            if model.task == "segment":
                assert (one == alone).mean() > 0.999 and (file.answer.value == alone).mean() > 0.999
            else:
                assert [b["label"] for b in one] == [b["label"] for b in alone]
                for box, other, read in zip(one, alone, file.answer.value, strict=True):
                    assert box["box"] == pytest.approx(other["box"], abs=0.02)
                    assert box["box"] == pytest.approx(read["box"], abs=0.02)


def test_reject_is_the_least_score_of_a_box():
    model, image = detector(), photograph(40, 90)
    scores = [box["score"] for box in vitkit.predict(model, image, reject=0.001)]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    least = scores[len(scores) // 2]
    assert [box["score"] for box in vitkit.predict(model, image, reject=least)] == [
        score for score in scores if score >= least
    ]
    with refused("model.unsupported"):
        vitkit.predict(model, image, reject=True)
    with refused("model.unsupported"):
        vitkit.predict(segmenter(), image, reject=0.5)


@pytest.mark.parametrize("options", [{"tta": "flip"}, {"merge_tokens": 1}, {"labels": ["cat"]}])
def test_what_needs_a_classifier_is_refused(options):
    for model in (detector(), segmenter()):
        with refused("model.unsupported"):
            vitkit.predict(model, photograph(8, 8), **options)


def predicted(capsys, *words):
    code = run("predict", *words, "--device", "cpu")
    return code, capsys.readouterr()


def test_json_has_boxes_and_masks(room, capsys):
    code, said = predicted(capsys, room / "detect.safetensors", room / "photos", "--json")
    rows = {row["image"]: row for row in json.loads(said.out)}
    assert code == 1 and "error" in rows[str(room / "photos" / "broken.png")]
    got = rows[str(room / "photos" / "0.png")]["detections"]
    expected = vitkit.predict(room / "detect.safetensors", room / "photos" / "0.png")
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        assert one["label"] == other["label"] and one["box"] == pytest.approx(other["box"], abs=0.02)
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
    code, said = predicted(capsys, room / "segment.safetensors", room / "photos" / "0.png", "--json")
    (row,) = json.loads(said.out)
    assert row["size"] == [40, 90] and sum(one["share"] for one in row["classes"]) == pytest.approx(1)
    mask = vitkit.predict(room / "segment.safetensors", room / "photos" / "0.png")
    for one in row["classes"]:
        there = mask_of(parse_counts(one["mask"]["counts"], ""), tuple(one["mask"]["size"]))
        assert np.array_equal(there, mask == one["class"])


def test_masks_pictures_and_coco_results_are_written(room, tmp_path, capsys):
    photos = room / "photos"
    code, _ = predicted(
        capsys, room / "segment.safetensors", photos, "--masks", tmp_path / "m", "--draw", tmp_path / "d"
    )
    assert code == 1 and sorted(p.name for p in (tmp_path / "m").iterdir()) == [f"{n}.png" for n in range(4)]
    written = Image.open(tmp_path / "m" / "0.png")
    assert np.array_equal(np.asarray(written), vitkit.predict(segmenter(), photos / "0.png"))
    assert written.mode == "P" and tuple(written.getpalette()[:3]) == class_colour(0)
    assert Image.open(tmp_path / "d" / "1.png").size[0] == 33
    out = tmp_path / "boxes.json"
    predicted(capsys, room / "detect.safetensors", photos, "--coco", out, "--draw", tmp_path / "b", "--csv")
    boxes = json.loads(out.read_text())
    assert {box["file_name"] for box in boxes} == {f"{n}.png" for n in range(4)}
    assert {box["image_id"] for box in boxes} == {1, 2, 3, 4}  # broken.png is the fifth
    expected = vitkit.predict(room / "detect.safetensors", photos / "2.png", reject=0.0)
    assert len(expected) == sum(box["image_id"] == 3 for box in boxes) > 0
    for box, one in zip((box for box in boxes if box["image_id"] == 3), expected, strict=True):
        x0, y0, x1, y1 = one["box"]
        assert box["bbox"] == pytest.approx([x0, y0, x1 - x0, y1 - y0], abs=0.02)
        assert NAMES[box["category_id"] - 1] == one["label"]
    drawn = np.asarray(Image.open(tmp_path / "b" / "0.png"))
    assert drawn.shape == (40, 90, 3) and (drawn != photograph(40, 90)).any()


@pytest.mark.parametrize(
    "model, words",
    [
        ("detect", ["--masks", "new"]),
        ("segment", ["--coco", "new.json"]),
        ("detect", ["--sort-into", "new"]),
        ("detect", ["--unsure-below", "0.5"]),
        ("detect", ["--draw", "PHOTOS"]),
        ("detect", ["--out", "new.csv", "--draw", "new"]),
    ],
)
def test_outputs_that_make_no_sense_are_refused(room, tmp_path, model, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(room / "photos") if word == "PHOTOS" else word for word in words]
    code, said = predicted(capsys, room / f"{model}.safetensors", room / "photos", *words, "--json")
    assert code == 2 and json.loads(said.out)["error"]["code"] == "request.conflict"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["detect", "segment"])
def test_a_table_has_the_same_answers(room, tmp_path, model, capsys):
    out = tmp_path / "t.csv"
    assert predicted(capsys, room / f"{model}.safetensors", room / "photos", "--out", out)[0] == 1
    rows = {row["image"].rpartition("/")[2]: row for row in csv.DictReader(out.open())}
    one = next(predict_many(vitkit.load(room / f"{model}.safetensors"), [str(room / "photos" / "0.png")]))
    answer = json.loads(rows["0.png"]["answer"])
    if model == "detect":
        assert [box["box"] for box in answer["detections"]] == [
            pytest.approx(box["box"], abs=0.02) for box in one.answer.value
        ]
    else:
        assert answer["size"] == [40, 90]
    assert rows["broken.png"]["error"] and not rows["broken.png"]["answer"]
