"""Rejected images: the threshold that a model stores, and "unknown" in every form of an answer."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, randomise
from PIL import Image
from refusals import refused
from test_cli import run as command

import vitkit
from vitkit.cli.verbs import with_values
from vitkit.metrics.classification import TEMPERATURES, acceptance_threshold, at_temperatures, calibration
from vitkit.models.variants import build


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model whose threshold is the median confidence for ten photos, and a copy without a threshold."""
    folder, rng = tmp_path_factory.mktemp("rejection"), np.random.default_rng(0)
    model = randomise(build("ViT-Ti/8", **SMALL)).eval()
    model.labels = tuple(f"class {n}" for n in range(model.config.classes))
    for n in range(10):
        path = folder / "photos" / f"class {n % 2}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    vitkit.save(model, folder / "plain.safetensors")
    confidences = [answer[0][1] for answer in vitkit.predict(model, photos(folder))]
    model.reject_below = float(np.median(confidences))
    vitkit.save(model, folder / "m.safetensors")
    return folder


def photos(folder) -> list[str]:
    return [str(path) for path in sorted(folder.glob("photos/*/*.png"))]


@pytest.fixture
def expected(made) -> list[bool]:
    """Whether each photo is rejected at the model's threshold."""
    model = vitkit.load(made / "m.safetensors")
    rejected = [a[0][1] < model.reject_below for a in vitkit.predict(model, photos(made))]
    assert sum(rejected) == 5
    return rejected


def test_the_threshold_accepts_95_percent_of_the_correct_images():
    confidence = torch.arange(1, 41) / 40
    correct = torch.ones(40, dtype=torch.bool)
    assert acceptance_threshold(confidence, correct) == pytest.approx(2 / 40)  # 39 of 40 reach it
    correct[:20] = False  # wrong ones do not count
    threshold = acceptance_threshold(confidence, correct)
    assert threshold == pytest.approx(21 / 40) and (confidence[correct] >= threshold).float().mean() >= 0.95
    assert acceptance_threshold(confidence, torch.zeros(40, dtype=torch.bool)) == 0


def drawn(temperature: float, images: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits (N, 10), and labels drawn from their probabilities at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, 10, generator=generator)
    return logits, torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("true", [0.25, 0.5, 2.0, 4.0])
def test_the_temperature_of_the_data_is_found(true):
    logits, labels = drawn(true, 400, seed=0)
    found = calibration(at_temperatures(logits, labels), logits.argmax(1) == labels).temperature
    assert true / 1.2 <= found <= true * 1.2


def test_a_temperature_from_a_few_images_does_not_harm_probabilities_that_fit():
    table = at_temperatures(*drawn(1.0, 10_000, seed=1))
    loss_at = dict(zip(TEMPERATURES, table[:, : len(TEMPERATURES)].mean(0).tolist(), strict=True))
    rises, lowest_alone = [], []
    for seed in range(100):
        logits, labels = drawn(1.0, 20, seed)
        rows = at_temperatures(logits, labels)
        chosen = calibration(rows, logits.argmax(1) == labels).temperature
        losses, of_any_label, _ = rows.chunk(3, dim=1)
        lowest = TEMPERATURES[int((losses.sum(0) + of_any_label.mean(0)).argmin())]
        rises.append(loss_at[chosen] - loss_at[1.0])
        lowest_alone.append(loss_at[lowest] - loss_at[1.0])
    assert np.mean(rises) < 0.3 * np.mean(lowest_alone)


def test_predict_in_python(made, expected):
    answers = vitkit.predict(made / "m.safetensors", photos(made), reject=True)
    plain = vitkit.predict(made / "m.safetensors", photos(made))
    for answer, full, rejected in zip(answers, plain, expected, strict=True):
        assert answer == ([("unknown", full[0][1])] if rejected else full)
    assert vitkit.predict(made / "plain.safetensors", photos(made)[0], reject=1.0)[0][0] == "unknown"
    assert vitkit.predict(made / "plain.safetensors", photos(made)[0], reject=0.0)[0][0] == plain[0][0][0]
    with refused("model.unsupported", "--reject 0.6"):
        vitkit.predict(made / "plain.safetensors", photos(made)[0], reject=True)
    with refused("request.value"):
        vitkit.predict(made / "m.safetensors", photos(made)[0], reject=60)
    several = vitkit.load(made / "m.safetensors")
    several.task = "multilabel"
    with refused("model.unsupported"):
        vitkit.predict(several, photos(made)[0], reject=0.5)


