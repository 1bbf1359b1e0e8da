"""A1: two hundred and more bad and odd files in a folder, through a whole training: counted and named."""

import re
from collections import Counter

import numpy as np
import pytest
from bad_images import KINDS, ODD, REFUSED, SEEDS, fill
from harness import scaled
from refusals import refused
from test_cli import run

from vitkit.data import loader
from vitkit.data.doctor import preflight
from vitkit.data.loader import BadFiles
from vitkit.data.order import Order
from vitkit.data.views import View
from vitkit.datasets.opening import open_data

pytestmark = pytest.mark.faults
GOOD = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """train with every kind among 1,000 good files, val and test with good files alone -> names, kinds."""
    root = tmp_path_factory.mktemp("photos")
    names = {f"train/{name}": kind for name, kind in fill(root / "train", GOOD).items()}
    for split in ("val", "test"):
        for name, kind in names.items():
            if kind == "good" and name.endswith("7.jpg"):
                there = root / name.replace("train", split, 1)
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_bytes((root / name).read_bytes())
    return root, names


def finetune(root, names, out, *options) -> int:
    """Two epochs exactly, by a batch that divides the number of files; the exit code."""
    batch = next(n for n in range(100, len(names)) if len(names) % n == 0)
    tiny = ("model_options=width=32,depth=1,heads=2,hidden=32", "evaluations=0", "schedule.warmup=1")
    model = ("--model", "ViT-Ti/4", "--image-size", 8, "--batch", batch, "--epochs", 2)
    return run("finetune", root, "--out", out, *model, "--set", *tiny, *options)


def watched(monkeypatch) -> list[list[str]]:
    """The names of the files in each training batch from now on."""
    real, seen = loader.stream, []

    def spy(samples, *arguments):
        for batch in real(samples, *arguments):
            if samples.order:  # a training's
                seen.append([samples.source.keys[i] for i in batch["index"].tolist()])
            yield batch

    monkeypatch.setattr(loader, "stream", spy)
    return seen


def each_once(seen: list[list[str]], names: dict[str, str]) -> bool:
    """Whether in both epochs every good file was used once, and none in another's place."""
    good, half = {name: 1 for name, kind in names.items() if kind not in REFUSED}, len(seen) // 2
    return all(Counter(key for keys in part for key in keys) == good for part in (seen[:half], seen[half:]))


@pytest.mark.parametrize("workers", scaled([2], [0, 2]))
def test_A1_each_bad_file_is_named_once_and_every_other_is_used_once(
    folder, tmp_path, workers, capfd, monkeypatch, tally
):
    root, names = folder
    seen = watched(monkeypatch)
    assert finetune(root, names, tmp_path / "run", "--workers", workers, "--max-bad", 0.5) == 0
    assert (tmp_path / "run" / "model.safetensors").exists() and len(seen) % 2 == 0
    assert each_once(seen, names)
    output = re.findall(r"^skipped: (\S+): (.+)$", capfd.readouterr().err, re.MULTILINE)
    counts = Counter(key for key, _ in output)
    assert set(counts.values()) == {1} and all(why.strip() for _, why in output)
    assert Counter(names[key] for key in counts) == dict.fromkeys(REFUSED, len(SEEDS))
    tally(files=len(names) - GOOD, runs=1)


@pytest.mark.control("vitkit.data.loader.Samples.__getitems__")
def test_A1_control_a_file_taken_in_the_place_of_a_bad_one_is_noticed(folder, monkeypatch, switched_off):
    """As libraries do: the next sample, without a word."""
    root, names = folder
    source = open_data(root)["train"]

    def next_best(index):
        while names[source.keys[index % len(source)]] in REFUSED:
            index += 1
        return index % len(source)

    real = loader.Samples.__getitems__

    def substituting(self, places):
        made, _ = real(self, places)
        wanted = [next_best(self.order.sample(*place)) for place in places]
        return made | {"index": made["index"].new_tensor(wanted[: len(made["index"])])}, []

    seen = watched(monkeypatch)
    switched_off("vitkit.data.loader.Samples.__getitems__", substituting)
    view, order = View(size=(8, 8), crop="squash"), Order(len(source), 251)
    for _ in zip(range(2 * len(source) // 251), loader.train_batches(source, view, order), strict=False):
        pass
    assert not each_once(seen, names)


@pytest.mark.control("vitkit.data.decode._bad_image")
def test_A1_control_an_error_of_pillow_that_is_passed_on_ends_the_run(folder, tmp_path, switched_off):
    root, names = folder
    switched_off("vitkit.data.decode._bad_image", lambda kind, error: error)
    try:
        code = finetune(root, names, tmp_path / "run", "--workers", 0, "--max-bad", 0.5)
    except Exception as error:
        code = type(error).__name__
    assert code != 0 and not (tmp_path / "run" / "model.safetensors").exists()


def test_A1_reasons_are_those_of_the_kinds(folder):
    root, names = folder
    bad = BadFiles(allowed=1.0)
    source = open_data(root)["train"]
    preflight(source, bad, sample=len(source), workers=2)
    wrong = {k: (names[k], r) for k, r in bad.reasons.items() if r not in KINDS[names[k]].reasons}
    assert not wrong and len(bad.reasons) == len(REFUSED) * len(SEEDS)
    assert len(source) == GOOD + len(KINDS) * len(SEEDS) and len(KINDS) >= 40 and len(ODD) >= 13


def test_A1_by_default_so_many_stop_the_run(folder, tmp_path, capfd):
    """5 % are 62 files: the run ends with the 63rd, which it names with the others."""
    root, names = folder
    assert finetune(root, names, tmp_path / "run", "--workers", 0) == 2
    output = capfd.readouterr().err
    assert "63 of 1255 images are unusable, more than the 5% allowed" in output and "--max-bad" in output
    assert len(re.findall("^skipped: ", output, re.MULTILINE)) == 63
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_A1_before_training_a_look_at_some_images_tells(folder):
    root, names = folder
    source = open_data(root)["train"]
    with refused("data.too-many-bad", "63 of 1255"):
        preflight(source, BadFiles(), workers=2)  # 1,000 of 1,255: enough to know
    output: list[str] = []
    with refused("data.too-many-bad", 400, "5%", "'train/"):
        preflight(source, BadFiles(report=lambda key, why: output.append(key)), sample=400, workers=2)
    assert 20 < len(output) < 63 and len(set(output)) == len(output)
    preflight(source, BadFiles(allowed=0.15), workers=2)
    few = source.take(np.array([i for i, key in enumerate(source.keys) if names[key] == "good"]))
    preflight(few, BadFiles(allowed=0.0), workers=2)


def test_A1_a_share_at_the_limit_is_not_refused_by_bad_luck(folder):
    """A twentieth of 1,000 files is bad, which is allowed: no sample of 300 of them says otherwise."""
    root, names = folder
    source = open_data(root)["train"]
    bad = [i for i, key in enumerate(source.keys) if names[key] in REFUSED][:50]
    good = [i for i, key in enumerate(source.keys) if names[key] == "good"][:950]
    rng = np.random.default_rng(0)
    for _ in range(20):
        preflight(source.take(rng.permutation(bad + good)), BadFiles(), sample=300, workers=2)
