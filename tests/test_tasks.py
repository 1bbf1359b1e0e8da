"""From images to a predictor on the command line: finetune, evaluate, predict and their JSON."""

import csv
import io
import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from test_cli import run

import vitkit
from vitkit.data.sources.source import digits
from vitkit.metrics.cost import forward_flops
from vitkit.report.terminal import csv_cell
from vitkit.weights.card import imagenet_labels, imagenet_synsets

TINY = [
    "--model", "ViT-Ti/4", "--image-size", "8", "--steps", "6", "--batch", "16", "--workers", "0",
    "--set", "model_options=width=32,depth=1,heads=2,hidden=32", "evaluations=0", "schedule.warmup=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert run("finetune", "digits", "--out", out, *TINY, "--json") == 0
    return out


@pytest.fixture
def pictures(tmp_path):
    """Twenty digits as files, in folders by class."""
    source = digits()
    for i in range(20):
        folder = tmp_path / "pictures" / source.classes[source.labels[i]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(source.fetch(i))).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def test_finetune_tells_what_it_came_to(tmp_path, capsys):
    assert run("finetune", "digits", "--out", tmp_path / "r", *TINY, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert {"run", "model", "steps", "test"} <= set(output)
    assert output["steps"] == 6 and output["test"]["images"] == 179 and len(output["test"]["per_class"]) == 10
    low, high = output["test"]["interval"]
    assert low <= output["test"]["top1"] <= high and 0 <= output["test"]["calibration_error"] <= 1
    assert run("finetune", "digits", "--out", tmp_path / "r", *TINY) == 0  # again: nothing left but to tell
    out = capsys.readouterr().out
    assert f"(95 % interval: {100 * low:.1f} to {100 * high:.1f} %) of 179 test images correct" in out
    assert f"vitkit predict {tmp_path / 'r'}" in out


def test_what_a_run_cost_stands_in_its_result_and_its_metrics(tmp_path, capsys):
    assert run("finetune", "digits", "--out", tmp_path / "r", *TINY, "--price-per-hour", 2.5, "--json") == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    config = vitkit.load(tmp_path / "r" / "model.safetensors").config
    assert cost["images_seen"] == 96 and cost["training_FLOPs"] == 3 * 96 * cost["forward_FLOPs"]
    assert (
        cost["forward_FLOPs"] == forward_flops(config) and cost["exaFLOPs"] == cost["training_FLOPs"] / 1e18
    )
    assert cost["price"] == pytest.approx(2.5 * cost["device_hours"]) and cost["device_hours"] > 0
    assert cost["tpu_v3_core_days"] > 0 and cost["MFU"] is None
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["cost_price"] == cost["price"] and rows[-1]["cost_exaFLOPs"] == cost["exaFLOPs"]


def test_a_signal_ends_a_run_with_its_code_and_how_to_go_on(tmp_path, capsys, monkeypatch):
    from vitkit.runs import run as experiment

    real = experiment.Trainer.watch

    def watch(self, state, metrics):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self, state, metrics)

    monkeypatch.setattr(experiment.Trainer, "watch", watch)
    assert run("finetune", "digits", "--out", tmp_path / "r", *TINY) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM at step 1; the same command resumes" in capsys.readouterr().err


def test_a_plan_says_what_would_happen_and_does_nothing(tmp_path, capsys):
    assert run("finetune", "digits", "--out", tmp_path / "r", *TINY, "--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 6 and plan["train_images"] == 1458 and plan["training_FLOPs"] > 0
    assert not (tmp_path / "r").exists()


def test_evaluate_covers_every_image(trained, pictures, capsys):
    assert run("evaluate", trained, pictures, "--json", "--batch", 7) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["images"] == 20 and 0 <= result["top1"] <= result["top5"] <= 1
    assert np.sum(result["confusion"]) == 20 and result["per_class"]["3"]["images"] == 2
    assert run("evaluate", trained, "digits", "--split", "all") == 0
    assert "of 1797 images correct" in capsys.readouterr().out


def test_evaluate_and_predict_agree(trained, pictures, capsys):
    run("evaluate", trained, pictures, "--json")
    result = json.loads(capsys.readouterr().out)
    run("predict", trained, pictures, "--json")
    said = json.loads(capsys.readouterr().out)
    right = [one["label"] == one["image"].split("/")[-2] for one in said]
    assert np.mean(right) == pytest.approx(result["top1"])


def test_other_classes_are_an_error_by_name(trained, pictures, capsys):
    (pictures / "eleven").mkdir()
    (pictures / "3").rename(pictures / "eleven" / "deep")
    assert run("evaluate", trained, pictures) == 2
    assert "'eleven/deep'" in capsys.readouterr().err


def said_of(trained, place, capsys) -> dict[str, str]:
    """The label told of each file, by its name."""
    run("predict", trained, place, "--json")
    return {one["image"].rpartition("/")[2]: one["label"] for one in json.loads(capsys.readouterr().out)}


def test_reassessed_labels_go_by_file_name_and_images_without_one_do_not_count(trained, pictures, capsys):
    said = sorted(said_of(trained, pictures, capsys).items())
    labels = [[int(label), 9] for _, label in said]
    labels[3], labels[7], labels[11] = [], [], [(int(said[11][1]) + 1) % 10]
    path = pictures.parent / "real.json"
    path.write_text(json.dumps(labels))
    assert run("evaluate", trained, pictures, "--real", path, "--json") == 0
    result = json.loads(capsys.readouterr().out)["real"]
    assert result["accuracy"] == pytest.approx(17 / 18) and (result["images"], result["left_out"]) == (18, 2)
    assert run("evaluate", trained, pictures, "--real", path) == 0
    assert "94 % (95 % interval: 74 to 99 %) of 18 images correct; 2 have no label" in capsys.readouterr().out
    path.write_text(json.dumps(labels[1:]))
    assert run("evaluate", trained, pictures, "--real", path) == 2
    assert "has labels for 19 images, but the data has 20" in capsys.readouterr().err


def test_a_table_of_classes_says_what_is_right_and_leaves_the_rest_out(trained, pictures, capsys):
    said = said_of(trained, pictures / "3", capsys) | said_of(trained, pictures / "4", capsys)
    (pictures / "3").rename(pictures / "curly")
    (pictures / "4").rename(pictures / "straight")
    every = ";".join("0123456789")
    table = pictures.parent / "map.csv"
    table.write_text(f"class,label\ncurly,{every}\nstraight,4;{said['4.png']}\n")
    assert run("evaluate", trained, pictures, "--classes", table, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["images"] == 4
        and result["left_out"] == 16
        and list(result["per_class"]) == ["curly", "straight"]
    )
    curly = result["per_class"]["curly"]
    assert (curly["images"], curly["accuracy"]) == (2, 1.0) and curly["interval"][0] < 0.4
    right = [said[name] in ("4", said["4.png"]) for name in ("4.png", "14.png")]
    assert result["per_class"]["straight"]["accuracy"] == np.mean(right)
    assert run("evaluate", trained, pictures, "--classes", table) == 0
    assert "left out: 16 images of classes" in capsys.readouterr().out
    table.write_text("class,label\ncurly,eleven\n")
    assert run("evaluate", trained, pictures, "--classes", table) == 2
    output = capsys.readouterr().err
    assert "'curly'" in output and "'eleven'" in output
    assert run("evaluate", trained, pictures, "--classes", "nowhere.csv") == 2
    assert "nowhere.csv" in capsys.readouterr().err


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """A model of ImageNet's classes, and a thousand pictures."""
    folder = tmp_path_factory.mktemp("thousand")
    model = vitkit.build(
        "ViT-Ti/4", classes=1000, image_size=8, width=32, depth=1, heads=2, hidden=32, seed=0
    )
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    model.labels = imagenet_labels()
    vitkit.save(model, folder / "model.safetensors")
    for i in range(1000):
        Image.fromarray(np.ascontiguousarray(digits().fetch(i))).save(folder / f"{i:03d}.png")
    return folder


def manifest(folder, labels) -> str:
    with (folder / "data.csv").open("w", newline="") as file:
        rows = ((f"{i:03d}.png", label) for i, label in enumerate(labels))
        csv.writer(file).writerows([("path", "label"), *rows])
    return str(folder / "data.csv")


@pytest.mark.slow
def test_imagenets_classes_are_known_by_name_wordnet_number_and_class_number(thousand, capsys):
    named = {
        "names": imagenet_labels(),
        "WordNet numbers": [number for number, _ in imagenet_synsets()],
        "class numbers": [str(i) for i in range(1000)],  # which stand as 0, 1, 10, 100, ...
    }
    losses = []
    for labels in named.values():
        assert run("evaluate", thousand, manifest(thousand, labels), "--workers", 0, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["images"] == 1000 and list(result["per_class"])[:2] == list(imagenet_labels()[:2])
        losses.append(result["loss"])
    assert losses == [losses[0]] * 3
    assert run("evaluate", thousand, manifest(thousand, ["0", "1", "2"])) == 2  # may be anything
    assert "classes '0', '1', '2' are unknown to the model" in capsys.readouterr().err


def test_objectnets_classes_are_known(thousand, capsys):
    said = said_of(thousand, thousand / "002.png", capsys)["002.png"]
    data = manifest(thousand, ["chair", "squeegee", "pen", "squeegee"])
    assert run("evaluate", thousand, data, "--classes", "objectnet", "--workers", 0, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["images"] == 2 and result["left_out"] == 2 and list(result["per_class"]) == ["chair", "pen"]
    assert result["per_class"]["pen"]["accuracy"] == float(
        said.startswith(("ballpoint", "quill", "fountain pen"))
    )
    assert np.sum(result["confusion"]) == 2 and len(result["confusion"]) == 2


def test_predict_takes_files_folders_and_globs_and_tells_it_three_ways(trained, pictures, capsys):
    files = [str(pictures / "0" / "0.png"), str(pictures / "1"), str(pictures / "2" / "*.png")]
    assert run("predict", trained, *files, "--json", "--top", 3) == 0
    said = json.loads(capsys.readouterr().out)
    inside = [str(p) for name in ("1", "2") for p in sorted((pictures / name).iterdir())]
    assert [one["image"] for one in said] == [files[0], *inside]
    assert all(len(one["top"]) == 3 and one["probability"] == one["top"][0]["probability"] for one in said)
    assert run("predict", trained, *files, "--csv") == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["label"] for row in table] == [one["label"] for one in said]
    assert run("predict", trained, files[0]) == 0
    assert said[0]["label"] in capsys.readouterr().out


def test_predict_names_what_it_cannot_read_and_does_the_others(trained, pictures, capsys):
    (pictures / "0" / "broken.png").write_bytes(b"nothing")
    assert run("predict", trained, pictures / "0", "nowhere.png", "--json") == 1
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert sum("error" in one for one in said) == 2 and sum("label" in one for one in said) == 2
    assert "broken.png" in captured.err and "nowhere.png" in captured.err


def test_the_library_predicts_like_the_command(trained, pictures, capsys):
    run("predict", trained, pictures / "0" / "0.png", "--json")
    said = json.loads(capsys.readouterr().out)[0]
    model = vitkit.load(trained / "model.safetensors")
    top = vitkit.predict(model, pictures / "0" / "0.png", top=2)
    assert top[0] == (said["label"], pytest.approx(said["probability"])) and len(top) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune", "nowhere", "--model", "ViT-Ti/16"], "no data at 'nowhere'"),
        (
            ["finetune", "digits", "--model", "ViT-Ti/16", "--steps", "3", "--epochs", "1"],
            "--steps and --epochs",
        ),
        (["finetune", "digits", "--model", "ViT-Ti/16", "--set", "speed=3"], "no field 'speed'"),
        (["finetune", "digits", "--recipe", "magic"], "no recipe 'magic'"),
        (["finetune", "digits", "--model", "ViT-Ti/16", "--device", "abacus"], "device 'abacus'"),
        (["predict", "nothing.safetensors", "x.png"], "no file, folder or published weights"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_recipes_are_listed_and_shown(capsys):
    assert run("list", "recipes") == 0
    assert "20000 steps" in capsys.readouterr().out
    assert run("show", "pets", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["length.steps"] == 500 and shown["optimizer.momentum"] == 0.9


def test_a_model_without_a_head_tells_no_classes(tmp_path, pictures, capsys):
    model = vitkit.build("ViT-Ti/4", classes=0, image_size=8, width=32, depth=1, heads=2, hidden=32)
    vitkit.save(model, tmp_path / "bare.safetensors")
    for verb, what in (("predict", pictures / "0" / "0.png"), ("evaluate", "digits")):
        assert run(verb, tmp_path / "bare.safetensors", what) == 2
        assert "has no head" in capsys.readouterr().err
    with refused("model.unsupported", "vitkit finetune"):
        vitkit.predict(model, pictures / "0" / "0.png")


def test_a_table_of_predictions_holds_no_formulas(tmp_path, small, capsys):
    """A spreadsheet computes what begins with =, +, - or @; JSON has the names as they are."""
    model = small(classes=2)
    model.labels = ("=1+2", "@SUM(A1)")
    vitkit.save(model, tmp_path / "m.safetensors")
    picture = tmp_path / "-a.png"
    Image.new("RGB", (32, 32)).save(picture)
    assert run("predict", tmp_path / "m.safetensors", picture, "--csv", "--device", "cpu") == 0
    [row] = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["label"] in ("'=1+2", "'@SUM(A1)") and row["image"] == str(picture)
    assert run("predict", tmp_path / "m.safetensors", picture, "--json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)[0]["label"] in model.labels
    assert [csv_cell(text) for text in ("-a.png", "\t=1", "\r=1", "a=b", "")] == [
        "'-a.png", "'\\t=1", "'[U+000D]=1", "a=b", "",
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["--classes", "--real"])
def test_a_table_that_cannot_be_read_is_named(flag, trained, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for name in ("missing", "", "binary"):  # the second: the folder itself
        assert run("evaluate", trained, "digits", flag, tmp_path / name, "--device", "cpu") == 2
        output = capsys.readouterr().err
        assert output.count("\n") == 1 and str(tmp_path / name) in output
