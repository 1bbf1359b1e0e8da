"""Small pictures of predictions beside the truth, and of training images with their targets, for reports."""

# H, W pixels of an image, h, w of its picture; N boxes

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vitkit.metrics.overlaps import box_overlap
from vitkit.report.target_overlay import background, class_colour, filled, mask_over

SIDE = 360  # pixels of the longer side of a picture
EDGE = 5  # pixels of an outline, with one dark pixel at each side
DASH, GAP = 9, 7  # pixels of the outline of a wrong box
SAME = 0.6  # IoU of boxes that cover each other in a picture
CLASSES = 40  # of a legend
Pair = tuple[np.ndarray, np.ndarray]


def picture_size(height: int, width: int, side: int = SIDE) -> tuple[int, int]:
    """Height and width of the picture of an image; very small images are enlarged by a whole number."""
    factor = side / max(height, width)
    factor = factor if factor < 1 else max(1, int(factor))
    return max(1, round(height * factor)), max(1, round(width * factor))


def resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """An image (H, W, 3) or a mask (H, W) at another size; the numbers of a mask are not mixed."""
    smaller = pixels.ndim == 3 and size[0] < pixels.shape[0]
    method = Image.Resampling.LANCZOS if smaller else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], method))


def mask_pair(pixels: np.ndarray, truth: np.ndarray, predicted: np.ndarray, clear: int = -1) -> Pair:
    """The true and the predicted class mask (H, W) over an image; ignored pixels are striped in the first."""
    size = picture_size(pixels.shape[0], pixels.shape[1])
    small = resized(pixels, size)
    first, second = (mask_over(small, resized(mask, size), clear) for mask in (truth, predicted))
    return first, second


def box_pair(pixels: np.ndarray, truth: Mapping[str, Any], predicted: Mapping[str, Any]) -> Pair:
    """The true and the predicted boxes over an image.

    Each has "boxes" (N, 4) in pixels of the image, "labels" (N,), "right" (N,), and of instance segmentation
    "masks" (N, H, W): missed objects and false detections have dashed outlines.
    """
    size = picture_size(pixels.shape[0], pixels.shape[1])
    small = resized(pixels, size)
    ratio = np.array([size[1] / pixels.shape[1], size[0] / pixels.shape[0]] * 2)
    pictures = []
    for part in (truth, predicted):
        masks = part.get("masks")
        under = small if masks is None else with_masks(small, masks, part["labels"])
        pictures.append(outlined(under, part["boxes"] * ratio, part["labels"], part["right"]))
    return pictures[0], pictures[1]


def with_masks(small: np.ndarray, masks: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The masks (N, H, W) of objects over the picture (h, w, 3) of their image, small ones on top."""
    order = np.argsort(-masks.sum((1, 2)), kind="stable")
    size = (small.shape[0], small.shape[1])
    scaled = np.array([resized(masks[row], size) for row in order], bool).reshape(-1, *size)
    return filled(small, scaled, labels[order])


def outlined(pixels: np.ndarray, boxes: np.ndarray, labels: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Boxes in the colours of their classes, with dark edges that separate them from any background.

    Large ones are drawn first, wrong ones before right ones. A wrong one that nearly covers a right one, such
    as that of another class for the same object, is drawn inside of it.
    """
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    height, width = pixels.shape[:2]
    near = box_overlap(boxes, boxes[right], np.zeros(int(right.sum()), bool)).max(1, initial=0) > SAME
    inset = EDGE * (near & ~right)[:, None] * np.array([1, 1, -1, -1])
    for row in np.lexsort((-areas, right)):
        x0, y0, x1, y1 = (round(float(value)) for value in boxes[row] + inset[row])
        frame = (max(0, x0), max(0, y0), min(x1, width) - 1, min(y1, height) - 1)
        outline(draw, frame, class_colour(int(labels[row])), dashed=not right[row])
    return np.array(picture)


def outline(draw: Any, frame: tuple[int, ...], colour: tuple[int, int, int], *, dashed: bool) -> None:
    """A line between two dark ones, inside of a frame whose edges are inclusive."""
    x0, y0, x1, y1 = frame
    if x1 - x0 < 2 * EDGE or y1 - y0 < 2 * EDGE:  # too small for an inside
        draw.rectangle((x0, y0, max(x0, x1), max(y0, y1)), fill=colour)
        return
    draw.rectangle(frame, outline=(0, 0, 0), width=EDGE)
    for x in range(x0 + 1, x1, DASH + GAP) if dashed else (x0 + 1,):
        end = min(x + DASH, x1) - 1 if dashed else x1 - 1
        draw.rectangle((x, y0 + 1, end, y0 + EDGE - 2), fill=colour)
        draw.rectangle((x, y1 - EDGE + 2, end, y1 - 1), fill=colour)
    for y in range(y0 + 1, y1, DASH + GAP) if dashed else (y0 + 1,):
        end = min(y + DASH, y1) - 1 if dashed else y1 - 1
        draw.rectangle((x0 + 1, y, x0 + EDGE - 2, end), fill=colour)
        draw.rectangle((x1 - EDGE + 2, y, x1 - 1, end), fill=colour)


def training_picture(pixels: np.ndarray, targets: Mapping[str, np.ndarray], side: int) -> np.ndarray:
    """A training image uint8 (h, w, 3) with its targets, as in a batch.

    These are "mask", or "boxes" and "classes", and of instance segmentation also "segments".
    """
    size = picture_size(pixels.shape[0], pixels.shape[1], side)
    small = resized(pixels, size)
    if "mask" in targets:
        return mask_over(small, resized(targets["mask"], size))
    real = targets["classes"] >= 0
    if "segments" in targets:
        rows = np.flatnonzero(real)
        masks = targets["segments"] == rows[:, None, None]
        small = with_masks(small, masks, targets["classes"][rows])
    ratio = np.array([size[1] / pixels.shape[1], size[0] / pixels.shape[0]] * 2)
    return outlined(small, targets["boxes"][real] * ratio, targets["classes"][real], real[real])


def legend(names: Sequence[str]) -> list[tuple[str, str]]:
    """The classes with their colours, as "#rrggbb"."""
    shown = [k for k in range(len(names)) if k != background(names)][:CLASSES]
    return [(names[k], "#{:02x}{:02x}{:02x}".format(*class_colour(k))) for k in shown]


def jpeg(pixels: np.ndarray) -> str:
    """A JPEG in base64, for JSON and HTML."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=84, optimize=True)
    return base64.b64encode(file.getvalue()).decode()
