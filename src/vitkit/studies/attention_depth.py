"""How far the layers of a model attend (Fig. 7, 11), as shares of the distance of uniform attention."""

import numpy as np

from vitkit.data.loader import evaluation_batches
from vitkit.data.sources.source import Source
from vitkit.data.splits import subset
from vitkit.data.views import normalise
from vitkit.inference.predict import evaluation_view
from vitkit.inspection.attention import attention_distance
from vitkit.inspection.gather import uniform_distance
from vitkit.inspection.subject import transformer
from vitkit.models.variants import Model
from vitkit.studies.folder import ATTENTION

IMAGES = 128  # as many as in the paper


def attention_depth(model: Model, source: Source, *, batch: int = 32) -> dict[str, float]:
    """The columns for a model, on random images of a source; the model is on the device that computes."""
    images = subset(source, count=IMAGES) if len(source) > IMAGES else source
    vit = transformer(model)
    config, device = vit.config, next(vit.parameters()).device
    view, total, count = evaluation_view(vit.preprocessing, config.image_size), np.zeros(()), 0
    for part in evaluation_batches(images, view, batch):
        pixels = normalise(part["image"], vit.preprocessing.mean, vit.preprocessing.std).to(device)
        total = total + len(pixels) * attention_distance(vit, pixels, batch=batch).astype(np.float64)
        count += len(pixels)
    uniform = uniform_distance(vit, config.grid)
    assert uniform, "axial attention has no uniform distance"
    return profile((total / count).mean(1) / uniform)


def profile(layers: np.ndarray) -> dict[str, float]:
    """The first and the last layer, and the growth from the first to the last by a line through all."""
    depth = np.linspace(0, 1, len(layers))
    growth = np.polyfit(depth, layers, 1)[0] if len(layers) > 1 else 0.0
    return dict(zip(ATTENTION, map(float, (layers[0], layers[-1], growth)), strict=True))
