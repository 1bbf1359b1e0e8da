"""Several labels an image, end to end: a table trained, evaluated and predicted from; the file remembers."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from refusals import refused
from safetensors import safe_open
from test_cli import run

import vitkit
from vitkit.datasets.opening import open_data
from vitkit.recipes import recipe
from vitkit.runs.build import build_model

SMALL = [
    "--model", "ViT-Ti/4", "--image-size", "16", "--batch", "32", "--workers", "0", "--lr", "0.003",
    "--set", "model_options=width=32,depth=2,heads=2,hidden=64", "evaluations=2", "schedule.warmup=5",
    "crop=squash",
]  # fmt: skip


def picture(rng, red: bool, striped: bool) -> np.ndarray:
    """Noise, with a cast of red or blue, and with stripes or without: two things that know no other."""
    pixels = rng.integers(60, 140, (16, 16, 3))
    pixels[..., 0 if red else 2] += 60
    if striped:
        pixels[::4] += 50
        pixels[1::4] += 50
    return np.clip(pixels, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """A table of 320 pictures with none, one or two labels."""
    root, rng = tmp_path_factory.mktemp("tagged"), np.random.default_rng(5)
    lines = ["path,label,split"]
    for n in range(320):
        names = [name for name in ("red", "striped") if rng.random() < 0.5]
        Image.fromarray(picture(rng, "red" in names, "striped" in names)).save(root / f"{n}.png")
        lines.append(f"{n}.png,{';'.join(names) or ';'},{'test' if n >= 240 else 'train'}")
    (root / "tags.csv").write_text("\n".join(lines))
    return root / "tags.csv"


@pytest.fixture(scope="module")
def trained(tagged, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tags"
    assert run("finetune", tagged, "--out", out, *SMALL, "loss=sigmoid", "--steps", "60", "--json") == 0
    return out


def test_its_report_shows_images_and_a_batch_with_all_their_labels(trained, tagged):
    """Also of an image without a label, and the predictions are the saved model's."""
    samples = json.loads((trained / "samples.json").read_text())
    batch = json.loads((trained / "training-batch.json").read_text())
    source, model = open_data(tagged)["test"], vitkit.load(trained / "model.safetensors")
    named = [sorted(source.classes[n] for n in source.labels.of(i)) for i in range(len(source))]
    labels = dict(zip(source.keys, named, strict=True))
    assert samples["classes"] is None and len(samples["images"]) == 12
    for one in samples["images"]:
        assert sorted(one["truth"]) == labels[one["key"]]
        predicted = dict(vitkit.predict(model, tagged.parent / one["key"]))
        assert dict(one["predicted"]) == pytest.approx(predicted, abs=1e-4)
    counts = {len(image["labels"]) for image in batch["images"]}
    assert len(batch["images"]) == 12 and counts == {0, 1, 2}
    assert all(share == 1 for image in batch["images"] for _, share in image["labels"])


def test_a_table_with_several_labels_is_learned(trained):
    test = json.loads((trained / "result.json").read_text())["test"]
    assert test["images"] == 80 and test["mean_average_precision"] > 0.9  # chance: about 0.5
    assert test["exact_match"] > 0.6 and test["f1"] > 0.8  # chance: about 0.25 and 0.5
    assert vitkit.load(trained / "model.safetensors").multilabel


def test_it_is_evaluated_by_the_command(trained, tagged, capsys):
    assert run("evaluate", trained, tagged, "--json", "--batch", 7, "--workers", 0) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["split"] == "test" and found["images"] == 80 and found["unusable"] == 0
    assert {"top1", "top5", "per_class"} <= set(found) and "confusion" not in found
    stored = json.loads((trained / "result.json").read_text())["test"]
    assert found["mean_average_precision"] == pytest.approx(stored["mean_average_precision"])
    assert run("evaluate", trained, tagged, "--workers", 0) == 0
    output = capsys.readouterr().out
    assert "average precision" in output and f"F1 {100 * found['f1']:.0f} %" in output and "striped" in output


