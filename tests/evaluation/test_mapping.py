"""The data's classes in the model's: ImageNet's names of every kind, tables, ObjectNet."""

import pytest
import torch
from refusals import refused

from vitkit.metrics.classification import (
    accepted_classes,
    imagenet_indices,
    map_classes,
    objectnet_table,
    official_order,
    read_table,
)
from vitkit.weights.card import imagenet_labels, imagenet_synsets

SYNSETS = imagenet_synsets()
NUMBERS = tuple(number for number, _ in SYNSETS)
DIGITS = tuple(sorted(map(str, range(1000))))  # '0', '1', '10', '100', ... as folders stand


def test_every_kind_of_name_of_all_classes_gives_the_official_order():
    for names in (imagenet_labels(), NUMBERS):
        assert official_order(names, SYNSETS) == list(range(1000))
    assert official_order(DIGITS, SYNSETS) == [int(name) for name in DIGITS] != list(range(1000))
    for few in (NUMBERS[:999], ("cat", "dog"), tuple("0123456789"), (NUMBERS[0],) * 1000):
        assert official_order(few, SYNSETS) is None


@pytest.mark.parametrize("labels", [imagenet_labels(), NUMBERS, DIGITS])
@pytest.mark.parametrize("classes", [DIGITS, NUMBERS, NUMBERS[5:9], ("tench", "sports_car", "Egyptian cat")])
def test_classes_of_one_kind_are_told_in_those_of_another(classes, labels):
    places = map_classes(classes, labels, SYNSETS)
    meant, official = imagenet_indices(classes, SYNSETS), imagenet_indices(labels, SYNSETS)
    assert [official[place] for place in places] == meant
    if classes[0] == "tench":
        assert meant == [0, 817, 285]


def test_what_may_mean_anything_is_not_guessed():
    labels = imagenet_labels()
    assert map_classes(("0", "1", "2"), labels, SYNSETS) is None  # some numbers, not all
    assert map_classes(("crane",), labels, SYNSETS) is None  # a bird and a machine
    assert map_classes(("crane (n03126707)",), labels, SYNSETS) == [517]
    assert map_classes(("tench", "n01443537"), labels, SYNSETS) is None  # two kinds
    assert map_classes(("tench",), ("tench", "dog"), SYNSETS) is None  # the model's are not ImageNet's
    assert map_classes(("cardigan", "maillot"), labels, SYNSETS) == [
        474,
        638,
    ]  # not the corgi, not the tank suit


def test_a_table_says_what_is_right_for_each_class():
    table = read_table('class,label\nclock,analog clock;n03196217\nclock," 892 "\n"a, b",tench\nrest,\n', "t")
    assert table == {"clock": ["analog clock", "n03196217", "892"], "a, b": ["tench"], "rest": []}
    table["clock"].pop()
    result = accepted_classes(table, ("clock", "other", "rest"), imagenet_labels(), SYNSETS, "t")
    assert result.nonzero().tolist() == [[0, 409], [0, 530]]
    own = accepted_classes({"x": ["b", "c"]}, ("x",), ("a", "b", "c"), SYNSETS, "t")
    assert own.tolist() == [[False, True, True]]


def test_mistakes_in_a_table_are_told():
    with refused("data.layout", "t.csv", "class and label", "a, b"):
        read_table("a,b\n1,2\n", "t.csv")
    with refused("evaluation.classes", "t.csv", "'x'", "'dog'"):
        accepted_classes({"x": ["dog"]}, ("x",), ("a", "b"), SYNSETS, "t.csv")
    with refused("evaluation.classes", "t.csv", "'y'", "'x'"):
        accepted_classes({"y": ["a"]}, ("x",), ("a", "b"), SYNSETS, "t.csv")


def test_objectnets_113_classes_are_all_among_imagenets():
    table = objectnet_table()
    folders = (*table, "squeegee")  # one of the 200 others
    result = accepted_classes(table, folders, imagenet_labels(), SYNSETS, "objectnet")
    assert len(table) == 113 and result.sum(1)[:-1].min() == 1 and not result[-1].any()
    assert result.sum() == 125 and result.any(0).sum() == 125  # no class of ImageNet stands for two of them
    at = folders.index("pen")
    assert [imagenet_labels()[i].split(",")[0] for i in result[at].nonzero()[:, 0]] == [
        "ballpoint", "fountain pen", "quill"
    ]  # fmt: skip
    assert torch.equal(result, accepted_classes(table, folders, NUMBERS, SYNSETS, "objectnet"))
