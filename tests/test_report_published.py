"""Published numbers: the papers' own, told apart from one's own, and only beside the task they are of."""

from statistics import mean

import pytest
from page_reader import Page
from test_report_page import run_content, seeds, words

from vitkit.datasets.vtab import TASKS
from vitkit.report import literature
from vitkit.report.compare_page import protocol_page
from vitkit.report.literature import scores, sheet, task_of
from vitkit.report.run_page import run_page
from vitkit.report.study_page import study_page
from vitkit.report.suite_page import suite_page
from vitkit.studies.scale import STUDIES


def test_table_9_averages_to_the_means_of_table_2_and_figure_2():
    assert set(literature.TABLE_9) == set(TASKS)
    for column, (model, data) in enumerate(literature.MODELS_9):
        (row,) = [r for r in literature.FIG_2 if r[:2] == (model, data)]
        groups = [[v[column] for k, v in literature.TABLE_9.items() if TASKS[k].group == group]
                  for group in literature.GROUPS[:3]]  # fmt: skip
        assert [round(mean(group), 1) for group in groups] == pytest.approx(row[2][:3], abs=0.051)
        whole = mean(v[column] for v in literature.TABLE_9.values())
        assert whole == pytest.approx(literature.TABLE_2["VTAB-1k"][column][0], abs=0.02)


def test_tables_5_and_6_agree_where_they_are_of_the_same_runs():
    six = {(m, e): dict(zip(literature.TASKS_6, v, strict=True)) for m, e, v, _ in literature.TABLE_6}
    jft = dict(zip(literature.TASKS_5, literature.TABLE_5["JFT-300M"], strict=True))
    five = {m: {t: row[i] for t, row in jft.items()} for i, m in enumerate(literature.MODELS_5)}
    for model, epochs in (("ViT-B/32", 7), ("ViT-B/16", 7), ("ViT-L/32", 7), ("ViT-L/16", 14)):
        assert five[model] == six[model, epochs]
    assert len(six) == 18 and six["BiT-R200x3", 14]["ImageNet"] == 87.22


@pytest.mark.parametrize(
    ("data", "recipe", "images", "task"),
    [
        ("data/cifar10", "finetune", 7, "CIFAR-10"), ("CIFAR-100.zip", "", None, "CIFAR-100"),
        ("/x/Oxford-IIIT-Pet", "", None, "Pets"), ("flowers_102.npz", "", None, "Flowers-102"),
        ("/data/ILSVRC2012", "", None, "ImageNet"), ("imagenette", "", None, None),
        ("tiny-imagenet.npz", "", None, None), ("birds", "pets", 900, None), ("birds", "pets", 3669, "Pets"),
        ("x", "table2.ViT-L/16", 50_000, "ImageNet"), ("vtab:dtd:/v", "vtab", 1880, "vtab:dtd"),
        ("vtab:other:/v", "vtab", 1880, None), ("", "", None, None),
    ],
)  # fmt: skip
def test_a_run_is_of_a_published_task_by_its_data_or_by_its_number_of_test_images(data, recipe, images, task):
    assert task_of(data, recipe, images) == task


def test_what_is_published_of_a_task():
    by = {(s.model, s.pretrained, s.source): (s.value, s.std) for s in scores("CIFAR-100")}
    assert by["ViT-H/14", "JFT-300M", "Table 2"] == (94.55, 0.04)
    assert by["BiT-L (R152x4)", "JFT-300M", "Table 2"] == (93.51, 0.08)
    assert by["ViT-B/32", "ImageNet", "Table 5"] == (86.31, None)
    assert by["R50+ViT-L/16, 14 epochs", "JFT-300M", "Table 6"] == (93.89, None)
    assert len(by) == 4 + 14 + 18  # of Noisy Student nothing is published here
    assert [s.value for s in scores("ImageNet") if "Noisy" in s.model] == [88.4]


