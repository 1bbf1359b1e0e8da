"""ImageNet's thousand names, in the order in which every published head has them."""

import json

import pytest

import vitkit
from vitkit.weights.card import distinct_labels, imagenet_labels, imagenet_synsets


def test_the_order_is_that_of_the_wordnet_numbers():
    numbers = [number for number, _ in imagenet_synsets()]
    assert len(numbers) == 1000 and numbers == sorted(numbers)


def test_known_classes_stand_at_their_places():
    labels = imagenet_labels()
    places = {0: "tench", 285: "Egyptian cat", 442: "bell cote", 540: "drilling platform", 967: "espresso"}
    for index, name in places.items():
        assert labels[index].startswith(name)


def test_names_are_unique_though_there_are_two_cranes():
    labels = imagenet_labels()
    assert len(set(labels)) == 1000
    assert labels[134] == "crane (n02012849)" and labels[517] == "crane (n03126707)"


def test_a_thousand_outputs_get_them_and_say_so(small, tmp_path):
    vitkit.save(small(classes=1000, gelu="erf", width=64, heads=1), tmp_path / "m.pth", "timm")
    model = vitkit.load(tmp_path / "m.pth")
    assert model.labels == imagenet_labels()
    assert any("ImageNet" in note for note in model.origin.notes)


def test_a_folder_of_another_library_that_calls_both_cranes_crane_can_be_told_apart(small, tmp_path):
    vitkit.save(small(classes=1000, gelu="erf", width=64, heads=1), tmp_path / "m", "hf")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config["id2label"] = {str(i): name for i, (_, name) in enumerate(imagenet_synsets())}
    assert config["id2label"]["134"] == config["id2label"]["517"] == "crane"
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    assert vitkit.load(tmp_path / "m").labels == imagenet_labels()


def test_other_labels_that_several_outputs_share_stay_as_they_are():
    names = ("toad", "crane", "crane")
    assert distinct_labels(names) == names
    assert distinct_labels(("toad",) * 1000) == ("toad",) * 1000


def test_timm_lists_the_same_classes():
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    assert [number for number, _ in imagenet_synsets()] == info.label_names()


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "folder"])
def test_names_that_are_no_unicode_come_back(small, tmp_path, name):
    """A folder's name is bytes; Python shows those that are no UTF-8 as lone surrogates."""
    model = small(classes=3)
    model.labels = ("caf\udce9", "\u202etxt", "\U0001f408")
    vitkit.save(model, tmp_path / name)
    assert vitkit.load(tmp_path / name).labels == model.labels
