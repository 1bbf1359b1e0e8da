"""A trained model for use, on its device: whatever place a verb or the service is given."""

from vitkit.models.variants import Model
from vitkit.training.runtime import choose
from vitkit.weights.load import load


def load_model(place: str, device: str) -> Model:
    """A model file, a run folder, a Hugging Face folder or a published name, on its device."""
    return load(place).to(choose(device, "fp32").device).eval()
