"""Pages out of plain values: what a reader is told, whatever is missing, however large, however named."""

import base64
import hashlib
import html
import io
import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

from vitkit.experiment.shown import shown, task_name
from vitkit.objectives.task import task_class
from vitkit.recipes import recipe
from vitkit.recipes.recipe import flat
from vitkit.report.compare_page import compare_page, protocol_page
from vitkit.report.html import LONGEST, clipped, encoded, name, page, table, text
from vitkit.report.judged import pairs_of
from vitkit.report.run_page import run_page
from vitkit.report.suite_page import suite_page

COST = {
    "parameters": 5_717_416, "images_seen": 9600, "forward_FLOPs": 2_500_000_000, "training_FLOPs": 7.2e13,
    "exaFLOPs": 7.2e-5,
    "device_hours": 0.25, "tpu_v3_core_days": 1e-4, "energy_kWh": 0.12, "price": 1.5, "MFU": 0.31,
    "seconds": 900.0, "images_per_second": 10.7, "unusable_images": 1, "device": "H200", "processes": 1,
    "precision": "bf16",
}  # fmt: skip


def thumbnail(noise: int = 0) -> str:
    """A picture of 192 pixels in base64; with noise one that is as large in bytes as such pictures get."""
    pixels = np.random.default_rng(0).integers(128 - noise, 129 + noise, (192, 192, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


def evaluation(classes, per: int = 10) -> dict:
    """An evaluation in which every tenth image of a class is taken for the next one."""
    matrix = np.eye(len(classes), dtype=int) * (per - 1)
    matrix[np.arange(len(classes)), (np.arange(len(classes)) + 1) % len(classes)] += 1
    return {
        "top1": 0.9, "interval": [0.88, 0.92], "top5": 0.99, "images": per * len(classes), "loss": 0.31,
        "calibration_error": 0.021, "split": "test", "confusion": matrix.tolist(),
        "per_class": {c: {"images": per, "accuracy": (per - 1) / per} for c in classes},
    }  # fmt: skip


def mistake(key, truth, said, confidence=0.97, picture="") -> dict:
    picture = picture or thumbnail()
    return {"key": key, "truth": truth, "said": said, "confidence": confidence, "image": picture,
            "overlay": picture}  # fmt: skip


def found(classes=("cat", "dog", "emu"), **changes) -> dict:
    """A finished run as its folder tells of it."""
    told = flat(json.loads(json.dumps(asdict(recipe("finetune")))))
    usual = dict(told)
    told |= {"data": "photos", "weights": "ViT-B/16.augreg-i21k", "batch": 32, "seed": 0}
    rows = [{"step": s, "loss": 2 / s, "accuracy": 1 - 1 / s, "rate": 0.01, "images": 32, "seconds": 0.5}
            for s in range(1, 301)]  # fmt: skip
    rows += [{"step": s, "val_top1": 0.8, "val_loss": 0.5, "val_images": 10} for s in (100, 200, 300)]
    worst = [mistake(f"{c}/1.jpg", c, classes[i - 1]) for i, c in enumerate(classes[:24])]
    return shown_by_task({
        "name": "photos", "place": "runs/photos", "recipe": told, "usual": usual, "metrics": rows,
        "result": {"run": "runs/photos", "model": "m", "steps": 300, "cost": COST,
                   "test": evaluation(classes)},
        "mistakes": {"images": 30, "wrong": 3, "pairs": None, "calibration": [[0.9, 0.8, 20], [0.5, 0.5, 10]],
                     "worst": worst, "least": [mistake("cat/7.jpg", "cat", "cat", 0.34)]},
        "doctor": {"splits": {"train": {"images": 90, "classes": 3,
                                        "per_class": {"min": 9, "median": 30.0, "max": 51}}},
                   "findings": [{"severity": "warning", "text": "Classes with under 5 images: emu: 3",
                                 "remedy": "Add images of them", "kind": "few-images"}]},
        "environment": {"machine": {"torch": "2.13.0", "system": "Linux"}, "steps": 300,
                        "data": {"images": {"train": 90, "test": 30}, "classes": 3}},
        "unusable": {"train": {"count": 1, "files": {"emu/broken.jpg": "truncated"}}},
        "spent": {"hours": 0.25, "per_hour": 3.5, "given": True, "price": 0.88, "kWh": 0.12, "watts": None},
        "batch": {"step": 0, "of": 32, "how": "mirrored at random",
                  "images": [{"image": thumbnail(), "labels": [["cat", 0.7], ["dog", 0.3]]}]},
        "table": "mistakes.csv", "pricing": "vitkit report runs/photos --price-per-hour X",
        "commands": {"Use it": ["vitkit predict runs/photos IMAGE"]}, "quoted": "runs/photos", "link": None,
    } | changes)  # fmt: skip


def shown_by_task(value: dict) -> dict:
    """With what the task of the run shows of its result."""
    test = (value["result"] or {}).get("test") or {}
    return value | {"task": shown(task_class(task_name({}, test))(), test or None)}


def words(document: str) -> str:
    """What a reader sees, in one line, without the style."""
    body = document[document.index("<body>") :]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


def test_a_stranger_learns_what_was_trained_and_how_well_it_does():
    told = words(run_page(found()))
    assert "90 % right of 30 test images; 95 % interval 74 to 97 %" in told
    assert re.search(
        r"Fine-tuned from ViT-B/16.augreg-i21k on photos \(90 training images of 3 classes\)", told
    )
    assert "300 steps of 32 images in 15 min on H200" in told
    for fact in ("72 TFLOPs", "31.0 %", "0.12 kWh, as the device measured it", "0.88",
                 "emu/broken.jpg", "truncated", "Classes with under 5",
                 "torch 2.13.0", "vitkit predict runs/photos IMAGE", "calibration error 2.10 %"):  # fmt: skip
        assert fact in told, fact


def test_every_section_can_be_reached_and_every_link_leads_somewhere():
    for document in (run_page(found()), compare_page([found(), found(name="b", place="b")])):
        targets = re.findall(r'href="#([^"]+)"', document)
        assert len(targets) >= 5 and set(targets) == set(re.findall(r'<section id="([^"]+)"', document))


def test_the_policy_allows_the_style_and_nothing_that_runs_or_is_fetched():
    document = run_page(found())
    style = re.search(r"<style>(.*?)</style>", document, re.S)[1]
    mark = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', document)[1]
    assert f"style-src 'sha256-{mark}'" in policy and policy.startswith("default-src 'none'")
    assert "script" not in policy and "unsafe" not in policy
    assert not re.search(
        r"<script|\son\w+=|\sstyle=|url\(|@import|src=\"(?!data:image/)|href=\"http", document
    )


def test_results_of_other_kinds_have_their_own_headline():
    several = {"top1": 0.5, "top5": None, "images": 80, "loss": 1.0, "mean_average_precision": 0.912,
               "f1": 0.8, "exact_match": 0.7, "split": "val",
               "per_class": {"red": {"images": 40, "average_precision": 0.9},
                             "blue": {"images": 0, "average_precision": None}}}  # fmt: skip
    told = words(run_page(with_test(several, mistakes=None)))
    assert "91 % mean average precision over 80 validation images" in told and "1 have no image" in told
    masked = {"images": 10, "patches": 80, "target": "mean", "loss": 4.5, "accuracy": 0.125, "top1": None,
              "split": "test"}  # fmt: skip
    told = words(run_page(with_test(masked, mistakes=None)))
    assert "12 % of colours right of 80 corrupted patches in 10 test images; loss 4.5" in told
    assert "Not kept" not in told and "Mistakes" not in told
    told = words(run_page(with_test(masked | {"accuracy": None, "target": "pixels"}, mistakes=None)))
    assert "Loss 4.5 mean squared error of the pixels of 80 corrupted patches" in told


def with_test(test: dict, **changes) -> dict:
    base = found()
    return shown_by_task(base | {"result": base["result"] | {"test": test}} | changes)


def test_an_unfinished_run_says_so_and_shows_how_far_it_came():
    told = run_page(found(result=None, mistakes=None, unusable=None, metrics=found()["metrics"][:120]))
    assert "Not finished" in told and "has come to step 120 of 300" in words(told)
    assert told.count("<polyline") >= 3
    assert "No step has been written down yet" in run_page(found(result=None, mistakes=None, metrics=[]))


def test_a_run_from_before_is_shown_with_a_line_on_what_is_missing():
    old = run_page(found(mistakes=None, doctor=None, environment=None, unusable=None))
    missing = re.findall(r"Not kept with this run[^<]*", old)
    assert missing == ["Not kept with this run, made before they were or without them: mistakes to look at, "
                       "findings about the data, the machine it ran on."]  # fmt: skip
    assert "90 % right" in old and "Most often confused" in old


def test_pictures_say_what_they_are_and_where_all_mistakes_are():
    document = run_page(found())
    told = words(document)
    assert '<a href="mistakes.csv">' in document and "3 of 30 images are taken for something else" in told
    assert "said cat 34.0 % right cat/7.jpg" in told and "said emu 97.0 % is cat cat/1.jpg" in told
    assert "The first 1 of 32 images of step 1" in told and "cat 70 %, dog 30 %" in told
    alts = re.findall(r'<img [^>]* alt="([^"]*)"', document)
    assert len(alts) == document.count("<img ") and all(alts)
    without = run_page(found(table=None, batch=None))
    assert "mistakes.csv" not in without and "Training images" not in without


def test_the_ideal_of_calibration_is_a_dashed_line_of_its_own():
    document = run_page(found())
    part = document[document.index("Expected calibration error") :]
    assert 'class="ideal dashed"' in part[: part.index("</figure>")]


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, "money 0.88 (0.25 device-hours at 3.50 an hour)"),
        ({"given": False}, "money $0.88 (0.25 device-hours at an assumed $3.50 an hour)"),
        ({"given": False, "price": 0.001}, "money under $0.01"),
        ({"kWh": 0.0123, "watts": 100}, "energy about 12 Wh (not measured: an assumed 100 watts)"),
    ],
)
def test_cost_is_told_in_money_time_and_energy_with_what_it_rests_on(changes, told):
    value = found()
    shown = words(run_page(value | {"spent": value["spent"] | changes}))
    assert told in shown and "time 15 min on H200" in shown
    assert "vitkit report runs/photos --price-per-hour X" in shown
    papers = run_page(value).partition("<summary>For papers</summary>")[2]
    assert "TPUv3-core-days" in papers and "exaFLOPs" in papers


