"""What a person reads of predictions, which of them are unsure, and images sorted into folders."""

import csv
import io
import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import run

import vitkit
from vitkit.commands.predict import folder_name, folder_names
from vitkit.report.terminal import prediction_line, prediction_rows, predictions_text, probability_text

LABELS = ("dark, night", "bright/day")


@pytest.fixture
def model(small, tmp_path):
    """Black pictures are dark for sure, white ones bright, and for gray ones neither."""
    made = small(classes=2)
    made.labels = LABELS
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
        made.project.weight.fill_(1.0)
        made.encoder.norm.weight.fill_(0.0)
        made.head.bias.copy_(torch.tensor([0.2, 0.0]))
    vitkit.save(made, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "again").mkdir(parents=True)
    for n, name in enumerate(("a.png", "b.png", "again/a.png")):
        Image.fromarray(np.full((8, 8, 3), 60 * n, np.uint8)).save(folder / name)
    (folder / "broken.png").write_bytes(b"nothing")
    os.utime(folder / "a.png", (1_000_000_000, 1_000_000_000))
    return folder


def test_probabilities_read_as_per_cent_and_labels_do_not_run_together():
    assert [probability_text(p) for p in (0.105, 0.0, 1.0, 0.0004, 0.9996, 0.0005, 0.5)] == [
        "10.5 %", "<0.1 %", ">99.9 %", "<0.1 %", ">99.9 %", "0.1 %", "50.0 %",
    ]  # fmt: skip
    answers = (("tabby, tabby cat", 0.105), ("tiger cat", 0.031), ("lynx", 0.01))
    assert predictions_text(answers) == "tabby, tabby cat 10.5 %; tiger cat 3.1 %; lynx 1.0 %"
    assert prediction_line("a.jpg", answers, width=48) == "a.jpg: tabby, tabby cat 10.5 %; ..."
    unsure = prediction_line("a.jpg", answers, verdict="unsure", width=5)
    assert unsure == "a.jpg: unsure (tabby, tabby cat 10.5 %; ...)"
    assert prediction_rows("a.jpg", answers, verdict="unsure").splitlines() == [
        "a.jpg: unsure", "   10.5 %  tabby, tabby cat", "    3.1 %  tiger cat", "    1.0 %  lynx",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_terminal_of_80_columns_gets_a_line_for_each_of_many_and_rows_for_one(model, photos):
    def shown(*words):
        leader, follower = pty.openpty()
        command = [sys.executable, "-m", "vitkit", "predict", str(model), *words, "--device", "cpu"]
        env = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
        subprocess.run(command, stdout=follower, stderr=subprocess.DEVNULL, env=env, cwd=photos)
        os.close(follower)
        text = b""
        while chunk := read(leader):
            text += chunk
        return text.decode().replace("\r\n", "\n").splitlines()

    def read(leader):
        try:
            return os.read(leader, 4096)
        except OSError:  # how Linux says that nobody writes any more
            return b""

    lines = shown("a.png", "b.png", "again/a.png")
    assert [line.partition(":")[0] for line in lines] == ["a.png", "b.png", "again/a.png"]
    assert all(len(line) <= 80 and "dark, night 55.0 %; bright/day 45.0 %" in line for line in lines)
    assert shown("a.png") == ["a.png:", "   55.0 %  dark, night", "   45.0 %  bright/day"]


@pytest.mark.parametrize("threshold, unsure", [("0.6", True), ("0.5", False)])
def test_unsure_is_the_label_in_text_and_csv_and_a_field_in_json(model, photos, threshold, unsure, capsys):
    words = ["predict", model, photos / "a.png", "--device", "cpu", "--unsure-below", threshold]
    assert run(*words) == 0
    assert ("a.png: unsure (dark, night 55.0 %;" in capsys.readouterr().out) is unsure
    assert run(*words, "--csv") == 0
    [row] = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["label"] == ("unsure" if unsure else "dark, night")
    assert float(row["probability"]) == pytest.approx(0.55, abs=1e-3)
    assert run(*words, "--json") == 0
    [output] = json.loads(capsys.readouterr().out)
    assert output["unsure"] is unsure and output["label"] == "dark, night"
    assert run(*words[:-2], "--json") == 0
    assert "unsure" not in json.loads(capsys.readouterr().out)[0]


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_images_are_copied_to_their_labels_and_nothing_is_overwritten(model, photos, tmp_path, capsys):
    out, before = tmp_path / "out", tree(photos)
    words = ["predict", model, photos, "--device", "cpu", "--sort-into", out]
    (out / "dark, night").mkdir(parents=True)
    (out / "dark, night" / "b.png").write_bytes(b"of the user")
    assert run(*words) == 1  # one cannot be read
    assert "3 images copied" in (output := capsys.readouterr()).out and "1 unreadable" in output.out
    names = {"a.png", "a-2.png", "b.png", "b-2.png"}
    assert set(tree(out)) == {f"dark, night/{name}" for name in names}
    assert tree(out)["dark, night/b.png"] == b"of the user" and tree(photos) == before
    copies = {tree(out)[f"dark, night/{name}"] for name in ("a.png", "a-2.png", "b-2.png")}
    assert copies == {before[name] for name in ("a.png", "again/a.png", "b.png")}
    sorted_first = tree(out)
    assert run(*words, "--json") == 1
    output = capsys.readouterr()
    assert tree(out) == sorted_first and "0 images copied" in output.err and "3 already there" in output.err
    rows = json.loads(output.out)
    assert {row["copied_to"] for row in rows if "label" in row} == {
        str(out / "dark, night" / name) for name in names - {"b.png"}
    }


def test_dates_stay_and_unsure_images_have_their_folder(model, photos, tmp_path):
    out = tmp_path / "out"
    words = [
        "predict",
        model,
        photos / "a.png",
        "--device",
        "cpu",
        "--unsure-below",
        "0.9",
        "--sort-into",
        out,
    ]
    assert run(*words) == 0
    assert list(tree(out)) == ["unsure/a.png"] and (out / "unsure" / "a.png").stat().st_mtime == 1_000_000_000


def test_what_was_sorted_into_the_same_folder_is_not_sorted_again(model, photos, capsys):
    out = photos / "sorted"
    words = ["predict", model, photos, "--device", "cpu", "--sort-into", out, "--json"]
    run(*words)
    assert len(json.loads(capsys.readouterr().out)) == 4
    run(*words)
    assert len(json.loads(capsys.readouterr().out)) == 4
    assert run("predict", model, out / "dark, night", "--device", "cpu", "--sort-into", out, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 3  # asked for by its name


@pytest.mark.parametrize(
    "label", ["../../a", "/etc", "..", ".", "", "a/b", "a\\b", "a\x00b", "\n", ".hid", "x" * 5000, "\ud800"]
)  # fmt: skip
def test_no_label_leads_out_of_the_folder(label, small, photos, tmp_path):
    model = small(classes=1)
    model.labels = (label,)
    vitkit.save(model, tmp_path / "m.safetensors")
    out = tmp_path / "deep" / "er" / "out"
    words = [tmp_path / "m.safetensors", photos / "a.png", "--device", "cpu", "--sort-into", out, "--json"]
    assert run("predict", *words) == 0
    [place] = [p for p in (tmp_path / "deep").rglob("*") if p.is_file()]
    assert place.parent.parent == out and place.name == "a.png"
    assert not place.parent.name.startswith(".") and len(os.fsencode(place.parent.name)) <= 255


def test_labels_that_look_alike_have_folders_of_their_own():
    names = folder_names(["Cat", "cat", "a/b", "a:b", "unsure", "cat (class 1)", ""])
    assert len({name.casefold() for name in names.values()} | {"unsure"}) == 8
    assert names["Cat"] == "Cat" and folder_name("tench, Tinca tinca") == "tench, Tinca tinca"


def test_a_link_or_a_file_in_the_place_of_a_folder_is_refused(model, photos, tmp_path, capsys):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "dark, night").symlink_to(elsewhere)
    words = ["predict", model, photos / "a.png", "--device", "cpu", "--sort-into"]
    assert run(*words, out) == 2
    assert "dark, night" in capsys.readouterr().err and not list(elsewhere.iterdir())
    assert run(*words, photos / "b.png") == 2
    assert "b.png" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_a_model_of_several_labels_has_no_one_folder(small, photos, tmp_path, capsys):
    model = small(classes=2)
    model.labels, model.multilabel = LABELS, True
    vitkit.save(model, tmp_path / "m.safetensors")
    words = [tmp_path / "m.safetensors", photos / "a.png", "--device", "cpu", "--sort-into", tmp_path / "out"]
    assert run("predict", *words) == 2
    assert "several labels" in capsys.readouterr().err and not (tmp_path / "out").exists()
