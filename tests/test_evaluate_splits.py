"""Evaluation never counts training images by accident, whatever they are called and wherever they lie."""

import gzip
import json
import shutil

import numpy as np
import pytest
from page_reader import Page, words_of
from PIL import Image
from refusals import refused
from test_cli import run
from test_tasks import TINY

import vitkit
from vitkit.data.splits import complete
from vitkit.datasets.opening import open_data

CLASSES = ("cat", "dog", "emu")


def paint(folder, count, seed):
    """So many images of each class, no two alike."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = rng.integers(0, 90, (8, 8, 3), dtype=np.uint8) + 80 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{seed}-{i}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("data") / "photos", 20, 0)


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "photos"
    assert run("finetune", photos, "--out", out, *TINY, "--json") == 0
    return out


def evaluated(capsys, *words) -> dict:
    capsys.readouterr()
    assert run("evaluate", *words, "--workers", 0, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_two_outputs_with_one_label_are_refused_and_the_named_remedy_works(photos, small, tmp_path, capsys):
    model = small(classes=4)
    model.labels = (*CLASSES, "dog")
    vitkit.save(model, file := tmp_path / "m.safetensors")
    with refused("evaluation.classes", "'dog'", "labels="):
        vitkit.evaluate(str(file), str(photos))
    vitkit.save(vitkit.load(file, labels=[*CLASSES, "wolf"]), file)
    assert evaluated(capsys, file, photos, "--split", "all")["images"] == 60


def test_the_same_data_is_evaluated_on_the_test_images_of_the_run(trained, photos, capsys):
    stored = json.loads((trained / "result.json").read_text())["test"]
    for split in ((), ("--split", "test")):
        result = evaluated(capsys, trained, photos, *split)
        assert result["split"] == "test" and result["images"] == stored["images"] == 6
        assert result["top1"] == stored["top1"] and result["loss"] == pytest.approx(stored["loss"], rel=1e-5)
        assert result["counted"] == {"test": 6} and result["not_counted"] == {"train": 48, "val": 6}
        assert result["matched_by"] == "content"
    for split, images in (("train", 48), ("val", 6)):
        result = evaluated(capsys, trained, photos, "--split", split)
        assert result["images"] == images and result["counted"] == {split: images}


def test_all_images_are_counted_only_where_that_is_asked_for_and_apart(trained, photos, capsys):
    result = evaluated(capsys, trained, photos, "--split", "all")
    assert result["images"] == 60 and result["counted"] == {"train": 48, "val": 6, "test": 6}
    parts = result["parts"]
    assert {use: row["images"] for use, row in parts.items()} == result["counted"]
    right = sum(row["images"] * row["top1"] for row in parts.values())
    assert right == pytest.approx(60 * result["top1"])
    assert run("evaluate", trained, photos, "--split", "all", "--workers", 0) == 0
    output = capsys.readouterr().out
    assert "48 images used for training" in output and "6 images kept for testing" in output


def test_moved_and_renamed_images_are_known_by_their_content(trained, photos, tmp_path, capsys):
    for name in CLASSES:
        (tmp_path / "other" / name).mkdir(parents=True)
        for i, path in enumerate(sorted((photos / name).iterdir())):
            shutil.copy(path, tmp_path / "other" / name / f"photo {i}.png")
    result = evaluated(capsys, trained, tmp_path / "other")
    assert result["counted"] == {"test": 6} and result["not_counted"] == {"train": 48, "val": 6}
    assert evaluated(capsys, trained / "model.safetensors", tmp_path / "other")["images"] == 6


def test_new_data_is_all_test_and_what_overlaps_with_training_is_left_out_and_counted(
    trained, photos, tmp_path, capsys
):
    fresh = paint(tmp_path / "fresh", 5, 1)
    result = evaluated(capsys, trained, fresh)
    assert result["counted"] == {"new": 15} and result["not_counted"] == {} and result["images"] == 15
    train = complete(open_data(photos))["train"]
    for key in train.keys[:4]:
        shutil.copy(photos / key, fresh / key.split("/")[0] / f"again-{key.split('/')[1]}")
    result = evaluated(capsys, trained, fresh)
    assert (
        result["counted"] == {"new": 15} and result["not_counted"] == {"train": 4} and result["images"] == 15
    )
    assert run("evaluate", trained, fresh, "--workers", 0) == 0
    assert "left out: 4 images used for training" in capsys.readouterr().out


def test_added_images_are_counted_with_the_test_images_and_shown_apart(trained, photos, tmp_path, capsys):
    grown = shutil.copytree(photos, tmp_path / "grown")
    paint(grown, 3, 2)
    result = evaluated(capsys, trained, grown)
    assert result["counted"] == {"test": 6, "new": 9} and result["not_counted"] == {"train": 48, "val": 6}
    assert {use: row["images"] for use, row in result["parts"].items()} == {"test": 6, "new": 9}


def test_splits_that_the_data_names_hold_for_new_images_only(trained, photos, tmp_path, capsys):
    paint(tmp_path / "data" / "test", 4, 3)
    paint(tmp_path / "data" / "train", 6, 4)
    assert evaluated(capsys, trained, tmp_path / "data")["counted"] == {"new": 12}
    result = evaluated(capsys, trained, tmp_path / "data", "--split", "train")
    assert result["counted"] == {"new": 18} and result["split"] == "train"
    train = complete(open_data(photos))["train"]
    shutil.copy(photos / train.keys[0], tmp_path / "data" / "test" / train.keys[0].split("/")[0] / "x.png")
    result = evaluated(capsys, trained, tmp_path / "data", "--split", "test")
    assert result["counted"] == {"new": 12} and result["not_counted"] == {"train": 1}


def test_nothing_left_to_test_on_is_an_error_with_the_numbers(trained, photos, tmp_path, capsys):
    train = complete(open_data(photos))["train"]
    for key in train.keys:
        (tmp_path / "seen" / key).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / key, tmp_path / "seen" / key)
    assert run("evaluate", trained, tmp_path / "seen") == 2
    output = capsys.readouterr().err
    assert (
        "48 images used for training" in output
        and "--split all" in output
        and str(tmp_path / "seen") in output
    )
    assert run("evaluate", trained, photos, "--split", "tset") == 2
    assert "'tset'" in (output := capsys.readouterr().err) and "train, val, test or all" in output


def without_content(trained, tmp_path):
    """The run as an older version has written it."""
    old = shutil.copytree(trained, tmp_path / "old")
    lines = gzip.decompress((old / "data.json.gz").read_bytes()).decode().split("\n")
    rows = json.loads(lines[1])
    assert all(row.pop("marks") for row in rows.values())
    (old / "data.json.gz").write_bytes(gzip.compress("\n".join([lines[0], json.dumps(rows)]).encode()))
    return old


def test_an_older_run_knows_the_same_data_and_warns_of_other_data(trained, photos, tmp_path, capsys):
    old = without_content(trained, tmp_path)
    result = evaluated(capsys, old, photos)
    assert result["counted"] == {"test": 6} and result["matched_by"] == "data"
    fresh = paint(tmp_path / "fresh", 3, 5)
    assert run("evaluate", old, fresh, "--workers", 0, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["images"] == 9 and json.loads(out)["matched_by"] is None
    warned = [line for line in err.splitlines() if str(old) in line]
    assert len(warned) == 1 and "data.json.gz" in warned[0]
    (old / "data.json.gz").unlink()
    assert run("evaluate", old, photos, "--workers", 0, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["images"] == 60 and str(old) in err


def test_a_model_out_of_its_run_folder_is_evaluated_with_a_warning(trained, photos, tmp_path, capsys):
    shutil.copy(trained / "model.safetensors", tmp_path / "moved.safetensors")
    assert run("evaluate", tmp_path / "moved.safetensors", photos, "--workers", 0, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["images"] == 60 and "moved.safetensors is not in a run folder" in err


def test_data_with_a_test_split_of_its_own_is_remembered_too(tmp_path, capsys):
    for name, count, seed in (("train", 8, 6), ("test", 3, 7)):
        paint(tmp_path / "data" / name, count, seed)
    assert run("finetune", tmp_path / "data", "--out", tmp_path / "run", *TINY, "--json") == 0
    assert evaluated(capsys, tmp_path / "run", tmp_path / "data")["counted"] == {"test": 9}
    assert evaluated(capsys, tmp_path / "run", tmp_path / "data" / "test")["counted"] == {"test": 9}
    result = evaluated(capsys, tmp_path / "run", tmp_path / "data", "--split", "val")
    assert result["counted"] == {"val": 3}  # which the run has split off train
    assert run("evaluate", tmp_path / "run", tmp_path / "data" / "train") == 2
    assert "21 images used for training" in capsys.readouterr().err


def test_a_protocol_folder_knows_the_images_of_its_seeds(photos, tmp_path, capsys):
    assert run("finetune", photos, "--out", tmp_path / "p", *TINY, "--protocol", "--seeds", 1, "--json") == 0
    result = evaluated(capsys, tmp_path / "p", photos)
    assert result["counted"] == {"test": 6} and result["not_counted"] == {"train": 54}


def test_the_bias_of_a_run_is_measured_on_images_that_it_was_not_trained_on(
    trained, photos, tmp_path, capsys
):
    capsys.readouterr()
    words = ("--bias", photos, "--out", tmp_path / "bias", "--cells", 2, "--shifts", 1, "--json")
    assert run("inspect", trained, *words) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 6


def test_the_command_of_the_report_evaluates_the_test_images(trained, photos, capsys):
    page = words_of(Page((trained / "report.html").read_text("utf-8")).root)
    assert f"vitkit evaluate {trained} {photos}" in page
    assert run("evaluate", trained, photos, "--workers", 0) == 0
    assert "of 6 test images correct" in capsys.readouterr().out


def test_only_classes_that_occur_or_are_predicted_are_printed(small, tmp_path, capsys):
    from vitkit.weights.save import save

    model = small(classes=200)
    model.labels = (*CLASSES, *(f"kind {i}" for i in range(197)))
    save(model, tmp_path / "many.safetensors")
    data = paint(tmp_path / "data", 4, 8)
    result = evaluated(capsys, tmp_path / "many.safetensors", data)
    assert len(result["per_class"]) == 200
    predicted = {name for name, row in result["per_class"].items() if row["predicted"]}
    assert sum(row["predicted"] for row in result["per_class"].values()) == 12
    assert run("evaluate", tmp_path / "many.safetensors", data, "--workers", 0) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in {*CLASSES, *predicted})
    assert output.count("kind ") == len(predicted - set(CLASSES)) <= 12