def test_a_report_shows_published_numbers_beside_its_own_and_says_what_they_are():
    run = run_content()
    assert "Published" not in words(run_page(run))
    run["recipe"] |= {"data": "cifar10"}
    told = words(run_page(run))
    assert "not measured here" in told and "Dosovitskiy" in told
    assert "90 this report" in told and "99.50 ± 0.06 Table 2" in told and "BiT-L (R152x4)" in told
    section = Page(run_page(run)).text("Published results")
    assert "10,000 test images" in section and section.count(" 30.") == 1
    run["result"]["test"]["split"] = "val"  # no test accuracy: nothing to compare
    assert "Published" not in words(run_page(run))
    protocol = {"rates": {}, "rate": 0.01, "seeds": [0.9, 0.92], "mean": 0.91, "std": 0.014, "images": 3669,
                "steps": 500}  # fmt: skip
    runs = seeds(0.9, 0.92)
    for one in runs:
        one["recipe"] = one["recipe"] | {"data": "x", "name": "pets"}
    told = words(protocol_page(protocol, runs, "mine"))
    assert "91.00 ± 1.40 this report" in told and "96.62 ± 0.23 Table 2" in told


def suite_of(*rows, setting=None):
    return {
        "model": "m.npz", "missing": [], "waiting": 0, "setting": setting,
        "tasks": [{"group": "Natural", "std": None, "seeds": [0.5], "images": 20, "complete": True,
                   "differs": None, "top1": 0.5, "steps": 5} | row for row in rows],
        "means": {"Natural": {"mean": 0.5, "tasks": len(rows), "of": 7, "complete": False},
                  "VTAB-1k": {"mean": 0.5, "tasks": len(rows), "of": 19, "complete": False}},
    }  # fmt: skip


def test_a_suite_says_what_was_chosen_for_each_task():
    own = suite_of(
        {
            "task": "pets",
            "rate": 0.01,
            "chosen": "rate-0.01",
            "tried": {"rate-0.003": 0.4, "rate-0.01": 0.45},
        },
        {
            "task": "dtd",
            "rate": 0.003,
            "chosen": "rate-0.003",
            "tried": {"rate-0.003": 0.3, "rate-0.01": 0.2},
        },
    )
    shown = Page(suite_page(own, "out", {}))
    assert "Each task has its own setting" in shown.header
    assert [list(row.values()) for row in shown.rows("Settings")] == [
        ["pets", "rate 0.01", "40.0 %", "45.0 %"], ["dtd", "rate 0.003", "30.0 %", "20.0 %"]
    ]  # fmt: skip
    means = {"rate-0.01-steps-500": 0.31, "rate-0.01-steps-2500": 0.33}
    chosen = {"chosen": "rate-0.01-steps-2500", "rate": 0.01, "tried": means}
    setting = {"chosen": "rate-0.01-steps-2500", "means": means, "tasks": 1, "tried": {"pets": means}}
    shown = Page(suite_page(suite_of({"task": "pets"} | chosen, setting=setting), "out", {}))
    assert "rate 0.01, steps 2500, the best of 2 " in shown.header
    (mean_row,) = shown.rows("Settings", css="marked")
    assert list(mean_row.values()) == ["mean", "rate 0.01, steps 2500", "31.0 %", "33.0 %"]
    plain = suite_of({"task": "pets", "rate": 0.01, "chosen": "rate-0.01", "tried": {}})
    assert "without a search" in words(suite_page(plain, "out", {}))


def test_a_suite_shows_table_9_and_figure_2_and_what_was_never_published():
    row = {"rate": 0.01, "chosen": "rate-0.01", "tried": {}}
    told = words(suite_page(suite_of({"task": "pets"} | row), "out", {}))
    assert "pets 50 97.2 96.7 92.7" in told and "dtd" not in told
    assert "VIVI-Ex-100% (R50x3)" in told and told.count("no numbers are published") == 2
    assert (
        "86.7 87.0 65.0 77.63" in told and "50.00 *" in told and "not comparable" in told and "76.29" in told
    )
    assert "Published" not in words(suite_page(suite_of({"task": "birds"} | row), "out", {}))


def test_every_study_shows_what_is_published_of_it():
    for one in STUDIES.values():
        for name in one.published:
            assert sheet(name).source and (sheet(name).rows or "no numbers are published" in sheet(name).note)
    assert all(
        one.published
        for one in STUDIES.values()
        if one.name not in ("resolution", "recipes", "self-supervision")
    )
    page = {"study": "scaling", "shows": "Fig. 5", "about": "x", "verdicts": [], "figures": [], "means": [],
            "laws": [], "failed": {}, "chosen": {}, "rows": [], "total": 0, "commands": []}  # fmt: skip
    told = words(study_page(page | {"published": ("Table 6", "Fig. 4")}))
    assert "BiT-R200x3 14 87.22 90.15 99.34 93.53 96.32 99.04 3306" in told.replace("3,306", "3306")
    assert "Published results, not measured here" in told and "no numbers are published" in told
