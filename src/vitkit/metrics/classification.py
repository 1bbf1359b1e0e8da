"""Classification metrics: top-1, top-5, per class, confusion, calibration, ReaL labels, and class mapping."""

# N images in total, B per batch, C classes of the model, F classes of the data (F = C unless they are mapped)

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.metrics.intervals import LEVEL, Interval, wilson

BINS = 15
MAX_CONFUSION_CLASSES = 1000  # with more classes the JSON omits the confusion matrix
LABEL_SEPARATOR = ";"  # between several model classes in one cell
Labels = list[list[int]]  # the correct class indices of each image, in the order of the file names
Synsets = Sequence[tuple[str, str]]  # (WordNet ID, names) of the ImageNet classes in their official order


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: the sum over bins of (share of images) |accuracy - mean confidence|.

    confidence (N,) is the probability of the predicted class, correct (N,) whether it is the true one. The
    bins have equal width: bin q of Q holds the confidences in ((q-1)/Q, q/Q]; the first also includes 0.
    """
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    bin_index = torch.bucketize(confidence.double().contiguous(), edges)
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps.index_add_(0, bin_index, correct.double() - confidence.double())  # N_q (accuracy - confidence)
    return float(gaps.abs().sum()) / len(correct)


TEMPERATURES = tuple(2.0 ** (power / 4) for power in range(-20, 21))  # from 1/32 to 32
UNCHANGED = TEMPERATURES.index(1.0)
ACCEPTED = 0.95  # share of the correctly classified held-out images that a threshold accepts


@dataclass(frozen=True)
class Calibration:
    """What held-out images say about a classifier's probabilities."""

    temperature: float  # by which to divide its logits
    threshold: float  # the confidence that 95 % of the correct images reach then; 0: none is correct


def calibration(rows: Tensor, correct: Tensor) -> Calibration:
    """The temperature with the lowest mean loss, and the threshold at this temperature.

    One more image counts whose label may be any class: without it, a model that is right on all of a few
    images would get the lowest temperature, and so answer with certainty. The temperature stays 1 if another
    does not lower the mean loss by more than one standard error.

    rows (N, 3 T): of each image, as `at_temperatures` returns it; correct (N,): whether its top-1 is right.
    """
    losses, of_any_label, confidences = rows.chunk(3, dim=1)
    best = int((losses.sum(0) + of_any_label.mean(0)).argmin())
    gain = losses[:, UNCHANGED] - losses[:, best]
    if not gain.mean() > gain.std() / len(gain) ** 0.5:
        best = UNCHANGED
    return Calibration(TEMPERATURES[best], acceptance_threshold(confidences[:, best], correct))


def acceptance_threshold(confidence: Tensor, correct: Tensor) -> float:
    """The largest confidence that at least 95 % of the correctly classified images reach; 0 if none is."""
    right = confidence[correct].double()
    return float(torch.quantile(right, 1 - ACCEPTED, interpolation="lower")) if len(right) else 0.0


