"""Run folders that hold something else than a run writes, and recipe fields of any value: one line each."""

import dataclasses
import json
import shlex
import shutil
import typing

import pytest
from refusals import refused
from test_cli import run
from test_tasks import TINY

from vitkit.models import lora
from vitkit.recipes import RECIPES, recipe
from vitkit.recipes.recipe import Recipe, from_json, override, read_recipe, to_json
from vitkit.runs.page import rows
from vitkit.studies.analysis import history
from vitkit.tasks.task import option_names, task_class, task_names
from vitkit.training.logging import Journal
from vitkit.training.schedule import RANGES, Duration

RECIPE = json.loads(to_json(recipe("scratch")))
ODD_RECIPES = {
    "a list": "[]",
    "null": "null",
    "a number": "3",
    "a text": '"recipe"',
    "nothing": "",
    "cut off": to_json(recipe("scratch"))[:200],
    "no text": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "deep table": '{"a":' * 100_000,
    "large": " " * 2**21 + "{}",
    "unknown field": json.dumps(RECIPE | {"colour": 3}),
    "no name": json.dumps({"batch": 3}),
    "text for a number": json.dumps(RECIPE | {"batch": "16"}),
    "list for a number": json.dumps(RECIPE | {"batch": [16]}),
    "truth for a number": json.dumps(RECIPE | {"batch": True}),
    "number for a text": json.dumps(RECIPE | {"data": 3}),
    "null for a table": json.dumps(RECIPE | {"schedule": None}),
    "list for a table": json.dumps(RECIPE | {"optimizer": [1]}),
    "text in a list": json.dumps(RECIPE | {"image_size": ["8", 8]}),
    "three sides": json.dumps(RECIPE | {"image_size": [8, 8, 8]}),
    "not a number": json.dumps(RECIPE | {"mixup": float("nan")}),
    "infinite": json.dumps(RECIPE | {"length": {"steps": None, "epochs": float("inf")}}),
    "strange table": json.dumps(RECIPE | {"schedule": {"speed": 3}}),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("odd") / "run"
    assert run("finetune", "digits", "--out", out, *TINY) == 0
    return out


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_is_not_written_among_the_images_that_it_is_trained_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "photos")
    for out in (".", tmp_path / "photos"):
        assert run("finetune", ".", "--out", out, *TINY) == 2
        assert "--out" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat"]


