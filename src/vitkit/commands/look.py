"""Predictions and attention maps of a model for one image, with rich display in notebooks."""

# K heads; H, W pixels; h, w grid of patches

import os
from base64 import b64encode
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.commands.shared import loaded
from vitkit.data.pictures import Picture, content_of
from vitkit.data.views import apply, normalise
from vitkit.errors import Error
from vitkit.inference.predict import evaluation_view, logits
from vitkit.inspection.gather import check_layer, gather
from vitkit.inspection.subject import check_class_maps, class_number, note_dense, transformer
from vitkit.models.card import pair
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, grid_of, in_patches
from vitkit.report.html import fill
from vitkit.report.overlay import in_blocks, overlay
from vitkit.report.terminal import predictions_text
from vitkit.tasks.task import task_of


@dataclass(frozen=True, eq=False)
class Look:
    """One image with the model's predictions and maps; a map is None if the model does not support it."""

    image: np.ndarray  # (H, W, 3) uint8, as the model sees it
    predictions: tuple[tuple[str, float], ...]  # top labels with their probabilities
    target: str  # class of the class map
    rollout: np.ndarray | None  # (h, w)
    heads: np.ndarray | None  # (K, h, w)
    class_map: np.ndarray | None  # (h, w)
    colours: np.ndarray | None  # (h, w, 3), in 0..1
    skipped: dict[str, str] = field(default_factory=dict)  # map -> reason why it is None

    def panels(self) -> list[tuple[str, np.ndarray]]:
        """Names and uint8 images (H, W, 3): the image, overlays of its maps, patch features as colours."""
        panels = [("image", self.image)]
        if self.rollout is not None:
            panels.append(("attention", overlay(self.image, self.rollout)))
        if self.class_map is not None:
            panels.append((self.target, overlay(self.image, self.class_map)))
        if self.colours is not None:
            panels.append(("features", in_blocks(self.colours, self.image.shape[:2])))
        return panels

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
        """The panels and predictions as HTML, rendered by a macro of look.html."""
        pictures = [(name, b64encode(png_bytes(picture)).decode()) for name, picture in self.panels()]
        return str(fill("look.html", macro, pictures, self.in_words()))

    def _repr_png_(self) -> bytes:
        return self.render("png")

    def render(self, kind: str) -> bytes:
        """The panels side by side as the bytes of a "png" or "svg" file."""
        from vitkit.report.figure_style import render  # matplotlib is slow to import
        from vitkit.report.figures import draw_pictures

        names, pictures = zip(*self.panels(), strict=True)
        captions = [self.in_words()] if self.predictions else []
        return render(draw_pictures([pictures], columns=names, captions=captions, side=2.0), kind)

    def save(self, path: str | os.PathLike) -> None:
        """Save as .png, .svg or .html, by the suffix of the path."""
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in (".png", ".svg", ".html"):
            raise Error(f"{path}: expected a file name ending in .png, .svg or .html")
        path.write_bytes(self.html("file").encode() if kind == ".html" else self.render(kind[1:]))


def inspect(
    model: Model | str | os.PathLike[str],
    image: Picture,
    *,
    target: int | str | None = None,
    layer: int = -1,
    image_size: int | tuple[int, int] | None = None,
) -> Look:
    """Predictions and attention maps of one image: a file, its bytes, a PIL image or uint8 pixels (H, W, 3).

    model: a model, a Run, a run folder, a model file or a published name; target: class of the class map by
    number or label (default: the predicted class); layer: layer of the attention heads; image_size: pixels or
    (height, width) (default: the model's).
    """
    whole = loaded(os.fspath(model), "auto") if isinstance(model, str | os.PathLike) else model
    vit = transformer(whole)
    check_class_maps(whole, () if target is None else (target,))
    size = vit.config.image_size if image_size is None else pair(image_size)
    grid_of(size, vit.config.stride)
    check_layer(vit, layer)
    requested = None if target is None else class_number(vit, target)
    view = model_view(vit, content_of(image), size)[None]
    predictions, best = top_predictions(vit, view)
    number = int(best[0]) if requested is None else requested
    gathered = gather(vit, normalized(vit, view), layer=layer, targets=[[number]])
    note_dense(whole, gathered.skipped)
    first = {name: values[0] for name, values in gathered.arrays.items()}
    maps = first.get("class_maps")
    return Look(
        image=upright(view)[0],
        predictions=predictions[0],
        target=label_of(vit, number) if maps is not None else "",
        rollout=first.get("rollout"),
        heads=first.get("head_maps"),
        class_map=None if maps is None else maps[0],
        colours=first.get("feature_colours"),
        skipped=gathered.skipped,
    )


def model_view(model: ViT, content: bytes | np.ndarray, size: tuple[int, int]) -> Tensor:
    """An image as the model's input, uint8 (3, H, W), without pixels outside of whole patches."""
    view = evaluation_view(model.preprocessing, size)
    pixels = apply(content, view, np.random.default_rng(0))  # evaluation views are not random
    return in_patches(pixels, model.config.stride)


def normalized(model: ViT, views: Tensor) -> Tensor:
    return normalise(views, model.preprocessing.mean, model.preprocessing.std)


def upright(views: Tensor) -> np.ndarray:
    """(B, 3, H, W) -> (B, H, W, 3), as numpy."""
    return views.permute(0, 2, 3, 1).contiguous().numpy()


def top_predictions(
    model: ViT, views: Tensor, top: int = 5
) -> tuple[list[tuple[tuple[str, float], ...]], np.ndarray]:
    """The top labels of each view and the number of the first; empty and -1 for a model without a head."""
    if model.head is None:
        return [()] * len(views), np.full(len(views), -1)
    values = logits(model, views)
    answers = task_of(model).answers(model, values, top)
    return [getattr(answer, "top", ()) for answer in answers], values.argmax(1).numpy()


def label_of(model: ViT, number: int) -> str:
    return model.labels[number] if model.labels else f"class {number}"


def png_bytes(picture: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