def test_fields_that_differ_from_the_named_recipe_stand_out():
    document = run_page(found())
    marked = re.findall(r'<tr class="marked"><td>([^<]*)', document)
    assert marked == ["data", "weights", "batch"]
    assert "Exactly the recipe finetune" in run_page(found(recipe=found()["usual"]))


def test_the_most_frequent_confusions_come_first():
    matrix = [[5, 3, 0], [0, 9, 1], [4, 0, 6]]
    assert pairs_of(matrix, "abc") == [("c", "a", 4, 10), ("a", "b", 3, 8), ("b", "c", 1, 10)]


def test_with_many_classes_the_part_that_is_confused_most_is_shown():
    few, many = words(run_page(found())), words(run_page(found([f"class {i}" for i in range(100)])))
    assert "other classes" not in few and "confused most often" not in few
    assert "Of 100 classes, the 24 that are confused most often" in many and "Most often confused" in many


def test_without_a_matrix_the_pairs_that_were_kept_are_shown():
    value = found([f"class {i}" for i in range(1001)])
    value["result"]["test"]["confusion"] = None
    value["mistakes"]["pairs"] = [["class 7", "class 9", 4, 10]]
    assert "class 7 class 9 4 of 10 40 %" in words(run_page(value))


def test_large_results_stay_below_five_megabytes():
    """100,000 images of 1,000 classes with long names, 84 pictures as large as they get, a long journal."""
    classes = [f"class {i} of them, {'with a long name ' * 30}" for i in range(1000)]
    value = found(classes)
    value["result"]["test"] = evaluation(classes, per=100)
    picture = thumbnail(noise=120)
    worst = [mistake(f"{c}/1.jpg", c, classes[i - 1], 0.9, picture) for i, c in enumerate(classes[:24])]
    value["mistakes"] |= {"worst": worst, "least": worst[:12]}
    value["batch"] = {"step": 0, "of": 32, "how": "as they are",
                      "images": [{"image": picture, "labels": [[classes[0], 1.0]]}] * 12}  # fmt: skip
    value["metrics"] = [{"step": s, "loss": s % 7, "accuracy": 0.5, "rate": 1.0, "images": 9, "seconds": 1.0}
                        for s in range(50_000)]  # fmt: skip
    value["doctor"]["findings"] *= 5000
    document = run_page(value)
    assert "All 1,000 classes" in document and len(encoded(document)) < 5_000_000
    runs = [value | {"name": f"run {i}", "metrics": value["metrics"][:5000]} for i in range(20)]
    assert len(encoded(compare_page(runs))) < 5_000_000