def test_a_run_folder_that_was_moved_is_named_where_it_is_now(finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / "my run")
    assert run("finetune", "digits", "--out", out, *TINY) == 0
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(words) > 3 and all(str(out) in line for line in words[:4])  # the last names a new folder
    assert run("finetune", "digits", "--out", out, *TINY, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["run"] == str(out) and again["model"] == str(out / "model.safetensors")


@pytest.mark.parametrize("kind", ODD_RECIPES)
def test_an_odd_recipe_is_one_line_that_names_the_file(kind, folder, capsys):
    content, path = ODD_RECIPES[kind], folder / "recipe.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused("recipe.format", path):
        read_recipe(path)
    assert run("finetune", "digits", "--out", folder, *TINY) == 2
    output = capsys.readouterr().err
    assert str(path) in output and output.count("\n") == 1 and len(output) < 1000
    assert run("report", folder) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


ODD_LINES = [
    "",
    "{",
    "[]",
    "3",
    "null",
    '"step"',
    '{"loss": 1}',
    '{"step": "1", "loss": 2}',
    '{"step": 1.5}',
    '{"step": true}',
    '{"step": -1}',
    '{"step": NaN}',
    '{"step": 1, "loss": NaN}',
    '{"step": 1, "loss": "2"}',
    '{"step": 1, "loss": [2]}',
    '{"step": 1, "loss": null}',
    '{"step": 1, "loss": 1e999}',
    '{"step": 1, "val_top1": {"a": 1}}',
    "[" * 100_000,
    '{"step": ' + "9" * 5000 + "}",
    '{"step": 1, "loss": ' + "9" * 400 + "}",
    '{"step": 1, "loss"',
]


def test_odd_lines_among_the_metrics_are_passed_over_by_report_study_and_resume(folder, capsys):
    path = folder / "metrics.jsonl"
    before, sound = path.read_text(), rows(path)
    path.write_bytes(("\n".join(ODD_LINES) + "\n" + before).encode() + b"\xff\xfe\n")
    assert rows(path)[-len(sound) :] == sound
    assert all(
        isinstance(value, int | float) and value == value for row in rows(path) for value in row.values()
    )
    assert dict(history(path, "loss")) == {row["step"]: row["loss"] for row in sound if "loss" in row}
    assert run("report", folder) == 0
    (folder / "result.json").unlink()  # else it would be finished
    assert run("finetune", "digits", "--out", folder, *TINY) == 0
    output = capsys.readouterr().err
    assert f"{path}: " in output and "dropped" in output
    assert [row["step"] for row in map(json.loads, path.read_text().splitlines())].count(6) >= 1


def test_a_journal_keeps_the_lines_that_are_rows_as_they_are(tmp_path):
    lines = ['{"step": 1, "loss":  0.5}', "[]", '{"step": 2, "loss": NaN}', '{"step": 3, "loss": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    messages: list[str] = []
    Journal(tmp_path, 2, say=messages.append).close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [lines[0], lines[2]]
    assert len([text for text in messages if "dropped 1" in text]) == 1


@pytest.mark.parametrize("name", ["result", "environment", "doctor", "mistakes", "unusable", "task"])
@pytest.mark.parametrize(
    "content",
    ["[]", "null", '{"test": 3}', '{"machine": [], "command": 3, "data": 1}', "{",
     '{"machine": [1], "steps": 3, "data": {}}'],
)  # fmt: skip
def test_other_odd_files_are_no_traceback_in_a_report(name, content, folder, capsys):
    (folder / f"{name}.json").write_text(content)
    assert run("report", folder) in (0, 2)
    assert run("report", folder, folder, "--out", folder / "both.html") in (0, 2)
    output = capsys.readouterr().err
    assert all(str(folder) in line for line in output.splitlines())


def numeric(kind: type = Recipe, prefix: str = "") -> dict[str, typing.Any]:
    """Every field of a recipe with numbers in it, by the name that --set takes."""
    result = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            result |= numeric(hint, f"{prefix}{name}.")
        elif {int, float} & {hint, *typing.get_args(hint)}:
            result[prefix + name] = hint
    return result


def task_numbers() -> dict[str, typing.Any]:
    """The same of the fields of tasks that are no fields of a recipe."""
    result = {}
    for name in task_names():
        options = [f"{name}.{option}" for option in option_names(task_class(name))]
        result |= {n: hint for n, hint in numeric(task_class(name), f"{name}.").items() if n in options}
    return result


def test_every_number_of_a_recipe_has_a_range():
    own = {f"{kind.name}.{field}" for kind in map(task_class, task_names()) for field in kind.ranges}
    own |= {f"lora.{field}" for field in lora.RANGES}
    assert set(numeric()) | set(task_numbers()) == set(RANGES) | own
    for name in RECIPES:
        assert from_json(to_json(recipe(name))) == recipe(name)


VALUES = [
    "-1",
    "-1e9",
    "0",
    "1",
    "nan",
    "inf",
    "-inf",
    "1e300",
    "9" * 40,
    "",
    "text",
    "1,2,3,4",
    "none",
    "0x10",
    "½",
]


@pytest.mark.parametrize(
    "field",
    [*numeric(), *task_numbers(), "crop", "loss", "flip", "evaluation_crop", "model_options", "subset"],
)
def test_every_field_takes_a_value_or_refuses_it_in_one_line(field):
    task = field.partition(".")[0]
    of_task = [f"objective={task}", "optimizer.weight_decay=0"]  # some tasks have their own
    base = override(recipe("scratch"), of_task if task in task_names() else [])
    if field == "length.steps":
        base = dataclasses.replace(base, length=Duration(steps=5))
    for value in VALUES:
        try:
            made = override(base, [f"{field}={value}"])
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            assert field.rpartition(".")[2] in str(error) or field.partition(".")[0] in str(error)
        else:
            assert from_json(to_json(made)) == made, f"{field}={value} is kept as it is"


def test_an_error_names_the_field_its_value_and_the_range():
    with refused("recipe.value", "schedule.rate", "0 to 1000", -1.0):
        override(recipe("scratch"), ["schedule.rate=-1"])
    with refused("recipe.value", "optimizer.momentum", "0 to below 1", "nan"):
        override(recipe("scratch"), ["optimizer.momentum=nan"])


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--epochs", "inf"], "epochs"),
        (["--epochs", "nan"], "epochs"),
        (["--epochs", "0"], "epochs"),
        (["--epochs", "-1"], "epochs"),
        (["--steps", "0"], "steps"),
        (["--image-size", "160000"], "--image-size"),
        (["--image-size", "0"], "--image-size"),
        (["--lr", "nan"], "--lr"),
        (["--seed", "-1"], "seed"),
        (["--device", "meta"], "meta"),
        (["--device", "vulkan"], "vulkan"),
        (["--device", "gpu"], "gpu"),
        (["--device", ""], "device"),
        (["--set", "randaugment=1"], "randaugment"),
        (["--set", "crop=some"], "crop"),
        (["--set", "resize=4", "crop=random"], "resize"),
        (["--set", "test=0"], "fraction"),
    ],
)
@pytest.mark.parametrize("verb", ["finetune", "pretrain"])
def test_a_value_that_no_training_can_have_is_refused(verb, words, phrase, tmp_path, capsys):
    base = ["--model", "ViT-Ti/4", "--workers", "0", "--out", str(tmp_path / "run")]
    base += [] if "--image-size" in words else ["--image-size", "8"]
    assert run(verb, "digits", *base, *words) == 2
    output = capsys.readouterr().err
    assert phrase in output and output.count("\n") == 1 and not (tmp_path / "run").exists()
