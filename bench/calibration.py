"""How many validation images a temperature needs: test loss and calibration error, before and after.

    python bench/calibration.py RUN... --images 20 50 100 200 500

Each RUN is a folder of `vitkit finetune --set calibrate=false`. Its temperature is chosen as a calibrated run
chooses it, but on so many images of its test split, and judged on all others: 200 random draws.
"""

import argparse
from pathlib import Path

import torch
from reject import outputs
from torch import Tensor

from vitkit.inference.predict import load_model
from vitkit.metrics.classification import at_temperatures, calibration, calibration_error
from vitkit.recipes.recipe import read_recipe
from vitkit.runs.build import SplitCache

DRAWS = 200


def scores(logits: Tensor, labels: Tensor, temperature: float) -> tuple[float, float]:
    """The mean loss and the calibration error at a temperature."""
    logits = logits.double() / temperature
    confidence, predicted = logits.softmax(1).max(1)
    loss = float(torch.nn.functional.cross_entropy(logits, labels))
    return loss, calibration_error(confidence, predicted == labels)


def rows(folder: Path, counts: list[int], workers: int) -> None:
    """One line for each number of images."""
    model = load_model(str(folder), "cpu").eval()
    test = SplitCache()(read_recipe(folder / "recipe.json"), None)["test"]
    logits, labels = outputs(model, test, workers)
    table, correct = at_temperatures(logits, labels), logits.argmax(1) == labels
    print(f"\n{folder.name}: {len(labels)} test images, top-1 {100 * float(correct.double().mean()):.2f} %")
    print("| images | temperature | loss before | after | error before | after |")
    print("|---|---|---|---|---|---|")
    for count in counts:
        if 2 * count > len(labels):
            break
        results = []
        for draw in range(DRAWS):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(draw))
            chosen, rest = order[:count], order[count:]
            fitted = calibration(table[chosen], correct[chosen]).temperature
            before, after = (scores(logits[rest], labels[rest], t) for t in (1.0, fitted))
            results.append([fitted, *before, *after])
        fitted, loss, error, loss_after, error_after = torch.tensor(results, dtype=torch.float64).unbind(1)
        print(
            f"| {count} | {fitted.quantile(0.05):.2f} to {fitted.quantile(0.95):.2f} "
            f"| {loss.mean():.3f} | {loss_after.mean():.3f} | {error.mean():.3f} | {error_after.mean():.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[20, 50, 100, 200, 500])
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    for folder in options.runs:
        rows(folder, options.images, options.workers)


if __name__ == "__main__":
    main()