def test_more_rows_than_a_page_should_have_are_cut_with_a_note():
    document = run_page(found([f"class {i}" for i in range(1500)]))
    assert "All 1,500 classes in order, the first 1,000 of them" in document
    assert "class 999<" in document and "class 1450<" not in document


@pytest.mark.parametrize(
    "value, shown",
    [("<script>", "&lt;script&gt;"), ("a\u202eb", "a[U+202E]b"), ("a\u2066b\u200b", "a[U+2066]b[U+200B]"),
     ("\udcff.jpg", "\\xff.jpg"), ("\ud800", "[U+D800]"), ("a\x00\x1b[1m", "a[U+0000][U+001B][1m"),
     ('"&\'', "&quot;&amp;&#x27;"),
     ("می\u200cخواهم", "می\u200cخواهم"), ("猫 é ß 👩\u200d🚀", "猫 é ß 👩\u200d🚀"),
     (1234567, "1,234,567"), (None, "-"), (True, "yes")],
)  # fmt: skip
def test_text_is_shown_as_it_is_and_what_is_hidden_is_written_out(value, shown):
    assert text(value) == shown
    text(value).encode("utf-8")


def test_a_long_name_keeps_its_ends_and_says_how_long_it_is():
    shown = name("start" + "x" * 5000 + "end")
    assert "start" in shown and "end (5,008 characters)" in shown and len(shown) < LONGEST + 100
    assert clipped("a\nb\tc", 50) == "a\\nb\\tc"


