"""Heat map overlays on images, with numpy and Pillow only."""

from io import BytesIO

import numpy as np
from PIL import Image

from vitkit.errors import Error

# 17 colours of the perceptually uniform colour map "magma" (CC0), from dark to light
SCALE = bytes.fromhex(
    "000004 0a0822 1d1147 36106b 51127c 6a1c81 832681 9c2e7f b73779 d0416f e75263 f56b5c fc8961 fea772"
    "fec488 fde2a3 fcfdbf"
)
COLOURS = np.frombuffer(SCALE, np.uint8).reshape(-1, 3)
BRIGHT = 0.97  # quantile of a map, without its four corner patches, that is drawn at full brightness
BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)  # luma weights of red, green, blue


def overlay(
    image: np.ndarray, heat: np.ndarray, *, strength: float = 0.65, quantile: float = BRIGHT
) -> np.ndarray:
    """Blend a heat map (h, w) over a greyscale version of an image uint8 (H, W, 3): uint8 (H, W, 3).

    The map is normalized to 0..1 and upsampled. `strength` is its opacity, from 0 (image only) to 1 (map
    only). Values above the `quantile` of the map without its corners count as 1, so that a few very bright
    patches do not make all others dark.
    """
    if not 0 <= strength <= 1:
        raise Error(f"strength must be from 0 to 1, not {strength}", code="request.value")
    check_image(image)
    grey = (image @ BRIGHTNESS)[..., None]
    return to_bytes((1 - strength) * grey + strength * coloured(enlarged(heat, image.shape[:2], quantile)))


def masked(image: np.ndarray, heat: np.ndarray, *, quantile: float = BRIGHT) -> np.ndarray:
    """An image whose brightness is multiplied by the heat map, as in Fig. 6."""
    check_image(image)
    return to_bytes(image * enlarged(heat, image.shape[:2], quantile)[..., None])


def in_blocks(values: np.ndarray, size: tuple[int, int], quantile: float = BRIGHT) -> np.ndarray:
    """A map (h, w), or colours (h, w, 3) in 0..1, as an image of (H, W) in which every patch is a block."""
    picture = coloured(stretched(values, quantile)) if values.ndim == 2 else 255 * values
    return np.asarray(Image.fromarray(to_bytes(picture)).resize(size[::-1], Image.Resampling.NEAREST))


def similarity_picture(similarity: np.ndarray, *, about: int = 480) -> bytes:
    """Cosine similarities (h, w, h, w) as a PNG of about `about` pixels: a grid with one map per position."""
    h, w = similarity.shape[:2]
    zoom = max(1, round(about / (max(h, w) * (max(h, w) + 1))))
    gap = max(2, zoom * max(h, w) // 14)
    tiles = to_bytes(coloured((similarity + 1) / 2)).repeat(zoom, 2).repeat(zoom, 3)  # (h, w, H, W, 3)
    picture = np.zeros((h, zoom * h + gap, w, zoom * w + gap, 4), np.uint8)  # transparent between the maps
    picture[:, : zoom * h, :, : zoom * w, :3] = tiles.transpose(0, 2, 1, 3, 4)
    picture[:, : zoom * h, :, : zoom * w, 3] = 255
    file = BytesIO()
    pixels = picture.reshape(h * (zoom * h + gap), w * (zoom * w + gap), 4)[:-gap, :-gap]
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()


def coloured(values: np.ndarray) -> np.ndarray:
    """Values in 0..1 of any shape as colours in 0..255, from dark to light."""
    positions = np.clip(values, 0, 1) * (len(COLOURS) - 1)
    steps = np.arange(len(COLOURS))
    return np.stack([np.interp(positions, steps, channel) for channel in COLOURS.T], -1).astype(np.float32)


def enlarged(heat: np.ndarray, size: tuple[int, int], quantile: float = BRIGHT) -> np.ndarray:
    """A map (h, w) normalized to 0..1 and upsampled to (H, W) by bicubic interpolation, clipped to 0..1."""
    heat = np.asarray(heat, np.float32)
    if heat.ndim != 2 or not heat.size:
        raise Error(f"a heat map must have the shape (h, w), not {heat.shape}", code="request.value")
    picture = Image.fromarray(stretched(heat, quantile)).resize(size[::-1], Image.Resampling.BICUBIC)
    return np.clip(np.asarray(picture), 0, 1)


def stretched(values: np.ndarray, quantile: float = 1.0) -> np.ndarray:
    """Normalize values to 0..1 from the minimum to the quantile; all zeros if they are equal."""
    if not np.isfinite(values).all():
        raise Error(
            "the map contains values that are not finite; check the model's weights and the image",
            code="inspection.unsupported",
        )
    low, high = values.min(), np.quantile(values if quantile == 1 else without_corners(values), quantile)
    high = high if high > low else values.max()  # almost all values are the minimum
    return np.clip((values - low) / (high - low), 0, 1) if high > low else np.zeros_like(values)


def without_corners(values: np.ndarray) -> np.ndarray:
    """The values of a map without its four corner patches, which often attract attention regardless of the
    image; all values if the map is small."""
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
            f"expected an RGB image uint8 (height, width, 3), got {image.dtype} {image.shape}",
            code="request.value",
        )
