"""The page of samples that `vitkit doctor` writes for data with masks or boxes."""

import base64
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.data.decode import BadImage, decode
from vitkit.data.doctor import Report, ordered
from vitkit.data.sources.source import Source
from vitkit.data.target_checks import read_checked
from vitkit.data.targets import Target
from vitkit.errors import Error
from vitkit.io.files import replace_file
from vitkit.report.html import encoded
from vitkit.report.target_overlay import draw_boxes, draw_mask
from vitkit.report.target_page import Sample, TargetPage

SAMPLES, LONGEST = 12, 640  # images on the page, and the longer side of one
PAGE = "targets.html"


def write_samples(data: str, splits: Mapping[str, Source], report: Report, out: Path | None) -> Path:
    """Write the page of samples into the folder `out`; its path is returned."""
    folder = out or Path("runs/doctor") / (Path(data).stem or "data")
    facts = report.to_json()
    samples = [sample for split, source, index in chosen(splits) if (sample := drawn(split, source, index))]
    document = TargetPage(data, samples, facts["targets"], facts["findings"]).render()
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / PAGE, lambda beside: beside.write_bytes(encoded(document)))
    return folder / PAGE


def chosen(splits: Mapping[str, Source]) -> list[tuple[str, Source, int]]:
    """Images of all splits, the same for the same data: half of them of the first split."""
    parts = [(split, source) for split, source in ordered(splits).items() if source.targets and len(source)]
    result: list[tuple[str, Source, int]] = []
    for n, (split, source) in enumerate(parts):
        left = SAMPLES - len(result)
        count = left if n == len(parts) - 1 else max(1, left // 2)
        rows = np.random.default_rng(0).choice(len(source), min(count, len(source)), replace=False)
        result += [(split, source, int(row)) for row in np.sort(rows)]
    return result[:SAMPLES]


def drawn(split: str, source: Source, index: int) -> Sample | None:
    """An image with its masks or boxes; None if either cannot be read, which is a finding."""
    try:
        content = source.fetch(index)
        pixels = decode(content) if isinstance(content, bytes) else np.ascontiguousarray(content)
        target, _ = read_checked(source, index)
        picture, caption = overlaid(pixels, target, source.classes)
    except (BadImage, Error, OSError):
        return None
    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=88)
    return Sample(
        base64.b64encode(file.getvalue()).decode(), source.keys[index], split, f"{split}, {caption}"
    )


def overlaid(pixels: np.ndarray, target: Target, names: tuple[str, ...]) -> tuple[np.ndarray, str]:
    """The picture, made smaller if it is large, with its annotations; and what they are."""
    height, width = pixels.shape[:2]
    scale = min(1.0, LONGEST / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))
    if target.mask is not None:
        mask = resized(target.mask, size)
        classes = len(set(np.unique(mask).tolist()) - {255})
        return draw_mask(small, mask, names), f"{classes} {'class' if classes == 1 else 'classes'}"
    ratio = np.array([size[0] / width, size[1] / height] * 2)
    masks: Any = None
    if target.instances is not None:
        masks = np.array([resized(mask, size) for mask in target.instances], bool).reshape(
            -1, *small.shape[:2]
        )
    count = len(target.boxes)
    picture = draw_boxes(small, target.boxes * ratio, target.labels, names, masks=masks)
    return picture, f"{count} {'object' if count == 1 else 'objects'}"


def resized(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A mask (H, W) at another size, given as width and height; numbers are not mixed."""
    picture = Image.fromarray(mask.astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
    return np.asarray(picture).astype(mask.dtype)
