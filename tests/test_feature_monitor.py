"""k-NN and few-shot accuracy while a run learns without labels, and the verdict at its end."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from page_reader import Page
from refusals import refused
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, rows, tiny
from together import together
from toy_task import one_of_many, registered_toy

import vitkit
from vitkit.metrics.frozen_features import neighbours, neighbours_correct, probe
from vitkit.metrics.intervals import mcnemar, paired_interval
from vitkit.runs import feature_monitor
from vitkit.runs.build import open_splits
from vitkit.runs.feature_monitor import BEFORE, LabelledSet, compared
from vitkit.runs.feature_pictures import IMAGES, MOMENTS, PICTURES, thinned
from vitkit.runs.folder import Interrupted
from vitkit.runs.page import gather
from vitkit.training.schedule import Duration

BARE = ("width=32", "depth=2", "heads=2", "hidden=32")


@pytest.fixture(scope="module", autouse=True)
def toy():
    with registered_toy():
        yield


def without_labels(**changes):
    base = {"objective": "toy", "mixup": 0.0, "dropout": 0.0, "model_options": BARE, "patience": 0}
    return tiny(**(base | changes))


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("monitor") / "run"
    go(out, without_labels())
    return out


def test_each_evaluation_measures_the_features_on_validation_images(straight):
    splits, output = open_splits(without_labels()), rows(straight)
    during = [row for row in output if "knn" in row]
    assert [row["step"] for row in during] == [4, 8, 12] and not any("test_loss" in row for row in during)
    assert all(row["knn_images"] == row["fewshot_images"] == len(splits["val"]) for row in during)
    assert all(0 < row["knn"] <= 1 and row["fewshot_shots"] == 5 for row in during)
    end = next(row for row in output if "test_loss" in row)
    assert {"test_std", "test_rank"} <= set(end)


def test_the_verdict_is_in_the_result_and_its_numbers_are_those_of_the_digits(straight):
    result = json.loads((straight / "result.json").read_text())
    verdict, before = result["features"], json.loads((straight / BEFORE).read_text())
    assert verdict["images"] == 179 == len(before["knn"]) == len(before["probe"])
    assert verdict["split"] == "test images" and verdict["start"] == "random weights"
    for name, measure in verdict["measures"].items():
        assert measure["before"] == pytest.approx(before[name].count("1") / 179)
        low, high = measure["difference"]
        assert low < measure["after"] - measure["before"] < high
    assert verdict["sentence"].startswith(("the features are", "no difference"))


def test_a_resumed_run_has_the_same_verdict(straight, tmp_path):
    with sigterm_at(6), pytest.raises(Interrupted):
        go(tmp_path, without_labels())
    stored = (tmp_path / BEFORE).read_bytes()
    go(tmp_path, without_labels())
    assert (tmp_path / BEFORE).read_bytes() == stored == (straight / BEFORE).read_bytes()
    first, second = (json.loads((at / "result.json").read_text()) for at in (straight, tmp_path))
    assert first["features"] == second["features"]


def test_measuring_changes_no_bit_of_the_run(straight, tmp_path):
    go(tmp_path, without_labels(fewshot="none"))
    assert not any("knn" in row for row in rows(tmp_path)) and not (tmp_path / BEFORE).exists()
    assert "features" not in json.loads((tmp_path / "result.json").read_text())
    assert (tmp_path / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_another_labelled_set_can_be_named(tmp_path):
    go(tmp_path, without_labels(fewshot="digits", length=Duration(steps=2), evaluations=1))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["features"]["data"] == "digits" and {"knn", "fewshot_mean"} <= set(result["test"])


def test_other_labelled_images_give_no_verdict(tmp_path, monkeypatch):
    with sigterm_at(2), pytest.raises(Interrupted):
        go(tmp_path, without_labels(length=Duration(steps=4), evaluations=1))
    stored = json.loads((tmp_path / BEFORE).read_text())
    (tmp_path / BEFORE).write_text(json.dumps(stored | {"images": "others"}))
    assert go(tmp_path, without_labels(length=Duration(steps=4), evaluations=1)).features is None


def test_the_same_weights_show_no_difference(straight, tmp_path):
    r = without_labels(weights=str(straight), model="", model_options=(), length=Duration(steps=1))
    go(tmp_path, replace(r, schedule=replace(r.schedule, rate=0.0, warmup=0)))
    verdict = json.loads((tmp_path / "result.json").read_text())["features"]
    assert verdict["verdict"] == "no difference" and "179" in verdict["sentence"]
    assert verdict["start"] == "the weights it started from"
    assert all(measure["p"] == 1 for measure in verdict["measures"].values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_measure_alike(straight, tmp_path, kind):
    together(2, one_of_many, without_labels(), tmp_path, {}, parallel=kind)
    one, two = (json.loads((at / "result.json").read_text())["features"] for at in (straight, tmp_path))
    assert one["images"] == two["images"]
    for name in one["measures"]:
        assert two["measures"][name]["before"] == pytest.approx(one["measures"][name]["before"], abs=0.02)


def facts(correct: dict[str, str], index=None):
    return correct | {"index": index or list(range(len(correct["knn"]))), "reference": 50}


@pytest.mark.parametrize(
    ("knn", "probe", "verdict"),
    [
        ((0, 20), (3, 5), "better"), ((20, 0), (4, 4), "worse"), ((20, 0), (0, 20), "mixed"),
        ((3, 5), (4, 4), "no difference"), ((0, 6), (0, 5), "no difference"), ((0, 7), (0, 0), "better"),
    ],
)  # fmt: skip
def test_a_verdict_needs_enough_images_that_changed(knn, probe, verdict):
    """(lost, won) images of 100: 6 alone have p = 0.031, above the 0.025 of each of two measures."""
    before = {n: "1" * lost + "0" * (100 - lost) for n, (lost, _) in (("knn", knn), ("probe", probe))}
    after = {n: "0" * lost + "1" * won + "0" * (100 - lost - won)
             for n, (lost, won) in (("knn", knn), ("probe", probe))}  # fmt: skip
    result = compared(facts(before), facts(after), "random weights")
    assert result["verdict"] == verdict
    named = {measure["verdict"] for measure in result["measures"].values()}
    assert all(word in result["sentence"] for word in named)
    assert result["measures"]["knn"]["p"] == mcnemar(*knn)


def test_images_that_became_unusable_are_left_out_of_both_sides():
    first = facts({"knn": "1100", "probe": "0000"}, [0, 1, 2, 3])
    second = facts({"knn": "110", "probe": "000"}, [1, 2, 3])
    measure = compared(first, second, "random weights")
    assert measure["images"] == 3 and measure["measures"]["knn"]["before"] == pytest.approx(1 / 3)
    assert measure["measures"]["knn"]["after"] == pytest.approx(2 / 3)


def test_the_paired_interval_covers_the_true_difference():
    """By its definition, and about 95 % of 2,000 simulated comparisons of 150 images."""
    low, high = paired_interval(3, 12, 100)
    first, second = 4 / 102, 13 / 102
    half = 1.959964 * np.sqrt((first + second - (second - first) ** 2) / 102)
    assert (low, high) == pytest.approx((second - first - half, second - first + half), abs=1e-6)
    rng = np.random.default_rng(0)
    covered = 0
    for lost, won, _ in rng.multinomial(150, [0.08, 0.14, 0.78], size=2000):
        low, high = paired_interval(int(lost), int(won), 150)
        covered += low <= 0.06 <= high
    assert 0.935 < covered / 2000 < 0.975
    with refused("data.empty"):
        paired_interval(0, 0, 0)


def test_correct_images_amount_to_the_accuracies():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    sets = (x[:40], y[:40], x[40:], y[40:])
    assert neighbours(*sets, k=5) == int(neighbours_correct(*sets, k=5).sum()) / 20
    result = probe(*sets, epochs=3)
    assert result.top1 == pytest.approx(float(result.correct.float().mean())) and len(result.correct) == 20


def test_the_cap_keeps_classes_alike_and_classifies_only_known_ones():
    splits = open_splits(without_labels())
    data = LabelledSet("digits", splits["train"], splits["val"], "validation images")
    small = data.capped(50, 30)
    assert np.bincount(small.reference.labels).tolist() == [5] * 10 and len(small.classified) == 30
    few = replace(data, reference=data.reference.take(np.flatnonzero(data.reference.labels < 3)))
    assert set(few.capped(10**4, 10**4).classified.labels.tolist()) == {0, 1, 2}


def test_features_without_information_are_reported_and_the_run_goes_on(tmp_path, monkeypatch):
    real = feature_monitor.Extractor.features

    def equal(self, source):
        return replace(features := real(self, source), x=torch.ones_like(features.x))

    monkeypatch.setattr(feature_monitor.Extractor, "features", equal)
    result = go(tmp_path, without_labels(length=Duration(steps=2), evaluations=1))
    assert result.features is None and "knn" not in result.test


def test_the_report_shows_curves_the_verdict_and_features_as_colours(straight):
    page = Page((straight / "report.html").read_text("utf-8"))
    result = json.loads((straight / "result.json").read_text())
    assert "Features" in page.sections
    kept = json.loads((straight / PICTURES).read_text())
    assert [moment["step"] for moment in kept["moments"]] == [0, 4, 8, 12]
    assert all(len(moment["colours"]) == len(kept["images"]) == IMAGES for moment in kept["moments"])
    assert [row["caption"] for row in kept["pictures"]] == ["mirrored"] * IMAGES
    text = (straight / "report.html").read_text("utf-8")
    assert text.count("data:image/") >= IMAGES * 6
    for label in ("k-NN accuracy", "feature std", "effective rank"):
        assert f">{label}<" in text
    assert result["features"]["sentence"].split(":")[0][1:] in text
    assert run("report", straight) == 0  # drawn again from the files


def test_the_report_has_commands_that_compare_by_fine_tuning(straight, tmp_path, monkeypatch):
    """They are run as they stand, but shorter."""
    lines = gather(straight)["commands"]["Compare it with its start by fine-tuning"]
    for line in lines[:2]:
        _, *words = shlex.split(line)
        where = words.index("--out") + 1
        words[where] = str(tmp_path / Path(words[where]).name)
        more = ["--workers", "0", "--steps", "2", "--batch", "16"]
        assert run(*words, *([] if "--set" in words else ["--set"]), "evaluations=0", *more) == 0
    folders = [tmp_path / Path(word).name for word in shlex.split(lines[2])[2:]]
    models = [vitkit.load(folder).config for folder in folders]
    assert models[0] == models[1] and models[0].width == 32
    assert run("report", *folders, "--out", tmp_path / "both.html") == 0


def test_the_number_of_pictures_is_bounded():
    steps = [{"step": step} for step in range(MOMENTS)]
    for step in range(MOMENTS, 100):
        steps = thinned([*steps, {"step": step}])
        assert len(steps) <= MOMENTS and steps[0]["step"] == 0 and steps[-1]["step"] == step
    gaps = np.diff([entry["step"] for entry in steps])
    assert gaps.max() <= 6 * gaps[:-1].min()
