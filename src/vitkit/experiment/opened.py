"""A trained model for use, on its device: whatever place a verb or the service is given."""

from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.options import parse_view
from vitkit.training.runtime import choose
from vitkit.weights.load import load


def load_model(place: str, device: str, view: str = "model") -> Model:
    """A model file, a run folder, a Hugging Face folder or a published name, on its device.

    view: how images are brought to its size, where that is not to be as the model's own card has it.
    """
    model = load(place).to(choose(device, "fp32").device).eval()
    model.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    return model
