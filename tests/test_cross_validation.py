"""Cross-validation: stratified folds that keep copies together, one run for each, resumed and summarised."""

import json
from dataclasses import replace
from io import BytesIO
from statistics import mean, stdev

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from test_cli import run as command

import vitkit
from vitkit.data.folds import duplicate_groups, fold_numbers, parse_fold
from vitkit.data.sources.source import from_rows
from vitkit.metrics.intervals import mean_interval
from vitkit.runs import protocol
from vitkit.runs.provenance.fingerprint import remembered_splits

TINY = {"model": "ViT-Ti/4", "image_size": 8, "steps": 6, "batch": 16, "workers": 0}
SET = {"model_options": "width=32,depth=1,heads=2,hidden=32", "schedule.warmup": 1, "subset": "300"}


def png(pixels: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def pictures() -> dict[str, bytes]:
    """47 random images of three classes; the first also as a copy, and as a brighter near-duplicate."""
    rng = np.random.default_rng(0)
    content = {}
    for n in range(47):
        small = Image.fromarray(rng.integers(20, 230, (9, 9, 3), dtype=np.uint8))
        content[f"{n:02d} {'abc'[n % 3 if n < 40 else 0]}"] = png(np.array(small.resize((64, 64))))
    first = np.array(Image.open(BytesIO(content["00 a"])))
    return content | {"copy a": content["00 a"], "bright a": png(first + 4)}


def source_of(pictures: dict[str, bytes], order):
    rows = [(name, name[-1]) for name in order]
    return from_rows("made", rows, lambda name: pictures[name])


def test_folds_are_stratified_disjoint_and_the_same_in_any_order(pictures):
    source = source_of(pictures, sorted(pictures))
    groups = duplicate_groups(source)
    folds = dict(zip(source.keys, fold_numbers(source, 5, groups), strict=True))
    assert len(set(groups.tolist())) == 47 and len({folds[f"{n} a"] for n in ("00", "copy", "bright")}) == 1
    for label in "bc":
        counts = np.bincount([f for name, f in folds.items() if name[-1] == label], minlength=5)
        assert counts.max() - counts.min() <= 1 and counts.sum() == 13
    totals = np.bincount(list(folds.values()), minlength=5)
    assert totals.max() - totals.min() <= 2
    other = source_of(pictures, sorted(pictures, reverse=True))
    again = dict(zip(other.keys, fold_numbers(other, 5, duplicate_groups(other)), strict=True))
    assert again == folds
    with refused("data.empty", "48"):
        fold_numbers(source, 48, groups)


def test_what_a_fold_is_called():
    assert parse_fold("2/5") == (2, 5)
    for text in ("0/5", "6/5", "1/1", "1/101", "5", "a/b", ""):
        with refused("recipe.value"):
            parse_fold(text)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A cross-validation that was stopped in its second fold and then continued."""
    out, real = tmp_path_factory.mktemp("folds") / "run", protocol.run

    def stopped(recipe, *rest):
        if recipe.fold == "2/3":
            raise KeyboardInterrupt
        return real(recipe, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "run", stopped)
        with pytest.raises(KeyboardInterrupt, match="continues"):
            vitkit.finetune("digits", folds=3, out=out, set=SET, **TINY)
    assert not (out / "recipe.json").exists() and not (out / "fold-2").exists()
    before = (out / "fold-1" / "model.safetensors").stat().st_mtime_ns
    run = vitkit.finetune("digits", folds=3, out=out, set=SET, **TINY)
    assert (out / "fold-1" / "model.safetensors").stat().st_mtime_ns == before
    return run


def test_every_train_image_is_tested_once_and_the_final_run_has_them_all(done):
    held_out, final = [], remembered_splits(done.folder)
    for number in (1, 2, 3):
        folder = done.folder / f"fold-{number}"
        recipe = vitkit.Run(folder).recipe
        expected = replace(done.recipe, fold=f"{number}/3", train_on="train", report_on="val", evaluations=0)
        assert recipe == expected and not recipe.keeps_best
        splits = remembered_splits(folder)
        held_out += [key for key, split in splits.items() if split == "val" and isinstance(key, bytes)]
        assert {k for k, split in splits.items() if split == "test"} == {
            k for k, split in final.items() if split == "test"
        }
    assert len(held_out) == len(set(held_out))
    whole = vitkit.finetune("digits", plan=True, out=done.folder / "other", set=SET, **TINY)
    everything = len(whole.splits["test"]) + len(held_out)
    assert everything == 1797 and "val" not in set(final.values())
    assert done.metrics["split"] == "test" and done.recipe.train_on == "train+val"


def test_the_summary_is_that_of_the_folds(done, capsys):
    rows = [vitkit.Run(done.folder / f"fold-{n}").metrics for n in (1, 2, 3)]
    shares, images = [row["top1"] for row in rows], [row.images for row in rows]
    assert done.folds["mean"] == mean(shares) and done.folds["std"] == stdev(shares)
    assert done.folds["interval"] == list(mean_interval(shares, images)) and done.folds["images"] == sum(
        images
    )
    assert [row["top1"] for row in done.folds["folds"]] == shares and all(
        row["split"] == "val" for row in rows
    )
    page = (done.folder / "report.html").read_text("utf-8")
    assert "Cross-validation" in page and "of 3 folds" in page
    assert "Cross-validation" not in (done.folder / "fold-1" / "report.html").read_text("utf-8")
    sets = [f"{name}={value}" for name, value in SET.items()]
    words = [
        "finetune", "digits", "--model", "ViT-Ti/4", "--image-size", "8", "--steps", "6", "--batch", "16",
        "--workers", "0", "--out", str(done.folder), "--folds", "3", "--set", *sets,
    ]  # fmt: skip
    assert command(*words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["already_finished"] and result["cross_validation"] == done.folds
    assert command(*words) == 0
    output = capsys.readouterr().out
    assert "mean of 3 folds" in output and output.count("%") > 6
    assert vitkit.predict(done, np.zeros((8, 8, 3), np.uint8), top=1)


def test_a_run_beside_it_keeps_the_test_images_and_has_val(done):
    """All other images were trained on in the end, but a new run needs some for validation."""
    beside = vitkit.finetune(
        "digits", plan=True, out=done.folder / "other", split_of=done.folder, set=SET, **TINY
    )
    test = {bytes(key) for key in beside.splits["test"].hashes}
    assert test == {
        key.rstrip(b"\0")
        for key, split in remembered_splits(done.folder).items()
        if split == "test" and isinstance(key, bytes)
    }
    assert len(beside.splits["val"]) > 100 and beside.recipe.keeps_best


def test_other_settings_and_conflicts_are_refused(done, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("run.changed"):
        vitkit.finetune("digits", folds=4, out=done.folder, set=SET, **TINY)
    with refused("run.changed"):
        vitkit.finetune("digits", out=done.folder, set=SET, **TINY)
    for options, code in (
        ({"folds": 1}, "request.value"), ({"folds": 101}, "request.value"),
        *(({"folds": 3, name: value}, "request.conflict") for name, value in (
            ("protocol", True), ("keep", "best"), ("patience", 2), ("more_steps", 2),
            ("set", ["calibrate=true"]),
        )),
    ):  # fmt: skip
        with refused(code):
            vitkit.finetune("digits", **TINY, **options)
    assert not list(tmp_path.iterdir())