def at_temperatures(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, 3 T): at each temperature the loss of each image, that of a random label, and the confidence."""
    columns = []
    for temperature in TEMPERATURES:
        log_probabilities = (logits.double() / temperature).log_softmax(1)  # (B, C)
        loss = -log_probabilities.gather(1, labels[:, None])[:, 0]
        columns.append(torch.stack([loss, -log_probabilities.mean(1), log_probabilities.amax(1).exp()]))
    return torch.stack(columns, 2).transpose(0, 1).flatten(1)  # from (3, B, T)


def interval(correct: Tensor, *, level: float = LEVEL) -> Interval:
    """The Wilson interval of the mean of (N,) zeros and ones."""
    return wilson(int(correct.sum()) / max(1, len(correct)), len(correct), level)


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a classifier, with the prediction for every image."""

    images: int
    top1: float
    top5: float | None  # None with five classes or fewer
    loss: float
    classes: int  # C
    data_classes: int  # F
    index: Tensor  # (N,) position of each image in the data
    truth: Tensor  # (N,) true class, one of F
    predicted: Tensor  # (N,) predicted class, one of C
    correct: Tensor  # (N,) whether the prediction counts as correct
    confidence: Tensor  # (N,) probability of the predicted class
    calibration: Calibration | None = None  # if it was asked for

    @property
    def confusion(self) -> Tensor:
        """(F, C): rows are true classes, columns predicted classes."""
        pairs = self.truth * self.classes + self.predicted
        return pairs.bincount(minlength=self.data_classes * self.classes).view(
            self.data_classes, self.classes
        )

    def __repr__(self) -> str:
        return f"Accuracy(images={self.images}, top1={self.top1:.4f}, loss={self.loss:.4f})"

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """`classes` are the names of the F classes."""
        totals = self.truth.bincount(minlength=self.data_classes).tolist()
        hits = self.truth[self.correct].bincount(minlength=self.data_classes).tolist()
        per_class = {
            name: {
                "images": n, "accuracy": hit / n if n else None,
                "interval": list(wilson(hit / n, n)) if n else None,
            }
            for name, n, hit in zip(classes, totals, hits, strict=True)
        }  # fmt: skip
        with_confusion = max(self.classes, self.data_classes) <= MAX_CONFUSION_CLASSES
        return {
            "top1": self.top1, "interval": list(interval(self.correct)), "top5": self.top5,
            "top5_interval": None if self.top5 is None else list(wilson(self.top5, self.images)),
            "images": self.images, "loss": self.loss,
            "calibration_error": calibration_error(self.confidence, self.correct),
            "per_class": per_class, "confusion": self.confusion.tolist() if with_confusion else None,
        }  # fmt: skip


def accuracy_with_rejection(result: Accuracy, threshold: float) -> dict[str, Any]:
    """Which share of the images is accepted, and the accuracy on these; None without accepted images."""
    accepted = result.confidence >= threshold
    correct, wrong = result.correct[accepted], ~result.correct
    return {
        "threshold": threshold, "accepted": len(correct), "coverage": float(accepted.double().mean()),
        "accuracy": float(correct.double().mean()) if len(correct) else None,
        "interval": list(interval(correct)) if len(correct) else None,
        "rejected_mistakes": int((wrong & ~accepted).sum()), "mistakes": int(wrong.sum()),
    }  # fmt: skip


@torch.no_grad()
def accuracy(
    logits_of: Callable[[Tensor], Tensor],
    batches: Iterable[dict[str, Tensor]],
    classes: int,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    accepted: Tensor | None = None,
    *,
    calibrate: bool = False,
) -> Accuracy:
    """Evaluate a function from images to logits on batches with one label per image.

    `gather` concatenates the rows of all processes; they are then sorted by image `index`. `accepted` (F, C)
    marks the model classes that are correct for each data class; without it both sets of classes are equal.
    """
    assert accepted is None or not calibrate
    columns = 6 + 3 * len(TEMPERATURES) * calibrate
    rows, seen = [torch.zeros(0, columns, dtype=torch.float64)], 0
    for batch in batches:
        logits = logits_of(batch["image"]).float().cpu()  # (B, C)
        labels = batch["label"].cpu()
        if labels.ndim != 1:
            raise Error(
                "accuracy needs one label per image; use multilabel_accuracy for several",
                code="evaluation.unsupported",
            )
        index = batch["index"].cpu() if "index" in batch else torch.arange(seen, seen + len(labels))
        seen += len(labels)
        results = torch.stack([index, labels, *per_image_results(logits, labels, accepted)], 1).double()
        rows.append(torch.cat([results, at_temperatures(logits, labels)], 1) if calibrate else results)
    table = gather(torch.cat(rows))
    if not len(table):
        raise Error("there are no images to evaluate on", code="data.empty")
    table = table[table[:, 0].argsort()]
    index, truth, predicted = table[:, :3].long().unbind(1)
    correct = truth == predicted if accepted is None else accepted[truth, predicted]
    top5, loss = table[:, 3:5].mean(0).tolist()
    return Accuracy(
        images=len(table), top1=float(correct.double().mean()), top5=top5 if classes > 5 else None, loss=loss,
        classes=classes, data_classes=classes if accepted is None else len(accepted), index=index,
        truth=truth, predicted=predicted, correct=correct, confidence=table[:, 5],
        calibration=calibration(table[:, 6:], correct) if calibrate else None,
    )  # fmt: skip


