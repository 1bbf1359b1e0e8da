"""A trained model for use, on its device: whatever place a verb or the service is given."""

from collections.abc import Iterable
from pathlib import Path

from vitkit.models.card import with_view
from vitkit.models.variants import Model
from vitkit.options import parse_view
from vitkit.training.runtime import choose
from vitkit.weights.load import load
from vitkit.weights.locate import WEIGHTS


def load_model(place: str, device: str, view: str = "model") -> Model:
    """A model file, a run folder, a Hugging Face folder or a published name, on its device.

    view: how images are brought to its size, where that is not to be as the model's own card has it.
    """
    model = load(place).to(choose(device, "fp32").device).eval()
    model.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    return model


def short_names(places: Iterable[str]) -> dict[str, str]:
    """How a figure names models: a file or a run folder by its own name, if no two have the same."""
    found = {}
    for place in places:
        path = Path(place)
        named = path.parent.name if path.name == WEIGHTS[0] else path.stem
        found[place] = path.name if path.is_dir() else named if path.is_file() else place
    return found if len(set(found.values())) == len(found) else {place: place for place in found}
