"""A trained model for use: from a model file, a run folder or a published name, on its device."""

from pathlib import Path

from vitkit.experiment.run import MODEL
from vitkit.models.variants import Model
from vitkit.training.runtime import choose
from vitkit.weights.load import load


def model_place(place: str) -> str | Path:
    """The model file of a run folder; anything else is its own place."""
    inside = Path(place) / MODEL
    return inside if inside.exists() else place


def load_model(place: str, device: str) -> Model:
    """A model file, a run folder or a published name, on its device."""
    return load(model_place(place)).to(choose(device, "fp32").device).eval()
