"""Precision and recall of `vitkit doctor --model` for labels that were flipped on purpose.

    python bench/label_errors.py MODEL DATA... --images 10000 --seeds 0 1 2

Flips a share of the labels of the training images (so many at random), and counts which of them are reported.
Symmetric: to any other class; pairs: to the next class. The baseline doubts every label that is not the most
probable class of the same out-of-fold answers. Features are computed once and cached.
"""

import argparse
from pathlib import Path

import numpy as np

from vitkit.datasets.opening import open_data
from vitkit.inference.predict import load_model, short_names
from vitkit.metrics.label_errors import calibrated, label_errors, out_of_fold_scores
from vitkit.runs.features import Extractor

NOISE = (("symmetric", 0.05), ("symmetric", 0.2), ("pairs", 0.05), ("pairs", 0.2), ("none", 0.0))
COLUMNS = ("reported", "precision", "recall", "AP", "suggestion right", "baseline precision", "recall")


def flip(labels: np.ndarray, kind: str, share: float, seed: int) -> np.ndarray:
    rng, classes = np.random.default_rng(seed), int(labels.max()) + 1
    rows = rng.permutation(len(labels))[: round(share * len(labels))]
    wrong = labels.copy()
    wrong[rows] = (labels[rows] + (1 if kind == "pairs" else rng.integers(1, classes, len(rows)))) % classes
    return wrong


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    ranked = truth[np.argsort(-scores, kind="stable")]
    return float((np.cumsum(ranked) / np.arange(1, len(ranked) + 1))[ranked].mean())


def measured(x: np.ndarray, labels: np.ndarray, kind: str, share: float, seed: int) -> list[float]:
    """The values of COLUMNS; NaN where nothing was flipped."""
    given = flip(labels, kind, share, seed)
    wrong = given != labels
    errors = label_errors(x, given, seed=seed)
    probabilities = calibrated(out_of_fold_scores(x, given, seed=seed), given)
    doubted = probabilities.argmax(1) != given
    if not wrong.any():
        return [len(errors.rows), *[np.nan] * 6]
    hits = wrong[errors.rows]
    right = (errors.suggested == labels[errors.rows])[hits]
    ap = average_precision(-probabilities[np.arange(len(given)), given], wrong)
    return [len(errors.rows), hits.mean(), hits.sum() / wrong.sum(), ap, right.mean(),
            wrong[doubted].mean(), doubted[wrong].mean()]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data", nargs="+")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, default=None)
    options = parser.parse_args()
    extractor = Extractor(model=load_model(options.model, "cpu"), cache=options.cache, quiet=False)
    print("|", " | ".join(("data", "flipped", *COLUMNS)), "|")
    for place, name in short_names(options.data).items():
        source = next(part for key, part in open_data(place).items() if key in ("train", "all"))
        features = extractor.features(source)
        keep = np.random.default_rng(0).permutation(len(features.index))[: options.images]
        x, labels = features.x.numpy()[keep], source.labels[features.index.numpy()[keep]].astype(np.int64)
        for kind, share in NOISE:
            rows = [measured(x, labels, kind, share, seed) for seed in options.seeds]
            average, deviation = np.mean(rows, 0), np.std(rows, 0)
            cells = ["–" if np.isnan(a) else f"{a:.3f} ± {d:.3f}"
                     for a, d in zip(average, deviation, strict=True)]  # fmt: skip
            cells[0] = f"{average[0]:,.0f} of {len(labels):,}"
            print("|", " | ".join((name, f"{share:.0%} {kind}", *cells)), "|", flush=True)


if __name__ == "__main__":
    main()
