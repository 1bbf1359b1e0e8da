"""Rejection of images that are of no class of the model: AUROC and shares, before and after calibration.

    python bench/reject.py MODEL DATA OTHER --images 1000

MODEL was not calibrated: the best.safetensors of a run, or a run with calibrate=false. DATA has its
classes: temperature and threshold are chosen on the validation images of the run, and its test images are
counted. The threshold is the confidence that 95 % of the correct validation images reach. OTHER has images of
other classes.
AUROC: how often an image of DATA has a higher confidence than one of OTHER.
"""

import argparse

import numpy as np
import torch
from torch import Tensor

from vitkit.commands.evaluate import match_classes
from vitkit.data.loader import evaluation_batches
from vitkit.data.sources.source import Source
from vitkit.datasets.opening import open_data
from vitkit.inference.predict import evaluation_view, load_model, logits
from vitkit.metrics.classification import (
    TEMPERATURES,
    acceptance_threshold,
    at_temperatures,
    calibration,
    calibration_error,
)
from vitkit.models.variants import Model
from vitkit.runs.provenance.membership import choose_images

COLUMNS = ("", "temperature", "calibration error", "threshold", "AUROC", "DATA accepted", "accuracy on these",
           "mistakes rejected", "OTHER rejected")  # fmt: skip


def outputs(model: Model, source: Source, workers: int) -> tuple[Tensor, Tensor]:
    """The logits (N, K) and the labels (N,) of all images."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    batches = list(evaluation_batches(source, view, 32, workers=workers))
    rows = [logits(model, batch["image"]) for batch in batches]
    return torch.cat(rows), torch.cat([batch["label"] for batch in batches])


def some(source: Source, images: int) -> Source:
    chosen = np.random.default_rng(0).permutation(len(source))[:images]
    return source.take(np.sort(chosen))


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve, by ranks; ties count half."""
    values = torch.cat([inside, outside]).double().numpy()
    order, ranks = np.argsort(values, kind="stable"), np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    _, inverse = np.unique(values, return_inverse=True)
    mean_ranks = np.bincount(inverse, ranks) / np.bincount(inverse)
    total = mean_ranks[inverse][: len(inside)].sum() - len(inside) * (len(inside) + 1) / 2
    return float(total / (len(inside) * len(outside)))


def row(name: str, temperature: float, val: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor],
        other: Tensor) -> tuple[str, ...]:  # fmt: skip
    """The cells of COLUMNS at a temperature."""
    confidence, correct = [], []
    for values, labels in (val, test, (other, torch.full((len(other),), -1))):
        best = (values.double() / temperature).softmax(1).max(1)
        confidence.append(best.values)
        correct.append(best.indices == labels)
    threshold = acceptance_threshold(confidence[0], correct[0])
    accepted, wrong = confidence[1] >= threshold, ~correct[1]
    numbers = (
        calibration_error(confidence[1], correct[1]), threshold, auroc(confidence[1], confidence[2]),
        accepted.double().mean(), correct[1][accepted].double().mean(),
    )  # fmt: skip
    rejected = f"{int((wrong & ~accepted).sum())} of {int(wrong.sum())}"
    return (name, f"{temperature:.2f}", *(f"{float(number):.3f}" for number in numbers), rejected,
            f"{float((confidence[2] < threshold).double().mean()):.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("other")
    parser.add_argument("--images", type=int, default=1000, help="of each set, at most")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    model = load_model(options.model, "cpu").eval()
    opened = open_data(options.data)
    parts = (choose_images(options.model, options.data, opened, split).source for split in ("val", "test"))
    matched = (match_classes(part, model, options.data, "")[0] for part in parts)
    val, test = (outputs(model, some(part, options.images), options.workers) for part in matched)
    others = next(iter(open_data(options.other).values()))
    other = outputs(model, some(others, options.images), options.workers)[0]
    fitted = calibration(at_temperatures(*val), val[0].argmax(1) == val[1]).temperature
    print(f"images: {len(val[1])} val, {len(test[1])} test, {len(other)} others; "
          f"temperatures {TEMPERATURES[0]:g} to {TEMPERATURES[-1]:g}")  # fmt: skip
    print("|", " | ".join(COLUMNS), "|")
    for name, temperature in (("before", 1.0), ("after", fitted)):
        print("|", " | ".join(row(name, temperature, val, test, other)), "|")


if __name__ == "__main__":
    main()
