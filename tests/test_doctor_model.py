"""doctor --model on digits with flipped labels: what it finds, and how a run takes its corrections."""

import csv
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from refusals import refused
from test_cli import run

from vitkit.data.sources.source import Source, digits, from_rows
from vitkit.data.views import normalise
from vitkit.datasets.opening import open_data
from vitkit.models.variants import build
from vitkit.runs.corrections import COLUMNS, FILE, Suspect, corrected, read_changes, write_table
from vitkit.runs.provenance.fingerprint import read
from vitkit.weights.save import save

IMAGES, FLIPPED, COPIED = 1500, 75, 6
TRAINING = ("--model", "ViT-Ti/4", "--image-size", 8, "--steps", 2, "--batch", 16, "--device", "cpu",
            "--set", "model.depth=1", "model.width=16", "model.heads=1", "model.hidden=16", "evaluations=1",
            "schedule.warmup=1", "--workers", 0)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small ViT that has seen the digits."""
    torch.manual_seed(0)
    source = digits()
    options = {"width": 64, "depth": 2, "heads": 4, "hidden": 128, "image_size": (8, 8), "classes": 10}
    vit = build("ViT-Ti/4", **options).train()
    pixels = torch.stack(
        [torch.from_numpy(source.fetch(i).copy()).permute(2, 0, 1) for i in range(len(source))]
    )
    inputs = normalise(pixels, vit.preprocessing.mean, vit.preprocessing.std)
    labels = torch.from_numpy(source.labels)
    optimizer = torch.optim.Adam(vit.parameters(), 3e-3)
    for _ in range(10):
        for rows in torch.randperm(len(labels)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(vit(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    path = tmp_path_factory.mktemp("model") / "digits.safetensors"
    save(vit.eval(), path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels() -> tuple[np.ndarray, np.ndarray]:
    source = digits()
    return np.stack([source.fetch(i)[..., 0] for i in range(len(source))]), source.labels


def written(folder: Path, *, flips: int = FLIPPED, copies: int = COPIED, noise: int = 2) -> set[str]:
    """An .npz with flipped labels in train, near-copies of them in test, and noise; the flipped keys."""
    images, labels = pixels()
    rng = np.random.default_rng(0)
    rows = rng.permutation(IMAGES)[:flips]
    wrong = labels.copy()
    wrong[rows] = (labels[rows] + rng.integers(1, 10, flips)) % 10
    nearly = images[:copies].copy()
    nearly[:, 0, 0] += 3  # other pixels, the same image
    strange = rng.integers(0, 256, (noise, 8, 8), dtype=np.uint8)
    np.savez(
        folder / "data.npz", x_train=images[:IMAGES], y_train=wrong[:IMAGES],
        x_test=np.concatenate([images[IMAGES:], nearly, strange]),
        y_test=np.concatenate([labels[IMAGES:], labels[:copies], np.zeros(noise, np.int64)]),
    )  # fmt: skip
    return {f"{row:06d}" for row in rows}


def examined(folder: Path, model: Path, capsys, *more) -> dict:
    capsys.readouterr()
    code = run(
        "doctor",
        folder / "data.npz",
        "--model",
        model,
        "--out",
        folder / "out",
        "--workers",
        1,
        "--json",
        *more,
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0 or not report["ok"]
    return report


def by_reason(report: dict, reason: str) -> list[dict]:
    return [image for image in report["suspects"] if reason in image["reasons"]]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_flipped_labels_copies_and_noise_are_found(model, tmp_path, capsys):
    flipped = written(tmp_path)
    report = examined(tmp_path, model, capsys)
    doubted = by_reason(report, "label")
    hits = {image["image"] for image in doubted if image["split"] == "train"} & flipped
    assert len(hits) >= 0.8 * FLIPPED and len(hits) >= 0.8 * len(doubted)
    truth = digits().labels
    right = [
        int(image["suggested"]) == truth[int(image["image"])] for image in doubted if image["image"] in hits
    ]
    assert np.mean(right) > 0.9 and all(0 < image["probability"] <= 1 for image in doubted)
    copies = {(image["split"], image["image"]): image["duplicate_of"]
              for image in by_reason(report, "near-duplicate")}  # fmt: skip
    first = len(truth) - IMAGES  # in test
    planted = {("train", f"{i:06d}"): f"test:{first + i:06d}" for i in range(COPIED)}
    assert planted.items() <= copies.items()
    assert {f"{first + COPIED + i:06d}" for i in range(2)} <= {
        i["image"] for i in by_reason(report, "outlier")
    }
    kinds = [finding["kind"] for finding in report["findings"]]
    assert {"wrong-labels", "similar-across", "outliers"} <= set(kinds) and report["ok"]
    rows = table(tmp_path / "out" / "manifest.csv")
    assert len(rows) == len(report["suspects"]) == len({(row["split"], row["image"]) for row in rows})
    assert tuple(rows[0]) == COLUMNS and {row["action"] for row in rows} == {""}
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/jpeg;base64,") >= len(doubted) and "<script" not in page


def test_right_labels_are_hardly_doubted(model, tmp_path, capsys):
    written(tmp_path, flips=0, copies=0, noise=0)
    report = examined(tmp_path, model, capsys)
    assert len(by_reason(report, "label")) < 0.02 * 1797
    assert report["label_agreement"] > 0.95


def test_copies_that_the_pixels_show_are_not_reported_twice(model, tmp_path, capsys):
    images, labels = pixels()
    np.savez(tmp_path / "data.npz", x_train=images[:300], y_train=labels[:300],
             x_test=images[295:400], y_test=labels[295:400])  # fmt: skip
    report = examined(tmp_path, model, capsys)
    (exact,) = [finding for finding in report["findings"] if finding["kind"] == "leakage"]
    assert len(exact["groups"]) == 5
    listed = {(image["image"], image["duplicate_of"]) for image in by_reason(report, "near-duplicate")}
    assert not listed & {(f"{295 + i:06d}", f"test:{i:06d}") for i in range(5)}


def test_a_table_with_actions_is_not_overwritten(model, tmp_path, capsys):
    written(tmp_path)
    examined(tmp_path, model, capsys)
    edit(tmp_path / "out" / "manifest.csv", {0: {"action": "exclude"}})
    before = (tmp_path / "out" / "manifest.csv").read_bytes()
    code = run("doctor", tmp_path / "data.npz", "--model", model, "--out", tmp_path / "out", "--json")
    assert code == 2 and json.loads(capsys.readouterr().out)["error"]["code"] == "file.exists"
    assert (tmp_path / "out" / "manifest.csv").read_bytes() == before


def test_several_labels_and_no_labels_are_compared_without_their_labels(model, tmp_path, capsys):
    images, labels = pixels()
    folder = tmp_path / "loose"
    folder.mkdir()
    lines = ["path,label"]
    for i in range(60):
        Image.fromarray(images[i]).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{labels[i]};{(labels[i] + 1) % 10}")
    Image.fromarray(images[0] + 2).save(folder / "copy.png")
    (folder / "several.csv").write_text("\n".join([*lines, f"copy.png,{labels[0]}"]))
    for place in (folder, folder / "several.csv"):
        assert run("doctor", place, "--model", model, "--out", tmp_path / place.name, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["notes"] and report["label_agreement"] is None and not by_reason(report, "label")
        copies = by_reason(report, "near-duplicate")
        assert {"copy.png", "0.png"} & {image["image"] for image in copies}


def test_requests_that_make_no_sense(model, tmp_path, capsys):
    for words in (("digits", "--quick", "--model", model), ("digits", "--out", tmp_path)):
        assert run("doctor", *words, "--json") == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "request.conflict"


def edit(path: Path, changes: dict[int, dict[str, str]]) -> list[dict[str, str]]:
    rows = table(path)
    for number, cells in changes.items():
        rows[number] |= cells
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows


def small(tmp_path: Path) -> Path:
    """A folder of 30 images of each of three digits."""
    images, labels = pixels()
    for label in range(3):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        for number in np.flatnonzero(labels == label)[:30]:
            Image.fromarray(images[number]).save(tmp_path / "photos" / str(label) / f"{number}.png")
    return tmp_path / "photos"


def suspects(photos: Path) -> list[Suspect]:
    keys = list(open_data(photos)["all"].keys)
    return [Suspect(key, "all", key[0], "2", 0.9, ("label",)) for key in (keys[0], keys[1], keys[40])]


def test_a_run_trains_on_the_corrected_images_and_evaluates_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos = small(tmp_path)
    listed = suspects(photos)
    write_table(Path("fix.csv"), listed)
    edit(Path("fix.csv"), {0: {"action": "exclude"}, 1: {"action": "relabel"}})
    command = ("finetune", photos, "--corrections", "fix.csv", "--out", "run", *TRAINING, "--json")
    assert run(*command) == 0
    capsys.readouterr()
    assert json.loads(Path("run/recipe.json").read_text())["corrections"] == "fix.csv"
    rows = read(Path("run/data.json.gz"), 2)[1]
    label_of = {key: row["kinds"][number] for row in rows.values()
                for key, number in zip(row["keys"], row["labels"], strict=True)}  # fmt: skip
    assert len(label_of) == 89 and listed[0].image not in label_of
    assert label_of[listed[1].image] == "2" and label_of[listed[2].image] == "1"
    assert Path("run", FILE).read_bytes() == Path("fix.csv").read_bytes()
    assert run("evaluate", "run", photos, "--split", "all", "--workers", 0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["images"] == 89  # the excluded one is not a new image
    assert run(*command) == 0  # the same command has nothing left to do
    edit(Path("fix.csv"), {2: {"action": "exclude"}})
    capsys.readouterr()
    assert run(*command) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "data.changed"


def test_corrections_work_with_a_folder_a_zip_and_shards(tmp_path):
    photos = small(tmp_path)
    shutil.make_archive(str(tmp_path / "photos"), "zip", photos)
    assert run("shard", photos, tmp_path / "shards", "--json") == 0
    for number, place in enumerate((photos, tmp_path / "photos.zip", tmp_path / "shards")):
        splits = open_data(place)
        ((split, source),) = splits.items()
        keys, names = list(source.keys), [source.classes[label] for label in source.labels]
        out, moved = names.index("0"), names.index("1")
        rows = [Suspect(keys[out], split, "0", action="exclude"),
                Suspect(keys[moved], split, "1", "2", action="relabel")]  # fmt: skip
        write_table(tmp_path / f"{number}.csv", rows)
        after = pickle.loads(
            pickle.dumps(corrected(splits, tmp_path / f"{number}.csv")[split])
        )  # for workers
        assert len(after) == 89 and keys[out] not in after.keys
        where = list(after.keys).index(keys[moved])
        assert after.classes[after.labels[where]] == "2" and after.fetch(where) == source.fetch(moved)
        assert np.bincount(after.labels).tolist() == [29, 29, 31]


def made(keys=("a/1.png", "a/2.png", "b/3.png", "=b/4.png")) -> dict[str, Source]:
    return {"train": from_rows("made", [(key, key.split("/")[0]) for key in keys], lambda key: b"")}


def change(path: Path, **cells: str) -> Path:
    row = dict.fromkeys(COLUMNS, "") | {"image": "a/1.png", "split": "train"} | cells
    path.write_text("\n".join([",".join(COLUMNS), ",".join(row.values())]))
    return path


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ({"action": "exclude", "image": "a/9.png"}, "a/9.png"),
        ({"action": "exclude", "split": "test"}, "'test'"),
        ({"action": "relabel", "suggested": "c"}, "'c'"),
        ({"action": "relabel"}, "suggested"),
        ({"action": "delete"}, "'delete'"),
    ],
)
def test_wrong_corrections_are_refused_with_their_line(tmp_path, cells, named):
    with refused("data.labels", named, "line 2"):
        corrected(made(), change(tmp_path / "fix.csv", **cells))


def test_tables_without_actions_or_with_two_for_an_image_are_refused(tmp_path):
    with refused("data.empty", "action"):
        read_changes(change(tmp_path / "fix.csv"))
    with refused("file.not-found", "none.csv"):
        read_changes(tmp_path / "none.csv")
    rows = [Suspect("a/1.png", "train", "a", "b", action=action) for action in ("exclude", "relabel")]
    write_table(tmp_path / "two.csv", rows)
    with refused("data.labels", "line 3"):
        read_changes(tmp_path / "two.csv")


def test_corrections_change_labels_and_leave_images_out(tmp_path):
    rows = [
        Suspect("a/1.png", "train", "a", "b", action="relabel"),
        Suspect("=b/4.png", "train", "=b", action="exclude"),  # a spreadsheet must not take it for a formula
    ]
    write_table(tmp_path / "fix.csv", rows)
    assert "'=b/4.png" in (tmp_path / "fix.csv").read_text()
    before = made()
    after = corrected(before, tmp_path / "fix.csv")["train"]
    assert list(after.keys) == ["a/1.png", "a/2.png", "b/3.png"]
    assert [after.classes[label] for label in after.labels] == ["b", "a", "b"]
    assert [before["train"].classes[label] for label in before["train"].labels] == ["a", "a", "b", "=b"]
