"""A run that goes on with other data than it has learned from: listed and refused, or accepted by a flag."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_cli import run

from vitkit.data.sources.source import Source
from vitkit.datasets.opening import open_data, shard
from vitkit.runs.provenance import fingerprint
from vitkit.runs.provenance.changes import Listing, differences
from vitkit.runs.provenance.fingerprint import FILE, check_data, summary
from vitkit.runtime.runtime import Runtime

COLOURS = {"apple": (220, 20, 20), "grass": (20, 200, 20), "lemon": (220, 220, 20), "sky": (30, 60, 220)}
TINY = [
    "--model", "ViT-Ti/4", "--image-size", "8", "--batch", "16", "--workers", "0", "--lr", "0.003",
    "--set", "model_options=width=32,depth=1,heads=2,hidden=32", "evaluations=0", "schedule.warmup=1",
    "flip=false",
]  # fmt: skip
ACCEPT = "--accept-changed-data"


def paint(folder: Path) -> Path:
    """Four classes that a colour tells apart, with the same file names in each."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2), ("test", 4)):
        for name, colour in COLOURS.items():
            where = folder / split / name
            where.mkdir(parents=True)
            for i in range(count):
                spot = 8 + int(rng.integers(0, 5))  # sizes of files differ
                pixels = np.clip(colour + rng.integers(-20, 20, (spot, spot, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(where / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The data, and a run on it that is right about every image."""
    home = tmp_path_factory.mktemp("fruit")
    data = paint(home / "data")
    assert run("finetune", data, "--out", home / "run", "--steps", 40, *TINY) == 0
    assert accuracy(home / "run") == 1.0
    return home


@pytest.fixture
def home(trained, tmp_path, monkeypatch):
    """A copy of both, by the same relative names."""
    for name in ("data", "run"):
        shutil.copytree(trained / name, tmp_path / name)
    output = json.loads((tmp_path / "run/recipe.json").read_text()) | {"data": "data"}
    (tmp_path / "run/recipe.json").write_text(json.dumps(output))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resume(*more) -> int:
    return run("finetune", "data", "--out", "run", "--steps", 40, *TINY, *more)


def accuracy(out: Path) -> float:
    return json.loads((out / "result.json").read_text())["test"]["top1"]


def rename(home):
    for split in ("train", "val", "test"):
        (home / f"data/{split}/apple").rename(home / f"data/{split}/red apple")


def remove(home):
    for i in range(3):
        (home / f"data/train/sky/{i}.png").unlink()


def move(home):
    (home / "data/train/lemon/7.png").rename(home / "data/train/sky/unique.png")
    assert resume(ACCEPT) == 0
    (home / "data/train/sky/unique.png").rename(home / "data/train/lemon/unique.png")


def move_split(home):
    (home / "data/train/lemon/7.png").rename(home / "data/test/lemon/7.png")


def add(home):
    shutil.copy(home / "data/train/sky/0.png", home / "data/train/sky/new.png")
    shutil.copy(home / "data/train/sky/0.png", home / "data/train/sky/newer.png")


def swap(home):
    for split in ("train", "val", "test"):
        a, b, aside = (home / "data" / split / name for name in ("apple", "sky", "aside"))
        a.rename(aside)
        b.rename(a)
        aside.rename(b)


CHANGES = {
    rename: ["class renamed: 'apple' -> 'red apple'"],
    remove: ["3 images removed", "train/sky/0.png"],
    move: ["1 image moved from class 'sky' to 'lemon'", "train/lemon/unique.png"],
    move_split: ["1 image moved from train to test", "test/lemon/7.png"],
    add: ["2 images added", "train/sky/new.png"],
    swap: ["14 images moved from class 'apple' to 'sky'", "14 images moved from class 'sky' to 'apple'"],
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_data_is_listed_and_refused_or_accepted_by_the_flag(change, home, capsys):
    change(home)
    before = {path: path.read_bytes() for path in (home / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert resume() == 2
    output = capsys.readouterr().err
    for phrase in (*CHANGES[change], ACCEPT, "run"):
        assert phrase in output
    assert len([line for line in output.splitlines() if line.startswith("vitkit:")]) == 1
    assert "Traceback" not in output
    assert all(path.read_bytes() == data for path, data in before.items() if path.name != ".lock")
    assert resume(ACCEPT) == 0
    assert CHANGES[change][0] in capsys.readouterr().err
    assert resume() == 0, "what was accepted once is the run's data from there on"


def test_a_renamed_class_keeps_its_number_so_that_the_run_is_as_good_as_before(home):
    rename(home)
    (home / "run/result.json").unlink()
    assert resume(ACCEPT) == 0
    assert accuracy(home / "run") == 1.0
    (home / "run/result.json").unlink()
    assert resume() == 0, "the number is remembered"
    assert accuracy(home / "run") == 1.0
    from vitkit.weights.load import load

    assert load(home / "run/model.safetensors").labels == ("red apple", "grass", "lemon", "sky")


@pytest.mark.parametrize("flag", [(), (ACCEPT,)])
def test_other_classes_are_refused_with_and_without_the_flag(flag, home, capsys):
    for split in ("train", "val", "test"):
        shutil.rmtree(home / f"data/{split}/apple")
        shutil.copytree(home / f"data/{split}/sky", home / f"data/{split}/sea")
        for path in sorted((home / f"data/{split}/sea").iterdir()):
            path.rename(path.with_name(f"wave-{path.name}"))
    assert resume(*flag) == 2
    output = capsys.readouterr().err
    assert "1 class removed: 'apple'" in output and "1 class added: 'sea'" in output and ACCEPT not in output


def test_the_order_of_files_on_a_disk_does_not_matter(home, capsys):
    for path in sorted((home / "data").rglob("*.png"), reverse=True):  # written anew, the last first
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    assert resume() == 0


def test_before_the_first_checkpoint_changed_data_is_simply_used(home):
    shutil.rmtree(home / "run/checkpoints")
    (home / "run/result.json").unlink()
    add(home)
    assert resume() == 0


def without_fingerprint(home) -> None:
    (home / "run" / FILE).unlink()


def test_a_run_without_fingerprint_goes_on_with_one_line_and_then_has_one(home, capsys):
    without_fingerprint(home)
    assert resume() == 0
    assert capsys.readouterr().err.count(FILE) == 1 and (home / "run" / FILE).exists()
    assert resume() == 0 and FILE not in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"\x1f\x8b\x08cut", b"text", None], ids=["empty", "cut", "text", "half"]
)
def test_a_damaged_fingerprint_counts_as_none(content, home, capsys):
    path = home / "run" / FILE
    path.write_bytes(path.read_bytes()[:60] if content is None else content)
    assert resume() == 0
    assert FILE in capsys.readouterr().err


@pytest.mark.parametrize("change, phrase", [(remove, "train: 32 images -> 29"), (rename, "'apple'")])
def test_a_run_without_fingerprint_is_compared_by_what_it_has(change, phrase, home, capsys):
    without_fingerprint(home)
    change(home)
    assert resume() == 2
    assert phrase in capsys.readouterr().err


def test_a_zip_and_a_manifest_are_compared_too(home, tmp_path, capsys):
    rows = [
        f"data/{p.relative_to(home / 'data')},{p.parent.name},{p.parts[-3]}"
        for p in sorted((home / "data").rglob("*.png"))
    ]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["path,label,split", *rows]) + "\n")
    command = ("finetune", table, "--out", tmp_path / "listed", "--steps", 2, *TINY)
    assert run(*command) == 0 and run(*command) == 0
    table.write_text("\n".join(["path,label,split", *reversed(rows)]) + "\n")
    assert run(*command) == 2 and "the same images in another order" in capsys.readouterr().err
    table.write_text(
        "\n".join(
            ["path,label,split", rows[0].replace("apple,", "sky,").replace("grass,", "sky,"), *rows[1:]]
        )
        + "\n"
    )
    assert run(*command) == 2 and "1 image moved from class 'apple' to 'sky'" in capsys.readouterr().err
    shutil.make_archive(str(tmp_path / "all"), "zip", home / "data")
    command = ("finetune", tmp_path / "all.zip", "--out", tmp_path / "zipped", "--steps", 2, *TINY)
    assert run(*command) == 0
    swap(home)
    shutil.make_archive(str(tmp_path / "all"), "zip", home / "data")
    assert run(*command) == 2 and "14 images moved from class 'apple' to 'sky'" in capsys.readouterr().err


def test_shards_are_compared_by_their_index_without_listing_a_name(home, tmp_path, monkeypatch, capsys):
    shard("data", tmp_path / "a", images=8)
    shard("data", tmp_path / "b", images=5)

    def forbidden(self, place):
        raise AssertionError("a name was asked for")

    with monkeypatch.context() as patch:
        patch.setattr("vitkit.data.sources.source.Lazy.__getitem__", forbidden)
        same = [summary(open_data(tmp_path / name)) for name in "ab"]
    assert same[0] == same[1], "cut otherwise, but the same images"
    command = ("finetune", tmp_path / "a", "--out", tmp_path / "run2", "--steps", 2, *TINY)
    assert run(*command) == 0 and run(*command) == 0
    rename(home)
    remove(home)
    shutil.rmtree(tmp_path / "a")
    shard("data", tmp_path / "a", images=8)
    capsys.readouterr()
    assert run(*command) == 2
    output = capsys.readouterr().err
    assert "'apple' -> 'red apple'" in output and "'sky' 8 -> 5" in output


def test_millions_of_images_in_shards_take_no_time():
    count = 14_000_000
    labels = np.zeros(count, np.int64)
    keys = type("Names", (), {"__len__": lambda self: count})()
    train = Source("many", ("a", "b"), keys, labels, lambda i: b"", identity="0" * 64)
    first = summary({"train": train})
    labels[count // 2] = 1
    assert summary({"train": train}) != first


def test_more_images_than_are_listed_are_named_by_class(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "LISTED", 10)
    data, out = paint(tmp_path / "data"), tmp_path / "run"
    (out / "checkpoints/step-00000001").mkdir(parents=True)
    options = {"labelled": True, "say": lambda text: None}
    (out / "checkpoints").rename(out / "later")
    check_data(open_data(data), out, Runtime(), accept=None, **options)
    (out / "later").rename(out / "checkpoints")
    assert len((out / FILE).read_bytes()) < 1000
    remove(tmp_path)
    with pytest.raises(ValueError, match=r"train: 32 images -> 29 \('sky' 8 -> 5\)") as output:
        check_data(open_data(data), out, Runtime(), accept=None, **options)
    assert ACCEPT not in str(output.value), "no advice that the verb does not have"


def test_names_that_stand_in_every_class_are_not_taken_for_moves():
    old = Listing(["a", "b"], {}, {"train": (["a/1", "b/1", "b/2"], ["a", "b", "b"])})
    new = Listing(["a", "b"], {}, {"train": (["a/2", "b/1"], ["a", "b"])})
    assert differences(old, new) == [
        "1 image moved from class 'b' to 'a': 'a/2'",
        "1 image removed: a 1 (as 'a/1')",
    ]


@pytest.mark.slow
def test_the_processes_of_a_run_agree(home):
    remove(home)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "vitkit", "finetune", "data", "--out", "run", "--steps", "40", "--device", "cpu", *TINY,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode != 0
    assert done.stderr.count("vitkit: the data has changed since the run in run was trained") == 2
    assert "3 images removed" in done.stderr and "gloo" not in done.stderr.lower()
