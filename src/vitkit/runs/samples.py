"""Sample images of a report: test images with their labels and predictions, as thumbnails."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.data.decode import BadImage
from vitkit.data.sources.source import Source
from vitkit.data.views import apply
from vitkit.inference.predict import evaluation_view, logits
from vitkit.metrics.classification import Accuracy
from vitkit.models.variants import Model
from vitkit.tasks.task import Task

CLASSES = 24  # classes of which an image is shown
IMAGES = 12  # images shown if the metrics do not say what was predicted
LABELS = 5  # of one image, true or predicted
SIDE = 192  # pixels of a thumbnail


def sample_images(
    source: Source, task: Task, accuracy: Accuracy | None, model: Model, device: str
) -> dict[str, Any]:
    """Test images with their true and predicted labels: one of each class, or evenly chosen ones."""
    if accuracy is not None:
        classes = evenly(sorted(set(accuracy.truth.tolist())), CLASSES)
        rows = [typical(accuracy, number) for number in classes]
        chosen = [int(accuracy.index[row]) for row in rows]
    else:
        chosen = evenly(range(len(source)), IMAGES)
    views = viewed(source, chosen, model)
    if accuracy is not None:
        predicted = {
            int(accuracy.index[row]): [
                (source.classes[int(accuracy.predicted[row])], float(accuracy.confidence[row]))
            ]
            for row in rows
        }
    else:
        predicted = predicted_labels(task, model.to(device), views)
    images = [
        {"key": str(source.keys[i]), "image": jpeg(resized(view.permute(1, 2, 0).numpy())),
         "truth": true_labels(source, i), "predicted": predicted[i]}
        for i, view in views.items()
    ]  # fmt: skip
    return {"classes": len(source.classes) if accuracy is not None else None, "images": images}


def typical(accuracy: Accuracy, number: int) -> int:
    """The row of a class that is predicted most confidently, correctly if any is correct."""
    rows = torch.nonzero(accuracy.truth == number)[:, 0]
    score = accuracy.confidence[rows] + 2 * accuracy.correct[rows]
    return int(rows[score.argmax()])


def viewed(source: Source, chosen: Sequence[int], model: Model) -> dict[int, Tensor]:
    """The chosen images as the model gets them, uint8 (3, H, W), without those that cannot be read."""
    view = evaluation_view(model.preprocessing, model.config.image_size)
    views = {}
    for index in chosen:
        try:
            views[index] = apply(source.fetch(index), view, np.random.default_rng(0))
        except BadImage:  # reported elsewhere
            continue
    return views


def predicted_labels(
    task: Task, model: Model, views: dict[int, Tensor]
) -> dict[int, list[tuple[str, float]]]:
    """The most probable labels of each image; none for tasks that predict something else."""
    if not views:
        return {}
    answers = task.answers(model, logits(model, torch.stack([*views.values()])), LABELS)
    return {i: list(getattr(answer, "top", ())) for i, answer in zip(views, answers, strict=True)}


def true_labels(source: Source, index: int) -> list[str]:
    numbers = source.labels.of(index) if source.multilabel else [source.labels[index]]
    return [source.classes[int(number)] for number in numbers[:LABELS]]


def evenly(values: Sequence[int], most: int) -> list[int]:
    """Up to `most` of the values, evenly spread."""
    count = min(most, len(values))
    return [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]


def resized(pixels: np.ndarray) -> np.ndarray:
    """Resize (H, W, 3) to a longer side of at most 192; very small images are enlarged with sharp pixels."""
    height, width = pixels.shape[:2]
    factor = SIDE / max(height, width)
    factor = factor if factor < 1 else max(1, int(factor))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    resampling = Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST
    return np.array(Image.fromarray(pixels).resize(size, resampling))


def jpeg(pixels: np.ndarray) -> str:
    """A JPEG in base64, for JSON and HTML."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85, optimize=True)
    return base64.b64encode(file.getvalue()).decode()
