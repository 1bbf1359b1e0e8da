"""Confident learning against its definition, and what it must not depend on."""

import numpy as np
import pytest

from vitkit.errors import Error
from vitkit.metrics.feature_neighbours import Neighbours, near_duplicates, nearest_neighbours, outliers
from vitkit.metrics.label_errors import (
    calibrated,
    confident_errors,
    fold_numbers,
    label_errors,
    out_of_fold_scores,
)

torch = pytest.importorskip("torch")


def clusters(images: int = 400, classes: int = 5, width: int = 12, seed: int = 0):
    """Features in well separated clusters, and the number of each image's cluster."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, images)
    centres = 3 * rng.standard_normal((classes, width))
    return (centres[labels] + rng.standard_normal((images, width))).astype(np.float32), labels


def flipped(labels: np.ndarray, share: float, classes: int, seed: int = 1):
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(labels))[: round(share * len(labels))]
    wrong = labels.copy()
    wrong[rows] = (labels[rows] + rng.integers(1, classes, len(rows))) % classes
    return wrong, set(rows.tolist())


def by_definition(probabilities, labels):
    """The confident joint, image by image."""
    classes = probabilities.shape[1]
    mean = [probabilities[labels == c, c].mean() if (labels == c).any() else np.inf for c in range(classes)]
    errors = 0
    for row, label in zip(probabilities, labels, strict=True):
        reached = [c for c in range(classes) if row[c] >= mean[c]]
        errors += bool(reached) and max(reached, key=lambda c: row[c]) != label
    own = [(row[label], i) for i, (row, label) in enumerate(zip(probabilities, labels, strict=True))]
    lowest = [i for _, i in sorted(own)[:errors]]
    return [(i, int(probabilities[i].argmax())) for i in lowest if probabilities[i].argmax() != labels[i]]


@pytest.mark.parametrize("seed", range(5))
def test_the_errors_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 200)
    probabilities = rng.dirichlet(np.ones(6), 200)  # two classes have no image
    probabilities[np.arange(200), labels] += rng.random(200)
    probabilities /= probabilities.sum(1, keepdims=True)
    rows, suggested = confident_errors(probabilities, labels)
    assert list(zip(rows.tolist(), suggested.tolist(), strict=True)) == by_definition(probabilities, labels)
    assert len(rows) > 0


def test_flipped_labels_are_found_and_the_right_ones_suggested():
    x, labels = clusters()
    wrong, rows = flipped(labels, 0.1, 5)
    errors = label_errors(x, wrong)
    hits = rows & set(errors.rows.tolist())
    assert len(hits) >= 0.8 * len(rows) and len(hits) >= 0.9 * len(errors.rows)
    right = labels[errors.rows] == errors.suggested
    assert right.mean() > 0.9 and errors.accuracy == pytest.approx(0.9, abs=0.03)


def test_right_labels_of_separate_classes_are_not_doubted():
    x, labels = clusters()
    assert len(label_errors(x, labels).rows) == 0


def test_the_numbers_of_the_classes_do_not_matter():
    x, labels = clusters(classes=4)
    wrong, _ = flipped(labels, 0.1, 4)
    other = np.array([70, 3, 41, 9])
    first, second = label_errors(x, wrong), label_errors(x, other[wrong])
    assert set(first.rows.tolist()) == set(second.rows.tolist())
    same = dict(zip(first.rows.tolist(), other[first.suggested].tolist(), strict=True))
    assert same == dict(zip(second.rows.tolist(), second.suggested.tolist(), strict=True))


def test_folds_divide_every_class_evenly():
    labels = np.random.default_rng(0).integers(0, 3, 100)
    folds = fold_numbers(labels, 5, 0)
    for label in range(3):
        counts = np.bincount(folds[labels == label], minlength=5)
        assert np.ptp(counts) <= 1


def test_the_scores_of_an_image_are_of_a_ridge_regression_on_the_other_folds():
    x, labels = clusters(100, 3)
    numbers, got = fold_numbers(labels, 5, 0), out_of_fold_scores(x, labels)
    for fold in range(5):
        rest = x[numbers != fold].astype(np.float64)
        mean, scale = rest.mean(0), rest.std(0) + 1e-5
        rows, others = (
            np.c_[(part - mean) / scale, np.full(len(part), 100.0)] for part in (rest, x[numbers == fold])
        )
        targets = 2.0 * np.eye(3)[labels[numbers != fold]] - 1
        weight = np.linalg.solve(rows.T @ rows + 1024 * np.eye(rows.shape[1]), rows.T @ targets)
        assert np.allclose(got[numbers == fold], others @ weight, atol=1e-5)


def test_answers_are_calibrated():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4000, 3))
    truth = np.array([rng.choice(3, p=p) for p in np.exp(logits) / np.exp(logits).sum(1, keepdims=True)])
    probabilities = calibrated((logits / 7).astype(np.float32), truth)  # the scale is unknown
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.abs(probabilities - expected).max() < 0.05


def test_a_class_of_a_few_images_is_not_judged_and_one_class_is_refused():
    x, labels = clusters(100, 3)
    labels[0] = 9  # the only one of its class
    assert 0 not in label_errors(x, labels).rows
    with pytest.raises(Error) as error:
        label_errors(x, np.zeros(100, dtype=np.int64))
    assert error.value.code == "data.classes"


def test_neighbours_are_those_of_the_whole_matrix(monkeypatch):
    x = torch.from_numpy(clusters(150)[0])
    z = x / x.norm(dim=1, keepdim=True)
    full = z @ z.T
    full.fill_diagonal_(-2)
    expected = full.topk(10, 1)
    monkeypatch.setattr("vitkit.metrics.feature_neighbours.SIMILARITIES", 150 * 7)  # in blocks of 7
    got = nearest_neighbours(x)
    assert (got.rows == expected.indices.numpy()).all()
    assert np.allclose(got.distance, 1 - expected.values.numpy(), atol=1e-5)


def test_near_duplicates_form_groups_through_each_other():
    index = np.array([[1, 2], [0, 2], [3, 1], [2, 1], [0, 1], [4, 0]])
    distance = np.array([[0.01, 0.8], [0.01, 0.8], [0.03, 0.8], [0.03, 0.04], [0.5, 0.8], [0.05, 0.06]])
    rows = near_duplicates(Neighbours(index, distance), 0.1)  # 2 and 3 are close, but 3 has another as close
    assert [group.tolist() for group in rows] == [[0, 1]]
    assert [group.tolist() for group in near_duplicates(Neighbours(index, distance), 0.8)] == [
        [0, 1, 4],
        [2, 3],
    ]
    assert near_duplicates(Neighbours(index, distance), 0.01) == []


def test_outliers_are_far_from_everything():
    distance = np.random.default_rng(0).normal(1, 0.1, (1000, 2))
    distance[[7, 9], 1] = 1.6, 1.8
    rows, scores = outliers(Neighbours(np.zeros((1000, 2), int), distance), 4.0)
    assert rows.tolist() == [9, 7] and scores == pytest.approx([8, 6], abs=0.6)
