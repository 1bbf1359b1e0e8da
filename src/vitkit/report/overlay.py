"""Heat maps laid over photographs, with numpy and Pillow alone."""

from io import BytesIO

import numpy as np
from PIL import Image

from vitkit.errors import Error

# from dark to light in steps that look equal: 17 colours of the map "magma" (CC0)
SCALE = bytes.fromhex(
    "000004 0a0822 1d1147 36106b 51127c 6a1c81 832681 9c2e7f b73779 d0416f e75263 f56b5c fc8961 fea772"
    "fec488 fde2a3 fcfdbf"
)
COLOURS = np.frombuffer(SCALE, np.uint8).reshape(-1, 3)
BRIGHT = 0.97  # quantile of a map that is drawn as its greatest, the four corner patches left out of it
BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green, blue


def overlay(
    image: np.ndarray, heat: np.ndarray, *, strength: float = 0.65, quantile: float = BRIGHT
) -> np.ndarray:
    """A photograph uint8 (H, W, 3), in grey, under the colours of a map (h, w): uint8 (H, W, 3).

    The map is stretched to 0..1 and enlarged; `strength` is the share of its colours, from 0 (the grey
    photograph alone) to 1 (the map alone). What lies above the `quantile` of the map without its corners
    counts as 1, so that a few patches do not leave all others dark.
    """
    if not 0 <= strength <= 1:
        raise Error(f"strength must be from 0 to 1, not {strength}", code="request.value")
    check_image(image)
    grey = (image @ BRIGHTNESS)[..., None]
    return to_bytes((1 - strength) * grey + strength * coloured(enlarged(heat, image.shape[:2], quantile)))


def masked(image: np.ndarray, heat: np.ndarray, *, quantile: float = BRIGHT) -> np.ndarray:
    """A photograph that is as light in each place as the map is high there, as in Fig. 6."""
    check_image(image)
    return to_bytes(image * enlarged(heat, image.shape[:2], quantile)[..., None])


def in_blocks(values: np.ndarray, size: tuple[int, int], quantile: float = BRIGHT) -> np.ndarray:
    """A map (h, w), or colours (h, w, 3) in 0..1, as a picture of (H, W) in which every patch is a block."""
    picture = coloured(stretched(values, quantile)) if values.ndim == 2 else 255 * values
    return np.asarray(Image.fromarray(to_bytes(picture)).resize(size[::-1], Image.Resampling.NEAREST))


def similarity_picture(similarity: np.ndarray, *, about: int = 480) -> bytes:
    """Cosines (h, w, h, w) as a PNG of some `about` pixels: a map for each place, in its place."""
    h, w = similarity.shape[:2]
    zoom = max(1, round(about / (max(h, w) * (max(h, w) + 1))))
    gap = max(2, zoom * max(h, w) // 14)
    tiles = to_bytes(coloured((similarity + 1) / 2)).repeat(zoom, 2).repeat(zoom, 3)  # (h, w, H, W, 3)
    picture = np.zeros((h, zoom * h + gap, w, zoom * w + gap, 4), np.uint8)  # transparent between the maps
    picture[:, : zoom * h, :, : zoom * w, :3] = tiles.transpose(0, 2, 1, 3, 4)
    picture[:, : zoom * h, :, : zoom * w, 3] = 255
    file = BytesIO()
    whole = picture.reshape(h * (zoom * h + gap), w * (zoom * w + gap), 4)[:-gap, :-gap]
    Image.fromarray(whole).save(file, "PNG", optimize=True)
    return file.getvalue()


def coloured(values: np.ndarray) -> np.ndarray:
    """Numbers in 0..1, of any shape, as colours in 0..255 from dark to light."""
    place = np.clip(values, 0, 1) * (len(COLOURS) - 1)
    steps = np.arange(len(COLOURS))
    return np.stack([np.interp(place, steps, channel) for channel in COLOURS.T], -1).astype(np.float32)


def enlarged(heat: np.ndarray, size: tuple[int, int], quantile: float = BRIGHT) -> np.ndarray:
    """A map (h, w) stretched to 0..1 and brought to (H, W) by bicubic interpolation, still in 0..1."""
    heat = np.asarray(heat, np.float32)
    if heat.ndim != 2 or not heat.size:
        raise Error(f"a heat map has shape (h, w), not {heat.shape}", code="request.value")
    picture = Image.fromarray(stretched(heat, quantile)).resize(size[::-1], Image.Resampling.BICUBIC)
    return np.clip(np.asarray(picture), 0, 1)


def stretched(values: np.ndarray, quantile: float = 1.0) -> np.ndarray:
    """The least is 0, and 1 is the greatest or what lies above a quantile; where all are equal all are 0."""
    if not np.isfinite(values).all():
        raise Error(
            "a map with values that are not finite cannot be drawn: check the model's weights and the image",
            code="inspection.unsupported",
        )
    low, high = values.min(), np.quantile(values if quantile == 1 else without_corners(values), quantile)
    high = high if high > low else values.max()  # nearly all of them are the least
    return np.clip((values - low) / (high - low), 0, 1) if high > low else np.zeros_like(values)


def without_corners(values: np.ndarray) -> np.ndarray:
    """A map's numbers but those of its four corner patches, where attention often goes for no reason of the
    picture; all of them where there is little else."""
    if values.ndim != 2 or min(values.shape) < 3:
        return values.ravel()
    inside = np.ones(values.shape, bool)
    inside[[0, 0, -1, -1], [0, -1, 0, -1]] = False
    return values[inside]


def to_bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(np.round(values), 0, 255).astype(np.uint8)


def check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise Error(
            f"an image of {image.dtype} {image.shape}; give uint8 (height, width, 3), as RGB",
            code="request.value",
        )
