"""Runs compared: a winner only on the same test images and by more than chance explains."""

import gzip
import json
import re
import shutil
from base64 import b64decode

import pytest
from test_cli import run
from test_report_page import evaluation, found, with_test, words
from test_tasks import TINY

from vitkit.proportions import mcnemar
from vitkit.report.compare_page import compare_page


def compared(rights: dict[str, list[bool]], sets: dict[str, str] | None = None) -> str:
    """The page of runs with other recipes, by which images each has right; sets: on which test set."""
    runs = []
    for number, (label, right) in enumerate(rights.items()):
        images = len(right)
        test = evaluation(("cat", "dog")) | {"top1": sum(right) / images, "images": images, "top5": None}
        half = images // 2
        for kind, part in (("cat", right[:half]), ("dog", right[half:])):
            test["per_class"][kind] = {"images": len(part), "accuracy": sum(part) / len(part)}
        which = (sets or {}).get(label, "one")
        tested = {
            "content": which,
            "names": None,
            "right": {f"{which} {i}": is_right for i, is_right in enumerate(right)},
        }
        one = with_test(test, name=label, place=label, tested=tested)
        runs.append(one | {"recipe": one["recipe"] | {"batch": 32 + number}})
    return words(compare_page(runs))


def test_a_better_run_is_named_where_chance_does_not_explain_it():
    worse = [i % 4 > 0 for i in range(200)]
    told = compared({"a": worse, "b": [True] * 180 + worse[180:]})
    assert "97.5 % right b, the best of 2, by more than chance explains" in told
    assert "b beside" in told and "a 45 0 5.7e-14 more than chance" in told


def test_nobody_is_crowned_within_chance():
    told = compared({"a": [True] * 11 + [False], "b": [True] * 12})
    assert "No clear winner b has 100 % right, but on 12 images the difference to a is within chance" in told
    assert "a 1 0 1 within chance" in told and "the best of" not in told
    told = compared({"a": [True] * 12, "b": [True] * 12})
    assert "No clear winner" in told and "equally many images right" in told


def test_many_comparisons_ask_for_more():
    better, worse = [True] * 100, [i >= 7 for i in range(100)]  # p of two runs: 0.016
    assert mcnemar(7, 0) == pytest.approx(2 / 2**7)
    assert "the best of 2" in compared({"a": better, "b": worse})
    assert "No clear winner" in compared({"a": better, **{f"b{i}": worse for i in range(5)}})


def test_runs_of_other_test_sets_are_not_ranked():
    right = [True] * 190 + [False] * 10
    told = compared(
        {"a": right, "b": right[::-1], "c": [False] * 100 + [True] * 100}, {"a": "x", "b": "y", "c": "y"}
    )
    assert "No winner these runs were not all tested on the same images" in told
    assert re.search(r"\ba .*? A b .*? B c .*? B Only runs with the same test set", told)
    assert "b beside" in told and "a beside" not in told and "c 90 0 " in told


def test_classes_of_the_same_images_are_shown_where_they_differ_most():
    a, b = [True] * 20, [True] * 3 + [False] * 7 + [True] * 9 + [False]
    told = compared({"a": a, "b": b})
    assert "cat 10 100 % 30 % 7 images dog 10 100 % 90 % 1 images" in told


def test_without_the_answers_the_intervals_must_be_apart():
    def old(label, top1):
        test = evaluation(("cat", "dog")) | {"top1": top1, "images": 100}
        return with_test(test, name=label, place=label, tested={"content": None, "right": None, "names": "n"})

    assert "No clear winner" in words(compare_page([old("a", 0.9), old("b", 0.84)]))
    assert "b, the best of 2" in words(compare_page([old("a", 0.6), old("b", 0.9)]))
    assert "No winner it is not known" in words(compare_page([found(name="a"), found(name="b", place="b")]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs on the same data, one of them with a longer training."""
    folder = tmp_path_factory.mktemp("pair")
    for name, steps in (("short", "6"), ("long", "60")):
        words = [steps if word == "6" else word for word in TINY]
        assert run("finetune", "digits", "--out", folder / name, *words, "--lr", "0.01", "--json") == 0
    return folder


def test_a_run_keeps_its_predictions_by_content(pair):
    stored = json.loads(gzip.decompress((pair / "long" / "predictions.json.gz").read_bytes()))
    test = json.loads((pair / "long" / "result.json").read_text())["test"]
    right = [a == b for a, b in zip(stored["truth"], stored["predicted"], strict=True)]
    assert len(right) == test["images"] == 179 and sum(right) / 179 == pytest.approx(test["top1"])
    assert len(b64decode(stored["images"])) == 179 * 32


def test_the_report_of_two_runs_compares_them_image_by_image(pair, capsys):
    assert run("report", pair / "short", pair / "long", "--out", pair / "compare.html") == 0
    told = words((pair / "compare.html").read_text())
    rights = []
    for name in ("long", "short"):
        stored = json.loads(gzip.decompress((pair / name / "predictions.json.gz").read_bytes()))
        rights.append([a == b for a, b in zip(stored["truth"], stored["predicted"], strict=True)])
    only = [sum(a and not b for a, b in zip(x, y, strict=True)) for x, y in (rights, rights[::-1])]
    assert f"short {only[0]} {only[1]} {mcnemar(*only):.2g} " in told
    assert "The same 179 images" in told and "Class by class" in told
    assert ("the best of 2" in told) == (mcnemar(*only) < 0.05)


def test_runs_of_older_versions_are_compared_by_their_names_of_images(pair, tmp_path):
    for name in ("short", "long"):
        shutil.copytree(pair / name, tmp_path / name)
        (tmp_path / name / "predictions.json.gz").unlink()
    assert run("report", tmp_path / "short", tmp_path / "long", "--out", tmp_path / "compare.html") == 0
    told = words((tmp_path / "compare.html").read_text())
    assert "the 95 % intervals must not overlap" in told and "short - - – " in told
    (tmp_path / "long" / "data.json.gz").write_bytes(b"cut")
    assert run("report", tmp_path / "short", tmp_path / "long", "--out", tmp_path / "compare.html") == 0
    assert "No winner it is not known" in words((tmp_path / "compare.html").read_text())
