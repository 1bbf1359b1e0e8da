"""B15, B16: runs that go on with other settings, and files of an earlier version."""

import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
from make_golden import FILES, GOLDEN, logits, tiny

import vitkit
from vitkit.recipes.recipe import from_json, override
from vitkit.runs.folder import RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime
from vitkit.training.checkpoint import complete, latest
from vitkit.weights.card import from_json as from_card

pytestmark = pytest.mark.faults
REFUSED = {
    "rate": "schedule.rate=0.5", "batch": "batch=4", "image size": "image_size=16", "seed": "seed=9",
    "augmentation": "randaugment=2,9", "mixup": "mixup=0.5", "smoothing": "label_smoothing=0.1",
    "length": "length.steps=9", "warm-up": "schedule.warmup=2", "optimizer": "optimizer.kind=sgd",
    "decay": "optimizer.weight_decay=0.3", "classes or data": "data=elsewhere", "model": "model=ViT-S/4",
    "depth": "model_options=depth=2", "dropout": "dropout=0.2", "loss": "loss=sigmoid", "crop": "crop=squash",
    "subset": "subset=41", "patience": "patience=2", "moments": "optimizer.moment=bf16",
}  # fmt: skip
FLAGS = {  # of those that have a flag of their own
    "rate": "--lr ", "batch": "--batch ", "image size": "--image-size ", "seed": "--seed ",
    "length": "--steps ", "classes or data": "DATA ", "model": "--model ", "subset": "--subset ",
    "patience": "--patience ",
}  # fmt: skip
ALLOWED = {
    "micro-batch": "micro_batch=4", "evaluations": "evaluations=2", "text": "about=another",
    "shots": "shots=3",
}  # fmt: skip


@pytest.fixture
def begun(tmp_path):
    """The golden run, stopped at step 3 of 6."""
    return Path(shutil.copytree(GOLDEN / "run", tmp_path / "run"))


def go(out, recipe, runtime=Runtime(), **options):
    return run(recipe, out, runtime, RunOptions(**({"workers": 0, "quiet": True, "report": False} | options)))


@pytest.mark.parametrize("what", REFUSED)
def test_B15_what_would_change_the_run_is_refused_by_name(what, begun, tally):
    changed = override(tiny(), [REFUSED[what]])
    flag = FLAGS.get(what, f"--set {REFUSED[what].partition('=')[0]}=")
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=rf"{re.escape(flag)}\S+ -> ") as refused:
        go(begun, changed)
    assert str(begun) in str(refused.value) and "another --out" in str(refused.value)
    assert "{" not in str(refused.value), "no tables of Python"
    assert all(path.read_bytes() == data for path, data in before.items()), "and nothing is touched"
    tally(refused=1)


@pytest.mark.parametrize("what", ALLOWED)
def test_B15_what_changes_nothing_that_counts_is_allowed(what, begun, tally):
    result = go(begun, override(tiny(), [ALLOWED[what]]))
    assert result.steps == 6 and result.test["loss"] == pytest.approx(told()["run"], abs=1e-5)
    tally(allowed=1)


MACHINES = {
    "precision": (Runtime(precision="bf16"), "precision: fp32 until here, now bf16"),
    "threads": (Runtime(), "threads: 99 until here, now "),
    "torch": (Runtime(), "torch: 0.1 until here, now "),
    "processes": (Runtime(), "processes: 8 until here, now 1"),
}


@pytest.mark.parametrize("what", MACHINES)
def test_B15_another_machine_is_allowed_and_told(what, begun, capfd, tally):
    runtime, words = MACHINES[what]
    if what != "precision":
        pretend(latest(begun / "checkpoints")[0], what)
    assert go(begun, tiny(), runtime, quiet=False).steps == 6
    messages = capfd.readouterr().err
    assert words in messages and "equal up to rounding" in messages
    tally(told=1)


def pretend(path: Path, what: str) -> None:
    """As if the checkpoint had been written elsewhere."""
    from vitkit.io.files import sha256
    from vitkit.training import checkpoint

    facts = json.loads((path / "facts.json").read_text())
    facts["remember"]["machine"][what] = {"threads": 99, "torch": "0.1", "processes": 8}[what]
    (path / "facts.json").write_text(json.dumps(facts))
    hashes = json.loads((path / checkpoint.MANIFEST).read_text())
    hashes["facts.json"] = sha256(path / "facts.json")
    (path / checkpoint.MANIFEST).write_text(json.dumps(hashes))


@pytest.mark.control("vitkit.runs.folder.claim")
def test_B15_control_without_the_check_a_changed_recipe_goes_on_as_if_it_were_the_same(
    begun, switched_off, tally
):
    switched_off("vitkit.runs.folder.claim", lambda out, recipe: recipe)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_B15_what_would_change_the_run_is_refused_by_name("rate", begun, tally)
    result = json.loads((begun / "result.json").read_text())
    assert result["steps"] == 6 and result["test"]["loss"] != pytest.approx(told()["run"], abs=1e-3)


def told() -> dict:
    return json.loads((GOLDEN / "told.json").read_text())


def furthest(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("format", FILES)
def test_B16_a_model_file_of_every_format_means_what_it_meant(format, tally):
    name, options = FILES[format]
    assert furthest(logits(GOLDEN / name, **options), told()[format]) <= 1e-6
    if format in ("vitkit", "official", "hf"):
        assert vitkit.load(GOLDEN / name).labels == ("a", "b", "c")
    tally(files=1)


def test_B16_a_run_that_was_begun_goes_on_to_the_same_end(begun, tally):
    assert from_json((begun / "recipe.json").read_text()) == tiny()
    assert [path.name for path in complete(begun / "checkpoints")] == ["step-00000003"]
    result = go(begun, tiny())
    assert result.steps == 6 and result.test["loss"] == pytest.approx(told()["run"], abs=1e-5)
    assert furthest(logits(begun / "model.safetensors"), told()["trained"]) <= 1e-5
    tally(runs=1)


@pytest.mark.control("vitkit.weights.load.from_json")
@pytest.mark.parametrize("format", ["vitkit", "official"])
def test_B16_control_a_model_without_the_numerics_of_its_card_means_something_else(
    format, switched_off, tally
):
    def usual(text):
        card = from_card(text)
        return replace(card, config=replace(card.config, gelu="tanh"))

    switched_off("vitkit.weights.load.from_json", usual)
    with pytest.raises(AssertionError):
        test_B16_a_model_file_of_every_format_means_what_it_meant(format, tally)


def without_defaults(kind, told):
    """Protection off: a recipe that lacks a field which came later is not read."""
    return kind(**{field.name: told[field.name] for field in fields(kind)})


@pytest.mark.control("vitkit.recipes.recipe.build")
def test_B16_control_a_run_of_before_a_field_came_does_not_go_on(begun, switched_off, tally):
    switched_off("vitkit.recipes.recipe.build", without_defaults)
    with pytest.raises(KeyError):
        test_B16_a_run_that_was_begun_goes_on_to_the_same_end(begun, tally)


def test_B16_the_golden_files_stay_small():
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 200_000
