"""A4: the name of a class travels with the model, whatever the names are."""

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from harness import scaled, until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from launch import Service, service, tiny
from PIL import Image
from refusals import refused

import vitkit
from vitkit.data.names import SPLITS, SUFFIXES
from vitkit.inference.predict import predict_many
from vitkit.recipes import recipe as named
from vitkit.recipes.recipe import override
from vitkit.runs.folder import RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime
from vitkit.training.schedule import Duration
from vitkit.weights.card import card_of

pytestmark = pytest.mark.faults
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 255, 255)]  # one for each class
ODD = [
    "1",
    "2",
    "10",
    "a",
    "B",
    "Ä",
    "a b",
    "-rf",
    "<b>",
    "🦉",
    "é",
    "e\u0301",
    "null",
    "0",
    "c;d",
    "%s",
    "{x}",
]
NAME = st.sampled_from(ODD) | st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8
)


def usable(names: set[str]) -> bool:
    """Whether a folder may have these names for classes."""
    plain = all(
        len(n.encode()) < 200 and not n.startswith(".") and not n.lower().endswith(SUFFIXES) for n in names
    )
    return plain and not all(name.lower() in SPLITS for name in names)


SETS = st.sets(NAME, min_size=2, max_size=5).filter(usable)


def painted(root: Path, names: list[str]) -> None:
    """Four pictures of each class in train, one in val and test: each class has its colour."""
    rng = np.random.default_rng(0)
    for colour, name in zip(COLOURS, names, strict=False):
        for split, count in (("train", 4), ("val", 1), ("test", 1)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(np.array(colour) + rng.integers(-20, 20, (8, 8, 3)), 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


def trained(root: Path, out: Path) -> Path:
    changes = [
        "image_size=8",
        "batch=20",
        "schedule.warmup=2",
        "schedule.rate=0.01",
        "evaluations=0",
        "crop=squash",
    ]
    r = override(named("scratch"), changes)
    options = ("width=16", "depth=1", "heads=1", "hidden=16")
    plain = {"mixup": 0.0, "randaugment": (), "dropout": 0.0, "label_smoothing": 0.0, "flip": False}
    r = replace(
        r, data=str(root), model="ViT-Ti/8", model_options=options, length=Duration(steps=25), **plain
    )
    run(r, out, Runtime(), RunOptions(workers=0, quiet=True, report=False))
    return out / "model.safetensors"


def mislabelled(root: Path, path: Path) -> int:
    """Test images of which the saved model does not say the folder that they lie in."""
    images = sorted(str(p) for p in (root / "test").rglob("*.png"))
    messages = list(predict_many(vitkit.load(path), images, top=1))
    assert len(messages) == len(images)
    return sum(Path(one.image).parent.name != one.top[0][0] for one in messages)


@settings(max_examples=scaled(12, 100), deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(SETS, st.randoms(use_true_random=False))
def test_A4_every_image_is_called_by_its_folder(tally, names, rng):
    with tempfile.TemporaryDirectory() as folder:
        root, order = Path(folder) / "data", sorted(names)
        rng.shuffle(order)  # the colours know nothing of the alphabet
        painted(root, order)
        path = trained(root, Path(folder) / "run")
        assert vitkit.load(path).labels == tuple(sorted(names))
        assert mislabelled(root, path) == 0
    tally(class_sets=1)


def test_A4_in_every_format_that_holds_labels(tmp_path, tally):
    painted(tmp_path / "data", ["10", "2", "é", "<b>", "-rf"])
    path = trained(tmp_path / "data", tmp_path / "run")
    model = vitkit.load(path)
    for name in ("a.npz", "folder"):
        vitkit.save(model, tmp_path / name)
        assert mislabelled(tmp_path / "data", tmp_path / name) == 0
        tally(formats=1)


@pytest.mark.parametrize("name", scaled(["m.onnx"], ["m.onnx", "m.pt2", "m.xml"]))
def test_A4_in_exported_files(name, tmp_path, tally):
    export = pytest.importorskip("vitkit.commands.export").export
    files = pytest.importorskip("vitkit.inference.export")
    painted(tmp_path / "data", ["10", "2", "é", "<b>", "-rf"])
    model = vitkit.load(trained(tmp_path / "data", tmp_path / "run"))
    export(model, tmp_path / name)
    assert (
        tuple(files.describe_export(tmp_path / name).card.labels)
        == model.labels
        == ("-rf", "10", "2", "<b>", "é")
    )
    tally(formats=1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    """`vitkit serve`, and the file that it serves."""
    path = tmp_path_factory.mktemp("served") / "model.safetensors"
    vitkit.save(tiny(), path)
    with service(path, "--workers", "1") as running:
        yield running, path


def asked_about(running: Service, place: Path, model: Path, root: Path) -> int:
    """Put a model in the place of the one that is served -> test images that are called by a wrong name."""
    with httpx.Client(base_url=running.url, timeout=30) as client:
        before = client.get("/v1/model").json()["revision"]
        os.replace(shutil.copyfile(model, place.with_name("beside")), place)
        running.process.send_signal(signal.SIGHUP)
        until(lambda: client.get("/v1/model").json()["revision"] > before, 30)
        images = sorted((root / "test").rglob("*.png"))
        answers = [client.post("/v1/predict?top=1", content=image.read_bytes()) for image in images]
    assert [answer.status_code for answer in answers] == [200] * len(images)
    messages = [answer.json()["results"][0]["top"][0]["label"] for answer in answers]
    return sum(label != image.parent.name for label, image in zip(messages, images, strict=True))


@settings(max_examples=scaled(2, 24), deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(SETS, st.randoms(use_true_random=False))
@example({"10", "2", "e\u0301", "<b>", "-rf"}, random.Random(0))
def test_A4_a_service_calls_every_image_by_its_folder(served, tally, names, rng):
    with tempfile.TemporaryDirectory() as folder:
        root, order = Path(folder) / "data", sorted(names)
        rng.shuffle(order)
        painted(root, order)
        assert asked_about(*served, trained(root, Path(folder) / "run"), root) == 0
    tally(class_sets_served=1)


@pytest.mark.control("vitkit.weights.save.card_of")
def test_A4_control_names_that_do_not_travel_with_the_model_are_lost(served, tmp_path, switched_off):
    """As where a file holds arrays alone: a class is a number, here and behind the service."""
    painted(tmp_path / "data", ["a", "b", "c"])
    switched_off("vitkit.weights.save.card_of", lambda *of: replace(card_of(*of), labels=()))
    path = trained(tmp_path / "data", tmp_path / "run")
    assert mislabelled(tmp_path / "data", path) == 3
    assert asked_about(*served, path, tmp_path / "data") == 3


@pytest.mark.control("vitkit.runs.build.usable", "vitkit.data.splits.same_classes")
def test_A4_control_without_the_check_an_unknown_class_gets_the_name_of_another(tmp_path, switched_off):
    switched_off("vitkit.runs.build.usable", lambda splits, place, targets="": [])
    switched_off("vitkit.data.splits.same_classes", lambda source, classes, name="": source)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_A4_a_class_of_val_that_training_does_not_know_is_an_error_by_name(tmp_path)


def test_A4_a_class_of_val_that_training_does_not_know_is_an_error_by_name(tmp_path):
    painted(tmp_path / "data", ["a", "b"])
    (tmp_path / "data" / "val" / "b").rename(tmp_path / "data" / "val" / "c")
    with refused("data.classes", "val", "train", "'c'"):
        trained(tmp_path / "data", tmp_path / "run")
