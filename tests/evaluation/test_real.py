"""Reassessed labels: images without any leave both sides, in the order of the file names."""

import pytest
import torch
from refusals import refused

from vitkit.metrics.classification import by_file_name, check_labels, read_labels, real_accuracy

KEYS = ["b/val_2.png", "b/val_4.png", "a/val_1.png", "a/val_3.png"]  # as folders have them


def test_file_names_give_the_order_and_empty_lists_do_not_count():
    assert by_file_name(KEYS) == [1, 3, 0, 2]
    labels = [[7], [1, 2], [], [3]]  # of val_1, val_2, val_3, val_4
    messages = torch.tensor([2, 0, 7, 5])
    result = real_accuracy(messages, torch.arange(4), KEYS, labels)
    assert (result.accuracy, result.images, result.left_out) == (pytest.approx(2 / 3), 3, 1)
    some = real_accuracy(messages[1:], torch.arange(1, 4), KEYS, labels)  # the first could not be read
    assert (some.accuracy, some.images, some.left_out) == (1 / 2, 2, 1)
    none = real_accuracy(messages, torch.arange(4), KEYS, [[]] * 4)
    assert none.to_json() == {"accuracy": None, "interval": None, "images": 0, "left_out": 4}


def test_labels_of_other_images_are_an_error_that_names_both_numbers():
    with refused("data.labels", "real.json", "3 images", 4):
        check_labels([[1]] * 3, 4, 10, "real.json")
    with refused("data.labels", "image 1", [2, 10], "10 classes"):
        check_labels([[1], [2, 10]], 2, 10, "real.json")
    with refused("evaluation.unsupported", "'a/1.png'", "'b/1.png'"):
        by_file_name(["a/1.png", "b/1.png"])


@pytest.mark.parametrize("text", ["{", "{}", "[1, 2]", '[["a"]]', "[[1.5]]", "[[true]]"])
def test_what_is_no_list_of_lists_of_numbers_is_an_error(text):
    with refused("file.unreadable" if text == "{" else "data.labels", "r.json"):
        read_labels(text, "r.json")


def test_the_published_form_is_read():
    assert read_labels("[[65], [970, 795], []]", "real.json") == [[65], [970, 795], []]
