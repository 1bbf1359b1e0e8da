"""What a model sees in one picture, as a value that shows itself in a notebook."""

# K heads; H, W pixels; h, w grid of patches

import os
from base64 import b64encode
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.data.pictures import Picture, content_of
from vitkit.data.views import apply, normalise
from vitkit.errors import Error
from vitkit.inference.predict import evaluation_view, logits
from vitkit.inspection.gather import check_layer, gather
from vitkit.inspection.subject import class_number, transformer
from vitkit.models.card import pair
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, grid_of, in_patches
from vitkit.report.html import fill
from vitkit.report.overlay import in_blocks, overlay
from vitkit.report.terminal import predictions_text
from vitkit.tasks.task import task_of


@dataclass(frozen=True, eq=False)
class Look:
    """One picture, what the model says of it, and where it looks; None where a model has no such thing."""

    image: np.ndarray  # (H, W, 3) uint8, as the model sees it
    predictions: tuple[tuple[str, float], ...]  # the likeliest labels and their probabilities
    target: str  # the class that the class map is for
    rollout: np.ndarray | None  # (h, w)
    heads: np.ndarray | None  # (K, h, w)
    class_map: np.ndarray | None  # (h, w)
    colours: np.ndarray | None  # (h, w, 3), in 0..1
    skipped: dict[str, str] = field(default_factory=dict)  # why there is none

    def panels(self) -> list[tuple[str, np.ndarray]]:
        """Names and pictures (H, W, 3) uint8: the image, its maps laid over it, its patches in colour."""
        found = [("image", self.image)]
        if self.rollout is not None:
            found.append(("attention", overlay(self.image, self.rollout)))
        if self.class_map is not None:
            found.append((self.target, overlay(self.image, self.class_map)))
        if self.colours is not None:
            found.append(("features", in_blocks(self.colours, self.image.shape[:2])))
        return found

    def in_words(self) -> str:
        return predictions_text(self.predictions)

    def __repr__(self) -> str:
        height, width = self.image.shape[:2]
        arrays = [name for name, value in vars(self).items() if isinstance(value, np.ndarray)]
        return (
            f"Look({self.in_words() or 'no classes'}; {width}x{height} pixels; arrays: {', '.join(arrays)})"
        )

    def _repr_html_(self) -> str:
        return self.html("panels")

    def html(self, macro: str) -> str:
        """The panels and the predictions by a macro of look.html."""
        pictures = [(name, b64encode(encoded(picture)).decode()) for name, picture in self.panels()]
        return str(fill("look.html", macro, pictures, self.in_words()))

    def _repr_png_(self) -> bytes:
        return self.drawn("png")

    def drawn(self, kind: str) -> bytes:
        """The panels side by side, as a file of kind "png" or "svg"."""
        from vitkit.report.figures import draw_pictures, render  # matplotlib is slow to import

        names, pictures = zip(*self.panels(), strict=True)
        words = [self.in_words()] if self.predictions else []
        return render(draw_pictures([pictures], columns=names, captions=words, side=2.0), kind)

    def save(self, path: str | os.PathLike) -> None:
        """As .png, .svg or .html, by the name."""
        place = Path(path)
        kind = place.suffix.lower()
        if kind not in (".png", ".svg", ".html"):
            raise Error(f"{place}: give a name that ends in .png, .svg or .html")
        place.write_bytes(self.html("file").encode() if kind == ".html" else self.drawn(kind[1:]))


def inspect(
    model: Model,
    image: Picture,
    *,
    target: int | str | None = None,
    layer: int = -1,
    image_size: int | tuple[int, int] | None = None,
) -> Look:
    """What a model sees in one picture: a file, its bytes, a PIL image or pixels uint8 (H, W, 3).

    target: a class by number or label, the likeliest if not given; layer: whose heads; image_size: pixels, or
    (height, width), where it is not the model's own.
    """
    vit = transformer(model)
    size = vit.config.image_size if image_size is None else pair(image_size)
    grid_of(size, vit.config.stride)
    check_layer(vit, layer)
    chosen = None if target is None else class_number(vit, target)
    view = seen(vit, content_of(image), size)[None]
    predictions, best = said(vit, view)
    number = int(best[0]) if chosen is None else chosen
    found = gather(vit, ready(vit, view), layer=layer, targets=[[number]])
    first = {name: values[0] for name, values in found.arrays.items()}
    maps = first.get("class_maps")
    return Look(
        image=upright(view)[0],
        predictions=predictions[0],
        target=label_of(vit, number) if maps is not None else "",
        rollout=first.get("rollout"),
        heads=first.get("head_maps"),
        class_map=None if maps is None else maps[0],
        colours=first.get("feature_colours"),
        skipped=found.skipped,
    )


def seen(model: ViT, content: bytes | np.ndarray, size: tuple[int, int]) -> Tensor:
    """A picture as the model sees it, uint8 (3, H, W): without pixels that lie in no whole patch."""
    view = evaluation_view(model.preprocessing, size)
    pixels = apply(content, view, np.random.default_rng(0))  # such a view chooses nothing
    return in_patches(pixels, model.config.stride)


def ready(model: ViT, views: Tensor) -> Tensor:
    return normalise(views, model.preprocessing.mean, model.preprocessing.std)


def upright(views: Tensor) -> np.ndarray:
    """uint8 (B, 3, H, W) to pictures (B, H, W, 3)."""
    return views.permute(0, 2, 3, 1).contiguous().numpy()


def said(model: ViT, views: Tensor, top: int = 5) -> tuple[list[tuple[tuple[str, float], ...]], np.ndarray]:
    """The likeliest labels of each view, and the number of the likeliest; nothing where there is no head."""
    if model.head is None:
        return [()] * len(views), np.full(len(views), -1)
    values = logits(model, views)
    answers = task_of(model).answers(model, values, top)
    return [getattr(answer, "top", ()) for answer in answers], values.argmax(1).numpy()


def label_of(model: ViT, number: int) -> str:
    return model.labels[number] if model.labels else f"class {number}"


def encoded(picture: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
