"""Runs leave a report and what it shows; the verb draws it again, of anything that a training leaves."""

import base64
import csv
import io
import json
import os
import re
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from page_reader import Page
from PIL import Image
from sigterm import sigterm_at
from test_cli import run
from test_experiment import go, tiny
from test_masked_runs import masked
from test_report_page import words
from together import together

import vitkit
from vitkit.data.loader import BadFiles
from vitkit.data.order import Order
from vitkit.data.views import normalise
from vitkit.datasets.opening import open_data
from vitkit.inference.predict import evaluation_view, predict
from vitkit.models.resnet import ResNetConfig
from vitkit.runs import artifacts
from vitkit.runs.batches import training_batches
from vitkit.runs.build import build_model, open_splits
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runs.page import spent
from vitkit.runs.run import run as run_recipe
from vitkit.runtime import runtime
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import Classify

KEPT = ("result", "mistakes", "doctor", "environment", "unusable")


def kept(out: Path, name: str):
    return json.loads((out / f"{name}.json").read_text())


def page(out: Path) -> str:
    return words((out / "report.html").read_text("utf-8"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    go(out, tiny())
    return out


def test_a_run_ends_with_a_report_and_all_that_it_shows(done):
    assert all((done / f"{name}.json").exists() for name in KEPT)
    result, text = kept(done, "result"), page(done)
    shown = Page((done / "report.html").read_text("utf-8"))
    assert shown.headline[0] == f"{100 * result['test']['top1']:.1f} % accuracy"
    assert "179 test images" in shown.headline[1]
    assert "1,458 training images, 10 classes" in text and vitkit.__version__ in text
    assert kept(done, "doctor")["splits"]["test"]["images"] == 179
    assert kept(done, "environment")["steps"] == 12


def test_the_mistakes_are_the_models_own(done):
    """Each image that is shown is taken by the saved model for what the report says, as surely as it says."""
    model, mistakes = vitkit.load(done / "model.safetensors"), kept(done, "mistakes")
    test = open_splits(tiny())["test"]
    places = {key: i for i, key in enumerate(test.keys)}
    result = kept(done, "result")["test"]
    assert mistakes["wrong"] == round((1 - result["top1"]) * 179) and mistakes["images"] == 179
    least = mistakes["least_correct"]
    assert len(mistakes["worst"]) == 24 and len(least) == min(12, 179 - mistakes["wrong"]) > 0
    for one in (*mistakes["worst"][:3], *least[:3]):
        image = test.fetch(places[one["key"]])
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(image)).save(file, "PNG")
        (label, chance), *_ = predict(model, file.getvalue(), top=1)
        assert label == one["said"] and chance == pytest.approx(one["confidence"], abs=1e-4)
        assert test.classes[test.labels[places[one["key"]]]] == one["truth"]
        for picture in ("image", "overlay"):
            assert Image.open(io.BytesIO(base64.b64decode(one[picture]))).size == (192, 192)
    sure = [one["confidence"] for one in mistakes["worst"]]
    assert sure == sorted(sure, reverse=True) and all(
        one["said"] != one["truth"] for one in mistakes["worst"]
    )
    unsure = [one["confidence"] for one in least]
    assert unsure == sorted(unsure) and all(one["said"] == one["truth"] for one in least)
    assert sum(images for _, _, images in mistakes["calibration"]) == 179
    confusion = np.array(result["confusion"])
    truth, said, times, images = mistakes["pairs"][0]
    assert times == confusion[int(truth), int(said)] == (confusion - np.diag(confusion.diagonal())).max()
    assert images == confusion[int(truth)].sum()


def test_the_table_of_mistakes_has_a_row_for_each(done):
    result, mistakes = kept(done, "result")["test"], kept(done, "mistakes")
    with (done / "mistakes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    confusion = np.array(result["confusion"])
    counted = np.zeros_like(confusion)
    for row in rows:
        counted[int(row["truth"]), int(row["said"])] += 1
    assert len(rows) == mistakes["wrong"] > 0
    assert (counted == confusion - np.diag(confusion.diagonal())).all()
    assert [row["file"] for row in rows[:24]] == [one["key"] for one in mistakes["worst"]]
    assert float(rows[0]["confidence"]) == pytest.approx(mistakes["worst"][0]["confidence"], abs=1e-6)
    assert '<a href="mistakes.csv">' in (done / "report.html").read_text("utf-8")


def test_no_name_in_the_table_of_mistakes_is_a_formula(tmp_path):
    from vitkit.metrics.classification import Accuracy

    names = ('=HYPERLINK("http://x")', "+1", "-x", "@x", 'a "quoted", name\nof two lines', "caf\u00e9")
    source = SimpleNamespace(keys=[f"{name}/\udcff.jpg" for name in names], classes=names)
    truth, said = torch.arange(6), torch.arange(6).roll(1)
    right, sure = torch.zeros(6, dtype=torch.bool), torch.linspace(0.9, 0.4, 6)
    accuracy = Accuracy(6, 0.0, None, 1.0, 6, 6, torch.arange(6), truth, said, right, sure)
    artifacts.write_mistakes(tmp_path / "mistakes.csv", source, accuracy)
    with (tmp_path / "mistakes.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = [*(f"'{name}" for name in names[:4]), 'a "quoted", name\\nof two lines', names[5]]
    assert [row["truth"] for row in rows] == shown
    assert [row["file"] for row in rows] == [f"{name}/\\xff.jpg" for name in shown]


def test_samples_are_one_image_of_each_class_with_the_models_prediction(done):
    samples, test = kept(done, "samples"), open_splits(tiny())["test"]
    places = {key: i for i, key in enumerate(test.keys)}
    assert samples["classes"] == 10
    assert [one["truth"] for one in samples["images"]] == [[label] for label in test.classes]
    model = vitkit.load(done / "model.safetensors")
    for one in samples["images"][:3]:
        image = np.ascontiguousarray(test.fetch(places[one["key"]]))
        (label, chance), *_ = predict(model, image, top=1)
        assert one["predicted"] == [[label, pytest.approx(chance, abs=1e-4)]]
        assert Image.open(io.BytesIO(base64.b64decode(one["image"]))).size == (192, 192)


def test_a_run_without_mistakes_still_shows_images(tmp_path, small):
    """The least sure of the right ones, and one of each class."""
    from vitkit.metrics.classification import Accuracy
    from vitkit.runs.samples import sample_images

    source, model = open_data("digits")["all"].take(np.arange(20)), small(classes=10)
    model.labels = source.classes
    truth, sure = torch.from_numpy(source.labels), torch.linspace(0.9, 0.5, 20)
    right = torch.ones(20, dtype=torch.bool)
    accuracy = Accuracy(20, 1.0, None, 0.1, 10, 10, torch.arange(20), truth, truth, right, sure)
    mistakes = artifacts.mistakes(source, accuracy, model, "cpu", print)
    assert mistakes["wrong"] == 0 and not mistakes["worst"] and len(mistakes["least_correct"]) == 12
    assert mistakes["least_correct"][0]["key"] == source.keys[19]
    samples = sample_images(source, Classify(), accuracy, model, "cpu")
    assert [one["truth"] for one in samples["images"]] == [[label] for label in source.classes]
    first = {label: key for key, label in zip(reversed(source.keys), reversed(source.labels), strict=True)}
    assert [one["key"] for one in samples["images"]] == [first[n] for n in range(10)]  # the surest of a class


def test_the_training_batch_is_the_runs_own(done):
    kept_batch = kept(done, "training-batch")
    r, source = tiny(), open_splits(tiny())["train"]
    order = Order(len(source), r.batch, r.seed)
    labels = [source.classes[source.labels[order.sample(0, place)]] for place in range(12)]
    assert [one["labels"][0][0] for one in kept_batch["images"]] == labels  # its own is the larger share
    assert Image.open(done / "training-batch.jpg").width > 4 * 192
    assert f"The first 12 of {r.batch} images of step 1" in page(done)


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_the_images_shown_are_those_that_training_gets(mixup):
    """Also mixed ones, and no random number that training draws is drawn for them."""
    r = replace(tiny(), mixup=mixup)
    source = open_splits(r)["train"]
    order, preprocessing = Order(len(source), r.batch, r.seed), build_model(r, source).preprocessing
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    images, labels = artifacts.first_images(r, source, order)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()
    stream = training_batches(
        r, source, order, preprocessing, Runtime(), start=0, stop=1, workers=0, bad=BadFiles(),
        waited=lambda seconds: None,
    )  # fmt: skip
    batch = next(stream)[0]
    if mixup:
        ready = normalise(images, preprocessing.mean, preprocessing.std)
        assert (ready - batch["image"][:12]).abs().max() < 0.02  # half a grey value of 255, or less
        assert torch.allclose(labels, batch["label"][:12]) and ((labels > 0).sum(1) == 2).any()
    else:
        assert torch.equal(images, batch["image"][:12])
        assert torch.equal(labels.argmax(1), batch["label"][:12])


def test_a_price_can_be_stated_afterwards(done, tmp_path, capsys):
    hours = kept(done, "result")["cost"]["device_hours"]
    assert "assumed $0.20 per hour" in page(done) and "100 watts" in page(done)
    out = tmp_path / "page.html"
    assert run("report", done, "--out", out, "--price-per-hour", 0.36 / hours) == 0
    document = out.read_text("utf-8")
    assert "price 0.36 (" in words(document) and "$" not in words(document).partition("price 0.36")[2][:90]
    target = re.search(r'href="([^"]*mistakes\.csv)"', document)[1]
    assert (tmp_path / target).resolve() == (done / "mistakes.csv").resolve()
    assert run("report", done, "--out", out, "--price-per-hour", "-1") == 2
    assert "--price-per-hour" in capsys.readouterr().err


@pytest.mark.parametrize(
    "device, price, watts",
    [("NVIDIA H200", 3.5, 600), ("Tesla T4", 0.5, 70), ("NVIDIA L4", 0.7, 70), ("NVIDIA L40S", 1.2, 300),
     ("NVIDIA GeForce RTX 3090", 1.0, 250), ("AMD EPYC 7763", 0.2, 100), ("aarch64", 0.2, 100)],
)  # fmt: skip
def test_prices_and_watts_are_assumed_by_the_device(device, price, watts):
    cost = spent({"device": device, "device_hours": 2.0})
    assert cost["price"] == 2 * price and cost["kWh"] == 2 * watts / 1000 and not cost["given"]
    given = spent({"device": device, "device_hours": 2.0, "price": 10.0, "energy_kWh": 0.3})
    assert (given["per_hour"], given["price"], given["given"]) == (5.0, 10.0, True)
    assert given["kWh"] == 0.3 and given["watts"] is None
    assert spent({}) == {}


def test_evidence_is_quick(done, tmp_path):
    """What a run does for its report besides training takes little time."""
    from vitkit.metrics.classification import Accuracy
    from vitkit.runs.evaluation import evaluate

    splits, model = open_splits(tiny()), vitkit.load(done / "model.safetensors")
    accuracy = evaluate(Classify(), model, splits["test"], 64, 0)
    assert isinstance(accuracy, Accuracy)
    shutil.copy(done / "recipe.json", tmp_path)
    begun = time.process_time()
    artifacts.begin(tmp_path, splits, 12, Runtime(), print, task=Classify(), doctor=True)
    artifacts.finish(tmp_path, Runtime(), splits["test"], Classify(), accuracy, model, {}, print)
    assert (tmp_path / "report.html").exists()
    assert time.process_time() - begun < 2


def test_a_resnets_mistakes_have_no_attention(tmp_path, small_resnet):
    from vitkit.runs.evaluation import evaluate

    source = open_data("digits")["all"].take(np.arange(20))
    model = small_resnet(classes=10, image_size=(32, 32))
    assert isinstance(model.config, ResNetConfig) and evaluation_view(model.preprocessing, (32, 32))
    mistakes = artifacts.mistakes(source, evaluate(Classify(), model, source, 8, 0), model, "cpu", print)
    assert mistakes["worst"] and all(one["image"] and one["overlay"] is None for one in mistakes["worst"])


def test_no_run_is_lost_for_its_report(tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise OSError("the disk is full\nand so on")

    for part in ("machine", "look", "listed", "mistakes", "write_predictions", "write_run_page"):
        monkeypatch.setattr(artifacts, part, fail)
    result = run_recipe(tiny(), tmp_path, runtime.Runtime(), RunOptions(workers=0))
    assert kept(tmp_path, "result")["steps"] == result.steps == 12
    unwritten = re.findall(r"^([\w.]+) could not be written: the disk is full$", capfd.readouterr().err, re.M)
    assert unwritten == ["environment.json", "doctor.json", "unusable.json", "mistakes.json",
                    "predictions.json.gz", "report.html"]  # fmt: skip


def run_of_one(runtime, out: str):
    return run_recipe(
        replace(tiny(), randaugment=()), Path(out), runtime, RunOptions(workers=0, quiet=True)
    ).to_json()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_processes_leave_one_report(tmp_path, parallel):
    one, two = together(2, run_of_one, str(tmp_path), parallel=parallel)
    assert one["test"]["top1"] == two["test"]["top1"]
    assert kept(tmp_path, "mistakes")["images"] == 179 and "179 test images" in page(tmp_path)


def test_files_that_cannot_be_used_are_named(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(60):
        folder = tmp_path / "data" / ("dark" if i % 2 else "light<b>")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 99, (8, 8, 3)) + 150 * (i % 2 == 0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    broken = tmp_path / "data" / "dark" / os.fsdecode(b"broken \xff.png")
    broken.write_bytes(b"\x89PNG")
    (tmp_path / "data" / "dark" / "few.txt").write_text("x")
    recipe = replace(tiny(), data=str(tmp_path / "data"))
    go(tmp_path / "run", recipe, max_bad=0.5)
    unusable = kept(tmp_path / "run", "unusable")
    assert sum(split["count"] for split in unusable.values()) == 1
    assert "broken \\xff.png" in page(tmp_path / "run") and "light<b>" in page(tmp_path / "run")
    assert "Files without an image suffix: 1" in page(tmp_path / "run")


def test_very_large_data_is_not_gone_through(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "LOOKED", 1000)
    go(tmp_path, tiny())
    assert "1,797 images: names and counts were not checked" in page(tmp_path)


def test_masked_runs_are_reported_too(tmp_path, capsys):
    go(tmp_path, masked())
    result = kept(tmp_path, "result")["test"]
    shown = Page((tmp_path / "report.html").read_text("utf-8")).headline[1]
    assert f"{result['patches']:,} corrupted patches" in shown and "179 test images" in shown
    assert not (tmp_path / "mistakes.json").exists() and "vitkit finetune DATA --weights" in page(tmp_path)


def test_runs_on_several_labels_are_reported_too(tmp_path):
    rows = ["path,label"]
    for i in range(40):
        Image.fromarray(np.full((8, 8, 3), 6 * i, np.uint8)).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{'light;' if i > 20 else ';'}{'odd' if i % 2 else ''}")
    (tmp_path / "tags.csv").write_text("\n".join(rows))
    go(tmp_path / "run", replace(tiny(), data=str(tmp_path / "tags.csv"), loss="sigmoid"))
    shown = Page((tmp_path / "run" / "report.html").read_text("utf-8"))
    assert "mean average precision" in shown.headline[0]
    assert {row["class"] for row in shown.rows("Classes")} == {"light", "odd"}


def test_an_interrupted_run_can_be_reported_and_then_goes_on(tmp_path, capsys):
    with sigterm_at(5), pytest.raises(Interrupted):
        go(tmp_path, tiny())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # as a process that is writing leaves it
    assert run("report", tmp_path) == 0
    assert "Not finished" in page(tmp_path) and "step 5 of 12" in page(tmp_path)
    go(tmp_path, tiny())
    assert "Not finished" not in page(tmp_path)


def test_the_verb_draws_again_and_tells_a_program_where(done, tmp_path, capsys):
    assert run("report", done, "--out", tmp_path / "page.html", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(tmp_path / "page.html") and printed["runs"] == [str(done)]
    written = (tmp_path / "page.html").read_bytes()
    assert len(written) == printed["bytes"]
    there = re.sub(rb'href="[^"]*mistakes', b'href="mistakes', written)  # which is found from either place
    assert there == (done / "report.html").read_bytes()


def test_a_run_from_before_reports_is_drawn_from_what_it_has(done, tmp_path, capsys):
    for name in ("recipe.json", "result.json", "metrics.jsonl"):
        shutil.copy(done / name, tmp_path)
    (tmp_path / "doctor.json").write_text('{"cut o')
    assert run("report", tmp_path) == 0
    assert "Missing from this run folder" in page(tmp_path) and "179 test images" in page(tmp_path)


def test_runs_are_compared_in_one_page(done, tmp_path, capsys, monkeypatch):
    go(tmp_path / "other", replace(tiny(), seed=1))
    monkeypatch.chdir(tmp_path)
    assert run("report", done, "other") == 0
    document = (tmp_path / "compare.html").read_text("utf-8")
    assert "over 2 seeds of one recipe" in words(document) and 'href="other/report.html"' in document
    for target in re.findall(r'href="([^"#]+)"', document):
        assert (tmp_path / target).exists()


@pytest.mark.parametrize("arguments, why", [
    (["nowhere"], "not a run folder"), ([], "no run given"), (["RUN", "nowhere"], "not a run folder"),
    (["RUN", "--out", "no/such/page.html"], "does not exist"), (["RUN", "--out", "."], "a folder"),
])  # fmt: skip
def test_mistakes_are_told_in_a_line(done, arguments, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("report", *(str(done) if a == "RUN" else a for a in arguments)) == 2
    said = capsys.readouterr()
    assert why in said.err + said.out and "Traceback" not in said.err


def test_the_command_of_the_report_does_the_same_again(done, tmp_path, capsys):
    command = kept_commands(done)["Repeat it in another folder"][0]
    words_ = shlex.split(command.replace("ANOTHER", str(tmp_path / "again")))
    assert run(*words_[1:], "--workers", "0", "--device", "cpu", "--json") == 0
    assert kept(tmp_path / "again", "recipe") == kept(done, "recipe")
    assert kept(tmp_path / "again", "result")["test"]["loss"] == kept(done, "result")["test"]["loss"]


def test_the_command_names_what_the_rules_would_choose_otherwise(tmp_path, capsys):
    """A run without averaging and Mixup: its command names these values, which the rules would set."""
    folder, words_ = tmp_path / "run", ["digits", "--model", "ViT-Ti/4", "--image-size", "8", "--steps", "8"]
    off = ["optimizer.average=0", "mixup=0", "label_smoothing=0", "model.width=16", "model.depth=1"]
    quick = ["--workers", "0", "--device", "cpu", "--json"]
    started = ["finetune", *words_, "--recipe", "finetune", "--set", *off, "model.heads=2"]
    assert run(*started, "--out", folder, *quick) == 0
    command = kept_commands(folder)["Repeat it in another folder"][0]
    again = shlex.split(command.replace("ANOTHER", str(tmp_path / "again")))
    assert run(*again[1:], *quick) == 0
    assert kept(tmp_path / "again", "recipe") == kept(folder, "recipe")
    assert kept(folder, "recipe")["optimizer"]["average"] == 0


def kept_commands(out: Path) -> dict:
    from vitkit.runs.page import gather

    return gather(out)["commands"]


@pytest.mark.slow
def test_a_protocol_and_a_suite_are_reported_with_links_to_their_runs(tmp_path, capsys):
    model = vitkit.build("ViT-Ti/8", classes=3, image_size=16, depth=1, width=32, heads=2, hidden=32)
    vitkit.save(model, tmp_path / "small.npz")
    quick = ["--image-size", "16", "--batch", "16", "--workers", "0", "--device", "cpu", "--steps", "3"]
    out = tmp_path / "suite"
    command = ["suite", tmp_path / "small.npz", "--tasks", "digits", *quick, "--seeds", "2", "--out", out]
    assert run(*command, "--rates", "0.01", "0.03", "--json") == 0
    assert run("report", out) == 0
    document = (out / "report.html").read_text("utf-8")
    assert "of 1 of 1 tasks" in words(document) and 'href="digits/report.html"' in document
    protocol = (out / "digits" / "report.html").read_text("utf-8")
    assert "over 2 seeds" in words(protocol) and "seed-1" in protocol and "rate-0.03" in protocol
    for target in re.findall(r'href="([^"#]+)"', protocol):
        assert (out / "digits" / target).exists()
    (out / "digits" / "protocol.json").unlink()
    assert run("report", out / "digits") == 0 and "not finished" in page(out / "digits")
    assert run("report", out / "digits", out / "digits" / "seed-0", "--out", tmp_path / "c.html") == 0
