"""vitkit's own format: parameters under their own names, and a card that describes the model."""

from vitkit.models.variants import Config, skeleton
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.layout import SAME, Entry, Format, Layout, ModelSpec


def entries(config: Config) -> list[Entry]:
    return [Entry(name, (name,), SAME) for name in skeleton(config).state_dict()]


LAYOUT = Layout(
    name="vitkit",
    recognises=lambda shapes: False,  # only its card identifies it
    infer=lambda shapes, hints: ModelSpec(ViTConfig()),
    entries=entries,
    unsupported=lambda config: "",
    native=lambda config: config,
)
FORMAT = Format(
    name="vitkit",
    description="our own: carries sizes, labels, preprocessing, origin",
    layouts=(LAYOUT,),
    endings=(".safetensors",),
    default_ending=".safetensors",
    text=True,
    order=0,
)
