"""Pages out of plain values: what a reader is told, whatever is missing, however large, however named."""

import base64
import hashlib
import html
import io
import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from jinja2 import TemplateNotFound, UndefinedError
from markupsafe import Markup
from page_reader import Page
from PIL import Image

from vitkit.flat_recipe import flat
from vitkit.recipes import recipe
from vitkit.report.compare_page import compare_page, protocol_page
from vitkit.report.confusion import OTHER, pairs_of
from vitkit.report.html import LONGEST, clipped, encoded, environment, facts, name, page, table, text
from vitkit.report.run_page import run_page
from vitkit.report.study_page import study_page
from vitkit.report.suite_page import suite_page
from vitkit.runs.page import shown, task_name
from vitkit.tasks.task import task_class

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


def run_content(classes=("cat", "dog", "emu"), **changes) -> dict:
    """A finished run as its folder tells of it."""
    output = flat(json.loads(json.dumps(asdict(recipe("finetune")))))
    usual = dict(output)
    output |= {"data": "photos", "weights": "ViT-B/16.augreg-i21k", "batch": 32, "seed": 0}
    rows = [{"step": s, "loss": 2 / s, "accuracy": 1 - 1 / s, "rate": 0.01, "images": 32, "seconds": 0.5}
            for s in range(1, 301)]  # fmt: skip
    rows += [{"step": s, "val_top1": 0.8, "val_loss": 0.5, "val_images": 10} for s in (100, 200, 300)]
    worst = [mistake(f"{c}/1.jpg", c, classes[i - 1]) for i, c in enumerate(classes[:24])]
    return shown_by_task({
        "name": "photos", "place": "runs/photos", "recipe": output, "usual": usual, "metrics": rows,
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
        "samples": {"classes": 3, "images": [
            {"key": f"{c}/2.jpg", "image": thumbnail(), "truth": [c], "predicted": [["cat", 0.6]]}
            for c in ("cat", "dog")]},
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
    shown = Page(run_page(run_content()))
    assert shown.headline[0] == "90 % accuracy"
    assert "30 test images" in shown.headline[1] and "74 to 97 %" in shown.headline[1]
    for value in ("ViT-B/16.augreg-i21k", "photos", "90 training images", "3 classes", "224 × 224",
                  "300 steps", "batch size 32", "15 min on H200"):  # fmt: skip
        assert value in shown.header, value
    assert shown.rows("Classes")[0] == {"class": "cat", "accuracy": "90 %", "95 % interval": "60 to 98 %",
                                        "": "", "images": "10"}  # fmt: skip
    assert shown.rows("Data")[0] == {"split": "train", "images": "90", "classes": "3",
                                     "fewest per class": "9", "median per class": "30",
                                     "most per class": "51"}  # fmt: skip
    assert "Classes with under 5 images: emu: 3" in shown.rows("Data", 1)[0].values()
    assert list(shown.rows("Data", 2)[0].values()) == ["emu/broken.jpg", "truncated"]
    cost = shown.facts("Cost")
    assert cost["training compute"] == "72 TFLOPs" and cost["model FLOPs utilization"] == "31.0 %"
    assert cost["energy"].startswith("0.12 kWh") and cost["price"].startswith("0.88")
    assert shown.facts("Environment") == {"torch": "2.13.0", "system": "Linux"}
    assert "vitkit predict runs/photos IMAGE" in shown.text("Commands")
    assert "2.1 %" in shown.text("Calibration")


def test_every_section_can_be_reached_and_every_link_leads_somewhere():
    for document in (
        run_page(run_content()),
        compare_page([run_content(), run_content(name="b", place="b")]),
    ):
        targets = re.findall(r'href="#([^"]+)"', document)
        assert len(targets) >= 5 and set(targets) == set(re.findall(r'<section id="([^"]+)"', document))


def test_the_policy_allows_the_style_and_nothing_that_runs_or_is_fetched():
    document = run_page(run_content())
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
    shown = Page(run_page(with_test(several, mistakes=None)))
    assert shown.headline[0] == "91 % mean average precision" and "80 validation images" in shown.headline[1]
    assert len(shown.rows("Classes")) == 1 and "without images: 1" in shown.text("Classes")
    masked = {"images": 10, "patches": 80, "target": "mean", "loss": 4.5, "accuracy": 0.125, "top1": None,
              "split": "test"}  # fmt: skip
    shown = Page(run_page(with_test(masked, mistakes=None)))
    assert shown.headline[0].startswith("12 %")
    assert all(part in shown.headline[1] for part in ("80 corrupted patches", "10 test images", "loss 4.5"))
    assert "Missing from" not in shown.header and "Mistakes" not in shown.sections
    shown = Page(run_page(with_test(masked | {"accuracy": None, "target": "pixels"}, mistakes=None)))
    assert shown.headline[0] == "Loss 4.5" and "80 corrupted patches" in shown.headline[1]


def with_test(test: dict, **changes) -> dict:
    base = run_content()
    return shown_by_task(base | {"result": base["result"] | {"test": test}} | changes)


def test_an_unfinished_run_says_so_and_shows_how_far_it_came():
    rows = run_content()["metrics"]
    document = run_page(run_content(result=None, mistakes=None, unusable=None, metrics=rows[:120]))
    assert Page(document).headline == ("Not finished", "") and "step 120 of 300" in Page(document).header
    assert document.count("<polyline") >= 3
    rows = [*rows[:120], {"step": 100, "val_top1": 0.8, "val_images": 10}]
    assert "80 % at step 100" in Page(run_page(run_content(result=None, mistakes=None, metrics=rows))).header
    empty = run_page(run_content(result=None, mistakes=None, metrics=[]))
    assert "<polyline" not in empty and "Curves" in Page(empty).sections


def test_a_run_from_before_is_shown_with_a_line_on_what_is_missing():
    old = Page(run_page(run_content(mistakes=None, doctor=None, environment=None, unusable=None)))
    (note,) = [e.text for e in old.root.iter("p") if "Missing from" in (e.text or "")]
    assert note.endswith("misclassified images, dataset findings, machine information.")
    assert old.headline[0] == "90 % accuracy" and len(old.rows("Confusion matrix", 1)) == 3
    assert not {"Data", "Mistakes", "Environment"} & set(old.sections)


def test_pictures_say_what_they_are_and_where_all_mistakes_are():
    document = run_page(run_content())
    shown = Page(document)
    assert '<a href="mistakes.csv">' in document and shown.text("Mistakes").startswith(
        "Mistakes 3 of 30 images"
    )
    assert "predicted emu · 97.0 % true class: cat cat/1.jpg" in shown.text("Mistakes")
    assert "predicted cat · 34.0 % correct cat/7.jpg" in shown.text("Least confident")
    assert "The first 1 of 32 images of step 1" in shown.text("Training batch")
    assert "cat 70 %, dog 30 %" in shown.text("Training batch")
    alts = re.findall(r'<img [^>]* alt="([^"]*)"', document)
    assert len(alts) == document.count("<img ") and all(alts)
    without = run_page(run_content(table=None, batch=None))
    assert "mistakes.csv" not in without and "Training batch" not in Page(without).sections


def test_the_ideal_of_calibration_is_a_dashed_line_of_its_own():
    document = run_page(run_content())
    (chart,) = Page(document).sections["Calibration"].iter("figure")
    assert [e.get("class") for e in chart.iter("g")] == ["ideal dashed", "s0"]
    assert [e.text for e in chart.iter("text")].count("100%") == 2  # both axes are shares


@pytest.mark.parametrize(
    "changes, fact, values",
    [
        ({}, "price", ["0.88 (", "0.25 device hours", " 3.50 per hour"]),
        ({"given": False}, "price", ["$0.88 (", "0.25 device hours", "assumed $3.50 per hour"]),
        ({"given": False, "price": 0.001}, "price", ["under $0.01"]),
        ({"kWh": 0.0123, "watts": 100}, "energy", ["about 12 Wh", "not measured", "100 watts"]),
    ],
)
def test_cost_is_told_in_money_time_and_energy_with_what_it_rests_on(changes, fact, values):
    run = run_content()
    shown = Page(run_page(run | {"spent": run["spent"] | changes}))
    cost = shown.facts("Cost")
    assert all(value in cost[fact] for value in values) and cost["time"] == "15 min on H200"
    assert "vitkit report runs/photos --price-per-hour X" in shown.text("Cost")
    papers = run_page(run).partition("<summary>For papers</summary>")[2]
    assert "TPUv3-core-days" in papers and "exaFLOPs" in papers


def test_fields_that_differ_from_the_named_recipe_stand_out():
    document = run_page(run_content())
    marked = re.findall(r'<tr class="marked"><td>([^<]*)', document)
    assert marked == ["data", "weights", "batch"]
    changed = [row["field"] for row in Page(document).rows("Recipe")]
    assert changed == ["data", "weights", "batch"]
    same = Page(run_page(run_content(recipe=run_content()["usual"])))
    assert len(list(same.sections["Recipe"].iter("table"))) == 1 and not same.rows("Recipe", css="marked")


def test_the_most_frequent_confusions_come_first():
    matrix = [[5, 3, 0], [0, 9, 1], [4, 0, 6]]
    assert pairs_of(matrix, "abc") == [("c", "a", 4, 10), ("a", "b", 3, 8), ("b", "c", 1, 10)]


def test_with_many_classes_the_part_that_is_confused_most_is_shown():
    few, many = (
        Page(run_page(run_content(names))) for names in (["cat", "dog"], [f"class {i}" for i in range(100)])
    )
    matrices = [[e for e in page.sections["Confusion matrix"].iter("div") if "matrix" in e.get("class", "")]
                for page in (few, many)]  # fmt: skip
    rows = [[len(matrix.find("table/tbody")) for matrix in listed] for listed in matrices]
    assert rows == [[2], [24, 8]]  # on wide and on narrow screens
    assert OTHER not in few.text("Confusion matrix") and OTHER in many.text("Confusion matrix")
    assert "The 24 most confused of 100 classes" in many.text("Confusion matrix")
    assert len(many.rows("Confusion matrix", 2)) == 12


def test_without_a_matrix_the_pairs_that_were_kept_are_shown():
    value = run_content([f"class {i}" for i in range(1001)])
    value["result"]["test"]["confusion"] = None
    value["mistakes"]["pairs"] = [["class 7", "class 9", 4, 10]]
    (row,) = Page(run_page(value)).rows("Confusion matrix")
    assert list(row.values()) == ["class 7", "class 9", "4 of 10", "40 %"]


def test_large_results_stay_below_five_megabytes():
    """100,000 images of 1,000 classes with long names, 84 pictures as large as they get, a long journal."""
    classes = [f"class {i} of them, {'with a long name ' * 30}" for i in range(1000)]
    value = run_content(classes)
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
    document = run_page(run_content([f"class {i}" for i in range(1500)]))
    assert "The first 1,000 of 1,500 classes" in document
    assert "class 999<" in document and "class 1450<" not in document


@pytest.mark.parametrize(
    "value, shown",
    [("<script>", "&lt;script&gt;"), ("a\u202eb", "a[U+202E]b"), ("a\u2066b\u200b", "a[U+2066]b[U+200B]"),
     ("\udcff.jpg", "\\xff.jpg"), ("\ud800", "[U+D800]"), ("a\x00\x1b[1m", "a[U+0000][U+001B][1m"),
     ('"&\'', "&#34;&amp;&#39;"),
     ("می\u200cخواهم", "می\u200cخواهم"), ("猫 é ß 👩\u200d🚀", "猫 é ß 👩\u200d🚀"),
     (1234567, "1,234,567"), (None, "–"), (True, "yes")],
)  # fmt: skip
def test_text_is_shown_as_it_is_and_what_is_hidden_is_written_out(value, shown):
    assert text(value) == shown
    text(value).encode("utf-8")


def test_a_long_name_keeps_its_ends_and_says_how_long_it_is():
    shown = name("start" + "x" * 5000 + "end")
    assert "start" in shown and "end (5,008 characters)" in shown and len(shown) < LONGEST + 100
    assert clipped("a\nb\tc", 50) == "a\\nb\\tc"


HOSTILE = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>" + "' onfocus='window.pwned=1"


def strangers() -> list[str]:
    """Elements that hostile names have brought into pages of every kind; none, if all are shown as text."""
    test = evaluation((HOSTILE, "cat"))
    run = with_test(test, name=HOSTILE, place=HOSTILE, link=HOSTILE, commands={HOSTILE: [HOSTILE]},
                    environment={"machine": {HOSTILE: HOSTILE}, "steps": 3, "data": {}})  # fmt: skip
    run["doctor"]["findings"][0] |= {"severity": HOSTILE, "text": HOSTILE, "remedy": HOSTILE}
    row = {
        "task": HOSTILE,
        "group": HOSTILE,
        "top1": 0.9,
        "images": 20,
        "chosen": HOSTILE,
        "tried": {HOSTILE: 1},
    }
    suite = {"model": HOSTILE, "tasks": [row], "missing": [{"task": HOSTILE}], "means": {}}
    study = {"study": HOSTILE, "shows": HOSTILE, "about": HOSTILE, "figures": [], "means": [], "laws": [],
             "verdicts": [{"claim": HOSTILE, "outcome": HOSTILE, "words": HOSTILE}], "rows": [], "total": 1,
             "chosen": {HOSTILE: HOSTILE}, "commands": [HOSTILE],
             "failed": {HOSTILE: {"error": HOSTILE, "trace": HOSTILE}}}  # fmt: skip
    pages = [run_page(run), compare_page([run, run]), suite_page(suite, HOSTILE, {HOSTILE: HOSTILE}),
             study_page(study)]  # fmt: skip
    assert all(document.count("window.pwned") >= 10 for document in pages)
    elements = [element for document in pages for element in Page(document).root.iter()]
    return [e.tag for e in elements if e.tag == "script" or any(key.startswith("on") for key in e.attrib)]


def test_hostile_names_become_no_elements_and_no_attributes():
    assert strangers() == []


@pytest.mark.control("vitkit.report.html.environment")
def test_control_without_autoescape_hostile_names_become_elements(switched_off):
    careless = environment().overlay(autoescape=False)
    switched_off("vitkit.report.html.environment", lambda: careless)
    assert "script" in strangers() and "img" in strangers()


def test_a_template_lacks_no_value_and_reads_no_file_but_its_own():
    with pytest.raises(UndefinedError, match="heading"):
        environment().from_string("<h2>{{ heading }}</h2>").render()
    with pytest.raises(LookupError, match="items"):  # which a report tells as a damaged file
        facts(["a list"])
    for outside in ("../page.css", "../templates/page.html", str(Path(html.__file__))):
        with pytest.raises(TemplateNotFound):
            environment().get_template(outside)


def test_tables_put_numbers_to_the_right_and_escape_their_cells():
    shown = table([{"a": 1, "b<": "<i>"}, {"a": None, "b<": "x"}])
    assert '<th scope="col" class="number">a</th>' in shown and "<td>&lt;i&gt;</td>" in shown
    assert "b&lt;" in shown and "<i>" not in shown


def test_a_page_with_undecodable_names_can_be_written():
    encoded(run_page(run_content(classes=("a\udcff", "b\ud800"), name="run\udcfe"))).decode("utf-8")
    encoded(page("\udcff", Markup("\udcff"), {"\udcff": Markup("\udcff")})).decode("utf-8")


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
    shown = Page(document)
    assert shown.headline[0] == "92.0 ± 2.0 % accuracy" and "3 seeds of one recipe" in shown.headline[1]
    assert '<a href="seed-1/report.html">' in document and document.count("<polyline") >= 9
    assert [row["field"] for row in shown.rows("Recipes")] == ["seed"]


def test_runs_of_other_recipes_are_told_by_their_best_and_by_what_differs():
    one, two = run_content(), with_test(evaluation(("cat", "dog")) | {"top1": 0.95}, name="better", place="b")
    two["recipe"] = two["recipe"] | {"batch": 64}
    shown = Page(compare_page([one, two, run_content(name="new", place="c", result=None)]))
    assert shown.headline[0] == "No winner" and "not known" in shown.headline[1]  # on which images
    assert [list(row.values()) for row in shown.rows("Recipes")] == [["batch", "32", "64", "32"]]
    assert shown.rows("Results")[2]["result"] == "Not finished"


def test_a_protocol_shows_rates_and_seeds_and_says_when_it_is_not_finished():
    protocol = {"rates": {"0.001": 0.8, "0.01": 0.9}, "rate": 0.01, "seeds": [0.9, 0.92], "mean": 0.91,
                "std": 0.0141, "images": 20}  # fmt: skip
    shown = Page(protocol_page(protocol, seeds(0.9, 0.92), "pets"))
    assert shown.headline[0] == "91.0 ± 1.4 % accuracy"
    assert "Learning rate 0.01" in shown.header and "held-out" in shown.header
    one = Page(protocol_page(protocol | {"seeds": [0.9], "mean": 0.9, "std": None}, seeds(0.9), "pets"))
    assert one.headline == ("90 % accuracy", "one seed, on 20 test images")
    unfinished = Page(protocol_page(None, seeds(0.9), "pets"))
    assert (
        unfinished.headline[0] == "Not finished" and unfinished.root.find(".//p[@class='status']") is not None
    )


def test_a_suite_shows_means_tasks_and_what_is_missing():
    row = {"task": "pets", "group": "Natural", "top1": 0.9, "std": None, "seeds": [0.9], "rate": 0.01,
           "images": 20, "complete": False, "differs": "another order"}  # fmt: skip
    means = {"Natural": {"mean": 0.9, "tasks": 1, "of": 7, "complete": False},
             "VTAB-1k": {"mean": 0.9, "tasks": 1, "of": 19, "complete": False}}  # fmt: skip
    suite = {"model": "m.npz", "tasks": [row], "missing": [{"task": "dtd"}], "means": means, "waiting": 2}
    document = suite_page(suite, "out", {"pets": "pets/report.html"})
    shown = Page(document)
    assert shown.headline[0] == "90.00 %" and "1 of 19 tasks (VTAB-1k)" in shown.headline[1]
    assert "2 tasks" in shown.root.find(".//p[@class='status']").text
    assert ": dtd." in shown.text("Tasks") and shown.rows("Tasks")[0]["note"].startswith("another order; ")
    assert [row["complete"] for row in shown.rows("Groups")] == ["no", "no"]
    assert '<a href="pets/report.html">' in document
