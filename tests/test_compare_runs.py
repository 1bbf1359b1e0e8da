"""Runs compared: a winner only on the same test images and by more than chance explains."""

import gzip
import json
import shutil
from base64 import b64decode

import pytest
from page_reader import Page
from test_cli import run
from test_report_page import evaluation, run_content, with_test
from test_tasks import TINY

from vitkit.metrics.intervals import mcnemar
from vitkit.report.compare_page import compare_page


def compared(rights: dict[str, list[bool]], sets: dict[str, str] | None = None) -> Page:
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
    return Page(compare_page(runs))


PAIR = ("only the first correct", "only the second correct", "p-value", "difference")


def pairs(page: Page) -> dict[str, tuple[str, ...]]:
    """By the run that the best one is compared with: the counts, the p-value and the verdict."""
    rows = page.rows("Paired comparison")
    return {next(iter(row.values())): tuple(row[key] for key in PAIR) for row in rows}


def test_a_better_run_is_named_where_chance_does_not_explain_it():
    worse = [i % 4 > 0 for i in range(200)]
    page = compared({"a": worse, "b": [True] * 180 + worse[180:]})
    assert page.headline[0] == "97.5 % accuracy" and page.headline[1].startswith("b, the best of 2 ")
    assert pairs(page) == {"a": ("45", "0", "5.7e-14", "significant")}


def test_nobody_is_crowned_within_chance():
    page = compared({"a": [True] * 11 + [False], "b": [True] * 12})
    assert page.headline[0] == "No clear winner" and "b has 100 % accuracy" in page.headline[1]
    assert pairs(page) == {"a": ("1", "0", "1", "not significant")}
    page = compared({"a": [True] * 12, "b": [True] * 12})
    assert page.headline[0] == "No clear winner"
    assert len(list(page.sections["Paired comparison"].iter("table"))) == 1  # no class differs


def test_many_comparisons_ask_for_more():
    better, worse = [True] * 100, [i >= 7 for i in range(100)]  # p of two runs: 0.016
    assert mcnemar(7, 0) == pytest.approx(2 / 2**7)
    assert compared({"a": better, "b": worse}).headline[1].startswith("a, the best of 2 ")
    many = compared({"a": better, **{f"b{i}": worse for i in range(5)}})
    assert many.headline[0] == "No clear winner" and "below 0.01" in many.text("Paired comparison")


def test_runs_of_other_test_sets_are_not_ranked():
    right = [True] * 190 + [False] * 10
    page = compared(
        {"a": right, "b": right[::-1], "c": [False] * 100 + [True] * 100}, {"a": "x", "b": "y", "c": "y"}
    )
    assert page.headline[0] == "No winner" and "not all tested on the same images" in page.headline[1]
    assert {row["run"]: row["test set"] for row in page.rows("Results")} == {"a": "A", "b": "B", "c": "B"}
    (other, counts), *rest = pairs(page).items()
    assert (other, counts[:2], rest) == ("c", ("90", "0"), [])
    assert next(iter(page.rows("Paired comparison")[0])).startswith("b ")


def test_classes_of_the_same_images_are_shown_where_they_differ_most():
    a, b = [True] * 20, [True] * 3 + [False] * 7 + [True] * 9 + [False]
    rows = compared({"a": a, "b": b}).rows("Paired comparison", 1)
    assert [list(row.values()) for row in rows] == [
        ["cat", "10", "100 %", "30 %", "7 images"], ["dog", "10", "100 %", "90 %", "1 image"]
    ]  # fmt: skip


def test_without_the_answers_the_intervals_must_be_apart():
    def old(label, top1):
        test = evaluation(("cat", "dog")) | {"top1": top1, "images": 100}
        return with_test(test, name=label, place=label, tested={"content": None, "right": None, "names": "n"})

    assert Page(compare_page([old("a", 0.9), old("b", 0.84)])).headline[0] == "No clear winner"
    assert Page(compare_page([old("a", 0.6), old("b", 0.9)])).headline[1].startswith("b, the best of 2 ")
    unknown = Page(compare_page([run_content(name="a"), run_content(name="b", place="b")]))
    assert unknown.headline[0] == "No winner" and "not known" in unknown.headline[1]


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
    page = Page((pair / "compare.html").read_text())
    rights = []
    for name in ("long", "short"):
        stored = json.loads(gzip.decompress((pair / name / "predictions.json.gz").read_bytes()))
        rights.append([a == b for a, b in zip(stored["truth"], stored["predicted"], strict=True)])
    only = [sum(a and not b for a, b in zip(x, y, strict=True)) for x, y in (rights, rights[::-1])]
    better = mcnemar(*only) < 0.05
    verdict = "significant" if better else "not significant"
    assert pairs(page) == {"short": (*map(str, only), f"{mcnemar(*only):.2g}", verdict)}
    assert "179 images" in page.text("Paired comparison") and len(page.rows("Paired comparison", 1)) > 1
    assert ("the best of 2" in page.headline[1]) == better


def test_runs_of_older_versions_are_compared_by_their_names_of_images(pair, tmp_path):
    for name in ("short", "long"):
        shutil.copytree(pair / name, tmp_path / name)
        (tmp_path / name / "predictions.json.gz").unlink()
    assert run("report", tmp_path / "short", tmp_path / "long", "--out", tmp_path / "compare.html") == 0
    page = Page((tmp_path / "compare.html").read_text())
    assert "95 % intervals" in page.text("Paired comparison") and pairs(page)["short"][:3] == ("–", "–", "–")
    (tmp_path / "long" / "data.json.gz").write_bytes(b"cut")
    assert run("report", tmp_path / "short", tmp_path / "long", "--out", tmp_path / "compare.html") == 0
    page = Page((tmp_path / "compare.html").read_text())
    assert page.headline[0] == "No winner" and "not known" in page.headline[1]
