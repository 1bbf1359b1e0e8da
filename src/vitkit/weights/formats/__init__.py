"""Published names of parameters and ours: pure tables, one file a library. Touches no disk."""

from vitkit.weights.formats import bit, huggingface, official, timm, torchvision
from vitkit.weights.formats.layout import Layout

LAYOUTS: tuple[Layout, ...] = (
    official.LAYOUT,
    bit.OFFICIAL,
    bit.BIG_VISION,
    timm.LAYOUT,
    bit.TIMM,
    huggingface.LAYOUT,
    torchvision.LAYOUT,
)