def test_it_predicts_each_label_for_itself(trained, tagged, tmp_path, capsys):
    rng = np.random.default_rng(9)
    for name, (red, striped) in {"both": (1, 1), "neither": (0, 0), "red": (1, 0)}.items():
        Image.fromarray(picture(rng, red, striped)).save(tmp_path / f"{name}.png")
    assert run("predict", trained, tmp_path, "--json") == 0
    both, neither, red = ({t["label"]: t["probability"] for t in one["top"]}
                          for one in json.loads(capsys.readouterr().out))  # fmt: skip
    assert min(both.values()) > 0.5 > max(neither.values()) and red["red"] > 0.5 > red["striped"]
    assert list(both.values()) == sorted(both.values(), reverse=True)
    assert run("predict", trained, tmp_path / "both.png", "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    near = {label: pytest.approx(probability, abs=1e-5) for label, probability in both.items()}
    assert {row["label"]: float(row["probability"]) for row in rows} == near
    model = vitkit.load(trained / "model.safetensors")
    assert dict(vitkit.predict(model, tmp_path / "both.png")) == near


def test_data_and_model_of_different_kinds_are_an_error_by_name(trained, tagged, tmp_path, capsys):
    one = tagged.with_name("one.csv")
    one.write_text("path,label\n0.png,red\n1.png,striped\n")
    assert run("evaluate", trained, one, "--workers", 0) == 2
    err = capsys.readouterr().err
    assert "one.csv has one label per image, but the model predicts any number" in err and "';'" in err
    model = vitkit.build("ViT-Ti/4", width=32, depth=1, heads=2, hidden=32, image_size=16, classes=2)
    model.labels = ("red", "striped")
    vitkit.save(model, tmp_path / "one.safetensors")
    assert run("evaluate", tmp_path / "one.safetensors", tagged, "--workers", 0) == 2
    assert "tags.csv has several labels per image, but the model predicts" in capsys.readouterr().err
    (tmp_path / "table.csv").write_text("class,label\nred,red\nstriped,striped\n")
    asked = ("--classes", tmp_path / "table.csv", "--workers", 0)
    assert run("evaluate", tmp_path / "one.safetensors", tagged, *asked) == 2
    assert "tags.csv has several labels per image" in capsys.readouterr().err
    assert run("finetune", tagged, "--out", tmp_path / "run", *SMALL, "--steps", "6") == 2
    assert "loss=sigmoid" in capsys.readouterr().err


def test_sigmoid_loss_with_one_label_an_image_stays_single_label(tmp_path, capsys):
    """The paper's pre-training: targets are one-hot, and what counts is the highest of them."""
    sizes = [*SMALL, "loss=sigmoid", "--steps", "6", "--image-size", "8"]
    assert run("finetune", "digits", "--out", tmp_path / "r", *sizes, "--json") == 0
    test = json.loads(capsys.readouterr().out)["test"]
    assert "confusion" in test and "mean_average_precision" not in test
    assert not vitkit.load(tmp_path / "r" / "model.safetensors").multilabel


@pytest.mark.parametrize(
    ("format", "name"), [("vitkit", "m.safetensors"), ("official", "m.npz"), ("hf", "folder")]
)
def test_a_file_says_what_its_outputs_mean(small, tmp_path, format, name):
    for several in (True, False):
        model = small()
        model.multilabel = several
        vitkit.save(model, tmp_path / name, format)
        assert vitkit.load(tmp_path / name).multilabel is several


def test_a_file_from_before_this_was_said_is_single_label(small, tmp_path):
    path = tmp_path / "m.safetensors"
    vitkit.save(small(), path)
    with safe_open(path, "pt") as file:
        card = json.loads(file.metadata()["vitkit"])
    arrays = safetensors.torch.load_file(path)
    assert card.pop("multilabel") is False
    safetensors.torch.save_file(arrays, path, {"vitkit": json.dumps(card)})
    assert vitkit.load(path).multilabel is False
    safetensors.torch.save_file(arrays, path, {"vitkit": json.dumps(card | {"multilabel": "yes"})})
    with refused("weights.format", path, "multilabel", "bool"):
        vitkit.load(path)


def test_adapt_keeps_it_with_the_head_and_drops_it_with_the_head(small, small_resnet):
    for model in (small(), small_resnet()):
        model.multilabel = True
        assert vitkit.adapt(model, image_size=64).multilabel
        assert not vitkit.adapt(model, classes=3).multilabel
        assert vitkit.adapt(model, classes=3, multilabel=True).multilabel
        model.multilabel = False
        assert not vitkit.adapt(model, image_size=64).multilabel


def test_probabilities_sum_to_one_only_where_one_label_is_told(small, tmp_path):
    model = small()
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "x.png")
    messages = dict(vitkit.predict(model, tmp_path / "x.png"))
    assert sum(messages.values()) == pytest.approx(1, abs=1e-6)
    model.multilabel = True
    several = vitkit.predict(model, tmp_path / "x.png")
    pixels = torch.full((1, 3, 32, 32), -1.0)
    chances = model(pixels)[0].sigmoid().sort(descending=True)
    assert [p for _, p in several] == pytest.approx(chances.values.tolist())
    assert [label for label, _ in several] == [str(i) for i in chances.indices.tolist()]


def test_a_single_label_start_becomes_what_the_data_asks_for(small, tagged, tmp_path):
    from vitkit.datasets.opening import open_data

    vitkit.save(small(), tmp_path / "m.safetensors")
    r = replace(recipe("finetune"), weights=str(tmp_path / "m.safetensors"), image_size=(32, 32))
    source = open_data(tagged)["train"]
    assert build_model(replace(r, loss="sigmoid"), source).multilabel