def per_image_results(
    logits: Tensor, labels: Tensor, accepted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each image: predicted class, whether the top 5 contain a correct class, loss, confidence.

    If several classes are correct, the loss is that of the sum of their probabilities.
    """
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    confidence = logits.softmax(1).amax(1)
    if accepted is None:
        in_top5 = (best == labels[:, None]).any(1)
        loss = F.cross_entropy(logits, labels, reduction="none")
    else:
        in_top5 = accepted[labels].gather(1, best).any(1)
        loss = -logits.log_softmax(1).masked_fill(~accepted[labels], -torch.inf).logsumexp(1)
    return logits.argmax(1), in_top5, loss, confidence


@dataclass(frozen=True)
class Real:
    """ReaL accuracy: the share of images whose predicted class is among the reassessed labels."""

    accuracy: float | None  # None if no image has a label
    interval: tuple[float, float] | None
    images: int  # counted
    left_out: int  # images without a label, which are not counted

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_labels(text: str, name: str) -> Labels:
    """Parse the published real.json: a list of lists of class indices."""
    try:
        labels = json.loads(text)
    except ValueError as error:
        raise Error(f"{name}: not JSON: {error}", code="file.unreadable") from None
    is_valid = isinstance(labels, list) and all(
        isinstance(row, list) and all(type(number) is int for number in row) for row in labels
    )
    if not is_valid:
        raise Error(
            f"{name}: expected a list with one list of class indices per image",
            code="data.labels",
        )
    return labels


def by_file_name(keys: Sequence[str]) -> list[int]:
    """The rank of each image when all are sorted by file name, regardless of folder."""
    names = [key.replace("\\", "/").rpartition("/")[2] for key in keys]
    order = sorted(range(len(names)), key=names.__getitem__)
    for before, after in pairwise(order):
        if names[before] == names[after]:
            raise Error(
                f"{keys[before]!r} and {keys[after]!r} have the same file name, but reassessed labels are "
                "matched by file name",
                code="evaluation.unsupported",
            )
    ranks = [0] * len(names)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def check_labels(labels: Labels, images: int, classes: int, name: str) -> None:
    """Reject labels for other images or other classes."""
    if len(labels) != images:
        raise Error(
            f"{name} has labels for {len(labels)} images, but the data has {images} images; "
            "labels are needed for exactly these images",
            code="data.labels",
        )
    for rank, row in enumerate(labels):
        if row and not 0 <= min(row) <= max(row) < classes:
            raise Error(
                f"{name}: image {rank} has the labels {row}, outside the range of {classes} classes",
                code="data.labels",
            )


def real_accuracy(predicted: Tensor, index: Tensor, keys: Sequence[str], labels: Labels) -> Real:
    """predicted (N,): the predicted class of each image; index (N,): its position in `keys`."""
    ranks = by_file_name(keys)
    hits, left_out = [], 0
    for number, image in zip(predicted.tolist(), index.tolist(), strict=True):
        if allowed := labels[ranks[image]]:
            hits.append(number in allowed)
        else:
            left_out += 1
    if not hits:
        return Real(None, None, 0, left_out)
    correct = torch.tensor(hits)
    return Real(float(correct.double().mean()), interval(correct), len(hits), left_out)


def normalized_name(name: str) -> str:
    """A class name without case, underscores and extra spaces."""
    return " ".join(name.replace("_", " ").split()).lower()


def indices_by_name(synsets: Synsets) -> dict[str, int]:
    """Class indices by full name list and by single name; ambiguous names are omitted."""
    full_names = Counter(normalized_name(names) for _, names in synsets)
    single_names = Counter(normalized_name(name) for _, names in synsets for name in names.split(", "))
    indices: dict[str, int] = {}
    for index, (wordnet_id, names) in enumerate(synsets):
        for name in map(normalized_name, names.split(", ")):
            if single_names[name] == 1 and name not in full_names:
                indices[name] = index
        if full_names[normalized_name(names)] == 1:
            indices[normalized_name(names)] = index
        indices[normalized_name(f"{names} ({wordnet_id})")] = index
    return indices


def imagenet_indices(names: Sequence[str], synsets: Synsets) -> list[int] | None:
    """The official class index of each name; None unless all are ImageNet classes named in the same way.

    Accepted are WordNet IDs (n01440764), class names (tench), and class indices (0 to 999). Indices must be
    complete, because a few numbers could mean anything.
    """
    by_id = {wordnet_id: index for index, (wordnet_id, _) in enumerate(synsets)}
    if all(name in by_id for name in names):
        return [by_id[name] for name in names]
    if all(name.isascii() and name.isdigit() for name in names):
        numbers = [int(name) for name in names]
        return numbers if sorted(numbers) == list(range(len(synsets))) else None
    by_name = indices_by_name(synsets)
    indices = [by_name.get(normalized_name(name)) for name in names]
    return None if None in indices else [index for index in indices if index is not None]


def official_order(labels: Sequence[str], synsets: Synsets) -> list[int] | None:
    """The official index of each model class if they are the complete ImageNet classes, else None."""
    indices = imagenet_indices(labels, synsets) if len(labels) == len(synsets) else None
    return indices if indices and len(set(indices)) == len(synsets) else None


def map_classes(classes: Sequence[str], labels: Sequence[str], synsets: Synsets) -> list[int] | None:
    """The model class of each data class if both use ImageNet classes, however they are named; else None."""
    order, indices = official_order(labels, synsets), imagenet_indices(classes, synsets)
    if order is None or indices is None:
        return None
    model_class = {official: output for output, official in enumerate(order)}
    return [model_class[index] for index in indices]


def read_table(text: str, name: str) -> dict[str, list[str]]:
    """Parse a CSV with the columns class (of the data) and label (the correct classes of the model).

    Several labels are separated by ';' or given in several rows. A class without a label, or missing from
    the table, is excluded from the evaluation.
    """
    rows = csv.DictReader(io.StringIO(text))
    if not {"class", "label"} <= set(rows.fieldnames or ()):
        raise Error(
            f"{name}: needs the columns class and label, has {', '.join(rows.fieldnames or ())}",
            code="data.layout",
        )
    table: dict[str, list[str]] = {}
    for row in rows:
        labels = [label.strip() for label in (row["label"] or "").split(LABEL_SEPARATOR)]
        table.setdefault(row["class"], []).extend(label for label in labels if label)
    return table


def objectnet_table() -> dict[str, list[str]]:
    """The 113 ObjectNet folders that overlap with ImageNet, and the WordNet IDs that are correct for each.

    The data is from the dataset's own mappings/objectnet_to_imagenet_1k.json and
    folder_to_objectnet_label.json (Barbu et al., 2019), as stored in mlfoundations/wise-ft at 4639a39.
    """
    text = files("vitkit.metrics").joinpath("objectnet.tsv").read_text("utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return {folder: ids.split(LABEL_SEPARATOR) for folder, ids in rows}


def accepted_classes(
    table: Mapping[str, Sequence[str]],
    classes: Sequence[str],
    labels: Sequence[str],
    synsets: Synsets,
    name: str,
) -> Tensor:
    """(F, C): which model classes are correct for each data class; classes with an empty row are excluded.

    The table names a model class by its label, or by any ImageNet name if the model has ImageNet classes.
    """
    index_of = {label: i for i, label in enumerate(labels)}
    order = official_order(labels, synsets)
    if order is not None:
        model_class = {official: output for output, official in enumerate(order)}
        official_indices = indices_by_name(synsets) | {key: i for i, (key, _) in enumerate(synsets)}
        index_of = {key: model_class[official] for key, official in official_indices.items()} | index_of
    accepted = torch.zeros(len(classes), len(labels), dtype=torch.bool)
    for row, class_name in enumerate(classes):
        for label in table.get(class_name, ()):
            index = index_of.get(label, index_of.get(normalized_name(label)))
            if index is None:
                raise Error(
                    f"{name}: {class_name!r} is mapped to {label!r}, which is not a class of the model",
                    code="evaluation.classes",
                )
            accepted[row, index] = True
    if not accepted.any():
        raise Error(
            f"{name} maps none of the data's classes: it has {', '.join(map(repr, list(table)[:3]))} ..., "
            f"the data has {', '.join(map(repr, classes[:3]))} ...",
            code="evaluation.classes",
        )
    return accepted
