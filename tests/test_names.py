"""Names that strangers chose, of classes and of files: nothing of them controls a terminal or hides."""

import csv
import io
import json
import re
import unicodedata

import numpy as np
import pytest
from PIL import Image
from test_cli import run

import vitkit
from vitkit.report.terminal import printable

EVIL = ("a\x1b[2Jb", "line\nbreak", "turned\u202etxt.exe", "bell\x07\x9b31m", "sep\u2028arated")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture
def model(small, tmp_path):
    made = small(classes=5)
    made.labels = EVIL
    vitkit.save(made, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "p\x1b]0;owned\x07\n.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path


@pytest.mark.parametrize("text", EVIL)
def test_a_name_is_written_out_in_one_line(text):
    shown = printable(text)
    assert not CONTROL.search(shown) and "\n" not in shown and shown != text


@pytest.mark.parametrize(
    "text", ["Graureiher", "größe", "鷺", "🦉", "👩‍🌾", "می‌خواهم", "a b", "<b>", "[red]"]
)
def test_ordinary_names_stay_as_they_are(text):
    assert printable(text) == text


def test_every_hidden_character_is_written_out():
    hidden = [chr(n) for n in range(0x3000) if unicodedata.category(chr(n)) in ("Cc", "Zl", "Zp", "Cs")]
    hidden += list("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\udcff")
    assert all(printable(character).isascii() and printable(character).isprintable() for character in hidden)


def test_predictions_on_the_terminal_hold_no_control_characters(model, photo, capsys):
    assert run("predict", model, photo, "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert not CONTROL.search(out)
    assert "a[U+001B][2Jb" in out and "line\\nbreak" in out and "turned[U+202E]txt.exe" in out


def test_predictions_as_csv_are_neutral_and_as_json_exact(model, photo, capsys):
    assert run("predict", model, photo, "--device", "cpu", "--csv") == 0
    text = capsys.readouterr().out.replace("\r\n", "\n")
    assert not CONTROL.search(text) and len(list(csv.reader(io.StringIO(text)))) == 2
    assert run("predict", model, photo, "--device", "cpu", "--json") == 0
    text = capsys.readouterr().out
    assert not CONTROL.search(text) and text.isascii()
    (output,) = json.loads(text)
    assert output["image"] == str(photo) and {one["label"] for one in output["top"]} == set(EVIL)


def test_what_cannot_be_read_is_named_without_control_characters(model, tmp_path, capsys):
    bad = tmp_path / "bad\x1b[31m\n.png"
    bad.write_bytes(b"no image")
    assert run("predict", model, bad, "--device", "cpu") == 1
    assert run("show", model) == 0
    assert run("show", "no\x1b[2Jmodel\u202e") == 2
    output = capsys.readouterr()
    assert not CONTROL.search(output.out + output.err) and "bad[U+001B][31m\\n.png" in output.err


def test_classes_of_an_evaluation_are_neutral(model, small, tmp_path, capsys):
    for name in EVIL:
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "data" / name / "0.png")
    assert run("evaluate", model, tmp_path / "data", "--device", "cpu", "--workers", 0) == 0
    output = capsys.readouterr()
    assert not CONTROL.search(output.out + output.err) and "a[U+001B][2Jb" in output.out
    assert run("evaluate", model, tmp_path / "data", "--device", "cpu", "--workers", 0, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["per_class"]) == set(EVIL)
    run("doctor", tmp_path / "data")
    output = capsys.readouterr()
    assert not CONTROL.search(output.out + output.err)