def test_tables_put_numbers_to_the_right_and_escape_their_cells():
    shown = table([{"a": 1, "b<": "<i>"}, {"a": None, "b<": "x"}])
    assert '<th scope="col" class="number">a</th>' in shown and "<td>&lt;i&gt;</td>" in shown
    assert "b&lt;" in shown and "<i>" not in shown


def test_a_page_with_undecodable_names_can_be_written():
    encoded(run_page(found(classes=("a\udcff", "b\ud800"), name="run\udcfe"))).decode("utf-8")
    encoded(page("x", "\udcff")).decode("utf-8")


def seeds(*accuracies) -> list[dict]:
    """Runs of one recipe with other seeds."""
    runs = []
    for seed, top1 in enumerate(accuracies):
        test = evaluation(("cat", "dog")) | {"top1": top1}
        run = with_test(test, name=f"seed-{seed}", place=f"p/seed-{seed}", link=f"seed-{seed}/report.html")
        runs.append(run | {"recipe": run["recipe"] | {"seed": seed}})
    return runs


def test_seeds_of_one_recipe_are_told_as_mean_and_spread():
    document = compare_page(seeds(0.90, 0.92, 0.94))
    told = words(document)
    assert "92.0 ± 2.0 % right mean and standard deviation over 3 seeds of one recipe" in told
    assert '<a href="seed-1/report.html">' in document and document.count("<polyline") >= 9
    rows = re.findall(r"<tr><td>(\w+)</td>", document)
    assert rows == ["seed"]


def test_runs_of_other_recipes_are_told_by_their_best_and_by_what_differs():
    one, two = found(), with_test(evaluation(("cat", "dog")) | {"top1": 0.95}, name="better", place="b")
    two["recipe"] = two["recipe"] | {"batch": 64}
    told = words(compare_page([one, two, found(name="new", place="c", result=None)]))
    assert "No winner it is not known" in told  # on how many images, and on which, is not known
    assert re.search(r"batch 32 64 32", told) and "Not finished" in told


def test_a_protocol_shows_rates_and_seeds_and_says_when_it_is_not_finished():
    protocol = {"rates": {"0.001": 0.8, "0.01": 0.9}, "rate": 0.01, "seeds": [0.9, 0.92], "mean": 0.91,
                "std": 0.0141, "images": 20}  # fmt: skip
    told = words(protocol_page(protocol, seeds(0.9, 0.92), "pets"))
    assert "91.0 ± 1.4 % right" in told and "Learning rate 0.01" in told and "held-out" in told
    one = words(protocol_page(protocol | {"seeds": [0.9], "mean": 0.9, "std": None}, seeds(0.9), "pets"))
    assert "90 % right one seed, of 20 test images" in one and "±" not in one
    assert "not finished: these are its runs so far" in words(protocol_page(None, seeds(0.9), "pets"))


def test_a_suite_shows_means_tasks_and_what_is_missing():
    row = {"task": "pets", "group": "Natural", "top1": 0.9, "std": None, "seeds": [0.9], "rate": 0.01,
           "images": 20, "complete": False, "differs": "another order"}  # fmt: skip
    means = {"Natural": {"mean": 0.9, "tasks": 1, "of": 7, "complete": False},
             "VTAB-1k": {"mean": 0.9, "tasks": 1, "of": 19, "complete": False}}  # fmt: skip
    suite = {"model": "m.npz", "tasks": [row], "missing": [{"task": "dtd"}], "means": means, "waiting": 2}
    document = suite_page(suite, "out", {"pets": "pets/report.html"})
    told = words(document)
    assert (
        "90.00 % mean accuracy of 1 of 19 tasks (VTAB-1k)" in told and "2 tasks are still to be done" in told
    )
    assert "not in any mean: dtd" in told and "another order; other files than published" in told
    assert '<a href="pets/report.html">' in document
