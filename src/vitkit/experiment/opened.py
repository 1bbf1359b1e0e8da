"""A trained model for use, on its device: whatever place a verb or the service is given."""

from collections.abc import Iterable
from pathlib import Path

from vitkit.models.variants import Model
from vitkit.training.runtime import choose
from vitkit.weights.load import load
from vitkit.weights.locate import WEIGHTS


def load_model(place: str, device: str) -> Model:
    """A model file, a run folder, a Hugging Face folder or a published name, on its device."""
    return load(place).to(choose(device, "fp32").device).eval()


def short_names(places: Iterable[str]) -> dict[str, str]:
    """How a figure names models: a file or a run folder by its own name, if no two have the same."""
    found = {}
    for place in places:
        path = Path(place)
        named = path.parent.name if path.name == WEIGHTS[0] else path.stem
        found[place] = path.name if path.is_dir() else named if path.is_file() else place
    return found if len(set(found.values())) == len(found) else {place: place for place in found}
