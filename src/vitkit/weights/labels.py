"""The thousand classes of ImageNet in their official order, which is that of their WordNet numbers."""

from collections import Counter
from importlib.resources import files


def imagenet_synsets() -> tuple[tuple[str, str], ...]:
    """(WordNet number, name) of each class."""
    text = files("vitkit.weights").joinpath("imagenet1k.tsv").read_text("utf-8")
    return tuple((number, name) for number, _, name in (line.partition("\t") for line in text.splitlines()))


def imagenet_labels() -> tuple[str, ...]:
    """The names; two classes that share one (there are two cranes) carry their number too."""
    rows = imagenet_synsets()
    shared = Counter(name for _, name in rows)
    return tuple(f"{name} ({number})" if shared[name] > 1 else name for number, name in rows)