def test_predict_as_a_command(made, expected, tmp_path, capsys):
    model, plain = str(made / "m.safetensors"), str(made / "plain.safetensors")
    assert command("predict", model, "--reject", *photos(made), "--json", "--top", "2") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rejected"] for row in rows] == expected
    for row in rows:
        assert row["label"] == ("unknown" if row["rejected"] else row["top"][0]["label"])
        assert row["probability"] == row["top"][0]["probability"] and row["top"][0]["label"] != "unknown"
    assert command("predict", model, *photos(made), "--csv", "--reject") == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [line["label"] == "unknown" for line in lines] == expected
    assert command("predict", plain, photos(made)[0], "--reject", "1") == 0
    assert ": unknown (class " in capsys.readouterr().out
    assert command("predict", model, *photos(made), "--reject", "--sort-into", str(tmp_path / "sorted")) == 0
    assert len(list((tmp_path / "sorted" / "unknown").iterdir())) == 5
    capsys.readouterr()
    for words, code in (
        ((plain, photos(made)[0], "--reject", "--json"), "model.unsupported"),
        ((model, photos(made)[0], "--reject", "0.5", "--unsure-below", "0.5", "--json"), "request.conflict"),
        ((model, photos(made)[0], "--reject", "1.5", "--json"), "request.value"),
    ):
        assert command("predict", *words) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == code


def test_the_value_of_the_flag_may_be_left_out():
    words = ["predict", "m", "--reject", "a.png", "--reject", "0.6", "--reject=0.7", "--reject"]
    assert list(with_values(words)) == [
        "predict", "m", "--reject=model", "a.png", "--reject", "0.6", "--reject=0.7", "--reject=model",
    ]  # fmt: skip


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_has_a_column_for_it(made, expected, tmp_path, monkeypatch, capsys, ending):
    if ending == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    words = ("predict", str(made / "m.safetensors"), *photos(made), "--out", f"t.{ending}", "--workers", "0")
    assert command(*words, "--reject") == 0
    if ending == "csv":
        rows = list(csv.DictReader(Path("t.csv").read_text().splitlines()))
        assert [row["rejected"] == "True" for row in rows] == expected
    else:
        rows = parquet.read_table("t.parquet").to_pylist()
        assert [row["rejected"] for row in rows] == expected
    assert [row["label"] == "unknown" for row in rows] == expected
    assert command(*words, "--restart") == 0
    columns = Path("t.csv").read_text() if ending == "csv" else str(parquet.read_schema("t.parquet"))
    assert "rejected" not in columns


def test_evaluate_has_coverage_and_accuracy(made, expected, capsys):
    model = vitkit.load(made / "m.safetensors")
    metrics = vitkit.evaluate(model, str(made / "photos"), split="all", reject=True, workers=0)
    answers = vitkit.predict(model, photos(made))
    correct = np.array([a[0][0] == p.split("/")[-2] for a, p in zip(answers, photos(made), strict=True)])
    accepted = ~np.array(expected)
    row = metrics["rejection"]
    assert row["threshold"] == model.reject_below and row["coverage"] == 0.5 and row["accepted"] == 5
    assert row["accuracy"] == pytest.approx(correct[accepted].mean()) and len(row["interval"]) == 2
    assert (row["mistakes"], row["rejected_mistakes"]) == ((~correct).sum(), (~correct & ~accepted).sum())
    none = vitkit.evaluate(model, str(made / "photos"), split="all", reject=1.0, workers=0)["rejection"]
    assert none["accepted"] == 0 and none["accuracy"] is None
    words = ("evaluate", str(made / "m.safetensors"), str(made / "photos"), "--split", "all")
    assert command(*words, "--workers", "0", "--reject", "0.999") == 0
    assert "accepted at 0.999: 0 %" in capsys.readouterr().out
    assert command("evaluate", str(made / "plain.safetensors"), *words[2:], "--reject") == 2


@pytest.mark.slow
def test_an_exported_file_keeps_the_threshold(made, expected, tmp_path):
    pytest.importorskip("onnxruntime")
    vitkit.export(made / "m.safetensors", tmp_path / "m.onnx")
    answers = vitkit.predict(tmp_path / "m.onnx", photos(made), reject=True)
    assert [answer[0][0] == "unknown" for answer in answers].count(True) in (4, 5, 6)  # up to rounding
