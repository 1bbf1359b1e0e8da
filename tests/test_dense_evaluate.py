"""`vitkit evaluate`, `inspect`, `report` and `push` with models for segmentation and detection."""

import json
from pathlib import Path

import pytest
from test_cli import run
from test_dense_reports import done  # noqa: F401  (a fixture)

import vitkit
from vitkit.errors import Error
from vitkit.tasks.task import task_class

KEYS = {
    "segment": {"images", "miou", "pixel_accuracy", "per_class", "interval", "ignored", "confusion"},
    "detect": {"images", "ap", "ap50", "ap75", "per_class", "threshold", "errors", "confusion"},
}
KEYS["instances"] = KEYS["detect"]
EACH = {"segment": {"iou", "accuracy", "pixels", "images"}, "detect": {"ap", "ap50", "objects", "images"}}
EACH["instances"] = EACH["detect"]


def printed(capsys, *words) -> tuple[int, str]:
    capsys.readouterr()
    code = run(*words)
    return code, capsys.readouterr().out


def test_evaluate_repeats_the_numbers_of_the_run(done, capsys):  # noqa: F811
    name = done.name
    stored = json.loads((done / "result.json").read_text())["test"]
    code, out = printed(capsys, "evaluate", done, "shapes", "--split", "test", "--workers", 0, "--json")
    facts = json.loads(out)
    assert code == 0 and KEYS[name] <= facts.keys() and KEYS[name] <= stored.keys()
    assert facts["split"] == "test" and facts["images"] == stored["images"]
    headline = task_class(name).headline.key
    assert facts[headline] == pytest.approx(stored[headline]) and facts["matched_by"] is not None
    for row in facts["per_class"].values():
        assert EACH[name] <= row.keys()


def test_evaluate_prints_each_table_and_the_headline(done, capsys):  # noqa: F811
    code, out = printed(capsys, "evaluate", done, "shapes", "--split", "test", "--workers", 0)
    assert code == 0 and "circle" in out and "triangle" in out
    task = json.loads((done / "task.json").read_text())
    assert all(table["title"] in out for table in task["tables"])


@pytest.mark.parametrize(
    "words",
    [("--tta", "flip"), ("--reject", "0.5"), ("--view", "centre"), ("--real", "x.json"),
     ("--classes", "x.csv"), ("--merge-tokens", "2"), ("--labels", "cat")],
)  # fmt: skip
def test_options_without_a_meaning_are_refused(done, capsys, words):  # noqa: F811
    capsys.readouterr()
    assert run("evaluate", done, "shapes", "--split", "test", "--workers", 0, *words, "--json") != 0
    code = json.loads(capsys.readouterr().out)["error"]["code"]
    assert code in ("evaluation.unsupported", "model.unsupported")


def test_data_without_targets_is_refused(done, capsys):  # noqa: F811
    capsys.readouterr()
    assert run("evaluate", done, "digits", "--workers", 0, "--json") != 0
    assert json.loads(capsys.readouterr().out)["error"]["code"].startswith("data.")


def test_inspect_leaves_out_class_maps_and_says_why(done, tmp_path, capsys):  # noqa: F811
    capsys.readouterr()
    assert run("inspect", done, "digits", "--images", 2, "--out", tmp_path / "inspection", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"filters", "rollout", "attention_distance"} <= facts["arrays"].keys()
    assert "class_maps" in facts["skipped"] and "class_maps" not in facts["arrays"]
    assert run("inspect", done, "digits", "--class", "circle", "--out", tmp_path / "other", "--json") != 0
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "inspection.unsupported"


def test_the_python_functions_look_too(done):  # noqa: F811
    import numpy as np

    image = np.full((40, 50, 3), 90, np.uint8)
    look = vitkit.inspect(str(done), image)
    assert look.rollout is not None and look.class_map is None and "class_map" in str(look.skipped)
    with pytest.raises(Error) as caught:
        vitkit.inspect(str(done), image, target="circle")
    assert caught.value.code == "inspection.unsupported"


def test_runs_are_compared(done, tmp_path, capsys):  # noqa: F811
    code, out = printed(capsys, "report", done, done, "--out", tmp_path / "compare.html", "--json")
    page = Path(json.loads(out)["report"]).read_text()
    assert code == 0 and json.loads((done / "task.json").read_text())["headline"][0].split()[0] in page


def test_the_card_states_task_metric_and_classes(done, tmp_path):  # noqa: F811
    assert run("push", done, "me/shapes", "--dry-run", tmp_path / "card", "--json") == 0
    card = (tmp_path / "card" / "README.md").read_text()
    kind = "object-detection" if done.name == "detect" else "image-segmentation"
    assert f'pipeline_tag: "{kind}"' in card and "| 3 | triangle |" in card
    metric = '"mean_iou"' if done.name == "segment" else '"average_precision"'
    assert metric in card and "BiT" not in card


@pytest.mark.parametrize("format", ["hf", "timm"])
def test_other_layouts_refuse_its_head(done, tmp_path, capsys, format):  # noqa: F811
    capsys.readouterr()
    assert run("convert", done, tmp_path / "out", "--format", format, "--json") != 0
    assert json.loads(capsys.readouterr().out)["error"]["code"]
