"""Boxes with labels, and class masks, drawn over the pixels of an image."""

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitkit.errors import Error
from vitkit.report.overlay import check_image
from vitkit.report.terminal import printable

IGNORED = 255  # number of pixels of a mask without a class
BACKGROUND = ("background", "_background_")  # names of the class for everything else
FIRST = (  # colours that are told apart best, on photographs too
    "e6194b", "3cb44b", "ffe119", "4363d8", "f58231", "911eb4", "46f0f0",
    "f032e6", "bcf60c", "fabebe", "008080", "e6beff", "9a6324", "fffac8",
    "800000", "aaffc3", "808000", "ffd8b1", "000075", "a9a9a9",
)  # fmt: skip
GOLDEN = 0.61803398875  # of the colour circle, between one further colour and the next
LONGEST = 28  # characters of a name in a picture
OPACITY = 0.55  # of a mask


def class_colour(number: int) -> tuple[int, int, int]:
    """The colour of a class, the same in all pictures: 20 chosen ones, then parts of the circle."""
    if number < len(FIRST):
        chosen = bytes.fromhex(FIRST[number])
        return chosen[0], chosen[1], chosen[2]
    rank = number - len(FIRST)
    value, saturation = (0.95, 0.65, 0.8)[rank % 3], (0.75, 0.9, 0.5)[rank // 3 % 3]
    parts = colorsys.hsv_to_rgb(rank * GOLDEN % 1, saturation, value)
    red, green, blue = (round(255 * part) for part in parts)
    return red, green, blue


def text_colour(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """Black or white, whichever is legible on a colour."""
    red, green, blue = colour
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)


def font_of(height: int, width: int) -> Any:
    """A font that fits the size of a picture."""
    return ImageFont.load_default(max(10, min(28, round(max(height, width) / 40))))


def label_text(names: Sequence[str], label: int, score: float | None = None) -> str:
    """The name of a class, shortened, and a score in per cent."""
    name = printable(names[label]) if 0 <= label < len(names) else str(label)
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return name if score is None else f"{name} {100 * score:.0f} %"


def draw_boxes(
    pixels: np.ndarray, boxes: np.ndarray, labels: np.ndarray, names: Sequence[str],
    scores: np.ndarray | None = None, masks: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Boxes (N, 4) xyxy with the names of their classes over an image uint8 (H, W, 3): uint8 (H, W, 3).

    scores: (N,) from 0 to 1, written beside the names. masks: (N, H, W) bool, filled in the colours of the
    boxes. Small boxes are drawn last, so that large ones do not cover them.
    """
    check_image(pixels)
    if len(boxes) != len(labels) or (scores is not None and len(scores) != len(boxes)):
        raise Error(f"{len(boxes)} boxes with {len(labels)} labels; each box needs one", code="request.value")
    height, width = pixels.shape[:2]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) if len(boxes) else np.zeros(0)
    order = np.argsort(-areas, kind="stable").tolist()
    picture = Image.fromarray(pixels if masks is None else filled(pixels, masks[order], labels[order]))
    draw, font = ImageDraw.Draw(picture), font_of(height, width)
    line = max(1, round(max(height, width) / 300))
    for i in order:
        colour = class_colour(int(labels[i]))
        x0, y0, x1, y1 = (float(value) for value in boxes[i])
        right, bottom = max(x0, min(x1, width) - 1), max(y0, min(y1, height) - 1)  # edges are exclusive
        draw.rectangle((x0, y0, right, bottom), outline=colour, width=line)
        text = label_text(names, int(labels[i]), None if scores is None else float(scores[i]))
        write_label(draw, (x0, y0), text, colour, font, width)
    return np.array(picture)


def filled(pixels: np.ndarray, masks: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Masks (N, H, W) in the colours of their classes over an image uint8 (H, W, 3), the last on top."""
    drawn = pixels.astype(np.float32)
    for mask, label in zip(masks, labels.tolist(), strict=True):
        drawn[mask] = (1 - OPACITY) * drawn[mask] + OPACITY * np.array(class_colour(label))
    return drawn.round().astype(np.uint8)


def write_label(
    draw: Any, corner: tuple[float, float], text: str, colour: tuple[int, int, int], font: Any, width: int
) -> None:
    """Write a text on its colour above a corner, or below it at the upper edge of the picture."""
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    wide, high = right - left + 4, bottom - top + 4
    x = max(0.0, min(corner[0], width - wide))
    y = corner[1] - high if corner[1] >= high else corner[1]
    draw.rectangle((x, y, x + wide, y + high), fill=colour)
    draw.text((x + 2 - left, y + 2 - top), text, fill=text_colour(colour), font=font)


def background(names: Sequence[str]) -> int:
    """The number of the class for everything else, which pictures leave clear; -1 if there is none."""
    return next((k for k, label in enumerate(names) if label.casefold() in BACKGROUND), -1)


def mask_over(pixels: np.ndarray, mask: np.ndarray, clear: int = -1) -> np.ndarray:
    """A class mask (H, W) over an image uint8 (H, W, 3); ignored pixels are dark, with stripes.

    clear: the class that is left as it is, such as the background.
    """
    check_image(pixels)
    if mask.shape != pixels.shape[:2]:
        raise Error(f"a mask of {mask.shape} over an image of {pixels.shape[:2]}", code="request.value")
    present = np.flatnonzero(np.bincount(mask.ravel(), minlength=IGNORED + 1)).tolist()
    table = np.zeros((IGNORED + 1, 3), np.float32)
    for number in present:
        table[number] = class_colour(number) if number != IGNORED else (0, 0, 0)
    drawn = (1 - OPACITY) * pixels + OPACITY * table[mask]
    drawn[mask == clear] = pixels[mask == clear]
    diagonals = np.arange(mask.shape[0])[:, None] + np.arange(mask.shape[1])
    drawn[(mask == IGNORED) & (diagonals % 12 < 2)] = (160, 160, 160)
    return drawn.round().astype(np.uint8)


def draw_mask(pixels: np.ndarray, mask: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """A class mask (H, W) over an image uint8 (H, W, 3), with a legend of its classes below: uint8.

    The picture is (H + legend, W, 3). Ignored pixels are dark, with stripes; a background class is clear.
    """
    clear = background(names)
    picture = mask_over(pixels, mask, clear)
    present = np.flatnonzero(np.bincount(mask.ravel(), minlength=IGNORED + 1)).tolist()
    entries = [(class_colour(n), label_text(names, n)) for n in present if n not in (IGNORED, clear)]
    entries += [((40, 40, 40), "ignored")] if IGNORED in present else []
    return np.concatenate([picture, legend(entries, picture.shape[1], picture.shape[0])])


def legend(entries: Sequence[tuple[tuple[int, int, int], str]], width: int, height: int) -> np.ndarray:
    """The names of classes on their colours, in as many rows as fit a width."""
    font = font_of(height, width)
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    line = font.size + 8 if hasattr(font, "size") else 19
    places: list[tuple[int, int, int, tuple[int, int, int], str]] = []
    x, y = 4, 4
    for colour, text in entries:
        wide = round(measure.textlength(text, font=font)) + 10
        if x > 4 and x + wide > width:
            x, y = 4, y + line
        places.append((x, y, wide, colour, text))
        x += wide + 4
    picture = Image.new("RGB", (width, y + line), (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    for left, top, wide, colour, text in places:
        draw.rectangle((left, top, left + wide, top + line - 4), fill=colour)
        draw.text((left + 5, top + 1), text, fill=text_colour(colour), font=font)
    return np.array(picture)
