"""VTAB-1k as a table: the paper's groups and sizes, the split rules, and the published order of images."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from formats import cifar100, picture, put
from refusals import refused

from vitkit.data.sources.source import Lazy, Source
from vitkit.datasets.opening import open_data
from vitkit.datasets.vtab import GROUPS, TASKS, find_task, portions, published_order, read_task

DOCS = (Path(__file__).parents[3] / "docs" / "research" / "vtab.md").read_text()
SHARE = {
    "caltech101": 90, "cifar100": 90, "pets": 80, "svhn": 90, "eurosat": 60, "resisc45": 60,
    "clevr-count": 90, "clevr-distance": 90, "dsprites-location": 80, "dsprites-orientation": 80,
}  # fmt: skip


def numbers(split: str, count: int, classes: int = 4) -> Source:
    keys = Lazy(count, lambda i: f"{split}/{i}")
    names = tuple(map(str, range(classes)))
    pixels = np.zeros((2, 2, 3), np.uint8)
    return Source("test", names, keys, np.arange(count) % classes, lambda i: pixels + np.uint8(i % 251))


def places(source: Source) -> list[int]:
    return [int(key.rpartition("/")[2]) for key in source.keys]


def test_there_are_19_tasks_in_three_groups():
    result = {group: sum(task.group == group for task in TASKS.values()) for group in GROUPS}
    assert result == GROUPS and sum(GROUPS.values()) == len(TASKS) == 19


def test_flips_and_crops_are_left_out_where_bit_leaves_them_out():
    assert {t.name for t in TASKS.values() if not t.flip} == {
        "dsprites-location", "dsprites-orientation", "snorb-azimuth"
    }  # fmt: skip
    assert {t.name for t in TASKS.values() if not t.crop} == {
        "clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"
    }  # fmt: skip


def test_an_unknown_task_is_told_the_known_ones():
    with refused("request.unknown", "'mnist'", "caltech101, cifar100"):
        find_task("mnist")


def test_the_order_is_that_which_tensorflow_datasets_is_known_to_have():
    """The first eight training images of its CIFAR data sets, the first of its Pets, its test of the hash."""
    assert published_order("train", map(str, range(50_000)))[:8].tolist() == [
        16399, 1680, 47917, 17307, 27051, 48736, 26263, 1456
    ]  # fmt: skip
    assert published_order("train", (f"Sphynx_{i}.jpg" for i in range(301)))[0] == 158
    digest = hashlib.md5(b"0", usedforsecurity=False).hexdigest()
    assert int(digest, 16) == 276215275525073243129443018166533317850
    with refused("data.layout", "'train'"):
        published_order("train", ["a", "a"])


@pytest.mark.parametrize("name", TASKS)
def test_every_split_rule_at_its_published_size(name):
    """800, 200, all of test, no image twice, each where the rule says; the largest sets at a tenth of it."""
    task = TASKS[name]
    large = max(task.images.values()) > 30_000
    sizes = {split: images // 10 if large else images for split, images in task.images.items()}
    raw = {split: numbers(split, images) for split, images in sizes.items()}
    made = portions(raw, task, "tfds")
    order = {
        split: published_order(split, map(str, range(images))).tolist() for split, images in sizes.items()
    }
    train = sizes["train"]
    assert places(made["train"]) == order["train"][:800] and len(made["val"]) == 200
    if name in SHARE:
        start = train * SHARE[name] // 100
        assert places(made["val"]) == order["train"][start : start + 200]
    else:
        where = "test" if name.startswith("snorb") else "validation"
        assert places(made["val"]) == order[where][:200]
    last = {"eurosat": 5, "resisc45": 5, "dsprites-location": 10, "dsprites-orientation": 10}
    if name in last:  # the last fifth or tenth of train, give or take rounding
        assert abs(len(made["test"]) - train / last[name]) < 2
        assert places(made["test"]) == order["train"][-len(made["test"]) :]
    elif name.startswith("snorb"):
        assert places(made["test"]) == order["test"][12_150:]
    else:
        assert places(made["test"]) == order["validation" if name.startswith("clevr") else "test"]
    assert len({key for part in made.values() for key in part.keys}) == sum(map(len, made.values()))


@pytest.mark.parametrize(("train", "test"), [(799, 10), (1_100, 10), (2_000, 0)])
def test_too_few_images_are_an_error_and_never_shared(train, test):
    with refused("data.empty", "cifar100", 800, 200):
        portions({"train": numbers("train", train), "test": numbers("test", test)}, TASKS["cifar100"], "tfds")


def test_a_missing_split_is_named():
    with refused("data.empty", "dtd", "'validation'", "train, test"):
        raw = {"train": numbers("train", 900), "test": numbers("test", 9)}
        portions(raw, TASKS["dtd"], "tfds")


def test_by_content_names_and_numbers_do_not_matter():
    task, raw = TASKS["cifar100"], numbers("train", 40)
    turned = raw.take(np.arange(40)[::-1])
    sets = []
    for source in (raw, turned):
        made = portions({"train": source, "test": numbers("test", 4)}, task, "content", (8, 2))
        sets.append({name: places(part) for name, part in made.items()})
    assert sets[0]["train"] == sets[1]["train"] and sets[0]["val"] == sets[1]["val"]
    assert sets[0]["train"] != list(range(8))


def test_other_classes_than_the_tasks_are_refused(tmp_path):
    for label in ("River", "Forest"):
        put(tmp_path / "eurosat" / "2750" / label / "1.jpg", picture(1, "JPEG"))
    with refused("data.classes", "eurosat", "2 classes in train", 10):
        read_task("eurosat", tmp_path)


def test_a_task_is_opened_as_a_recipes_data(tmp_path):
    cifar100(tmp_path / "cifar100")
    splits = open_data(f"vtab:cifar100:{tmp_path}")
    assert {name: len(part) for name, part in splits.items()} == {"train": 800, "val": 200, "test": 40}
    first = splits["train"].keys[0]
    expected = published_order("train", map(str, range(2000)))[0]
    assert first == f"train/{expected}" and splits["train"].labels[0] == expected % 100
    assert splits["train"].fetch(0)[0, 0].tolist() == [(expected + c) % 256 for c in (0, 50, 100)]
    opened = read_task("cifar100", tmp_path)
    assert opened.order == "tfds" and not opened.complete  # 2,000 of 50,000
    with refused("request.value", "'vtab:cifar100'", "vtab:TASK:ROOT"):
        open_data("vtab:cifar100")
    with refused("data.not-found", tmp_path / "dtd"):
        open_data(f"vtab:dtd:{tmp_path}")


def test_hugging_faces_files_do_as_well_and_are_ordered_by_content(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from test_parquet import write

    write(tmp_path / "camelyon" / "train-0.parquet", range(250), [i % 2 for i in range(250)], ("a", "b"))
    write(tmp_path / "camelyon" / "validation-0.parquet", range(20), [0, 1] * 10, ("a", "b"))
    write(tmp_path / "camelyon" / "test-0.parquet", range(20), [0, 1] * 10, ("a", "b"))
    opened = read_task("camelyon", tmp_path, sizes=(80, 20))
    assert opened.order == "content" and not opened.complete and len(opened.splits["train"]) == 80


def test_the_document_tells_every_task_with_its_order_and_exceptions():
    for task in TASKS.values():
        row = next(line for line in DOCS.splitlines() if line.startswith(f"| `{task.name}` |"))
        assert f"`{task.folder}/`" in row and f"| {task.order} |" in row
        exceptions = [word for word, kept in (("flip", task.flip), ("crop", task.crop)) if not kept]
        assert row.endswith(f"| {', '.join(exceptions) or '-'} |")
