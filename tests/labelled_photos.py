"""A small classifier with photos of two of its classes, for tests of commands that answer for images."""

from pathlib import Path

import numpy as np
import torch
from conftest import SMALL, randomise
from PIL import Image

import vitkit
from vitkit.models.variants import build


def save_model_and_photos(folder: Path) -> Path:
    """Write m.safetensors, a model with large logits, and photos/<class>/*.png; returns the folder."""
    rng = np.random.default_rng(0)
    model = randomise(build("ViT-Ti/8", **SMALL)).eval()
    model.labels = tuple(f"class {n}" for n in range(model.config.classes))
    with torch.no_grad():
        model.head.weight.mul_(20)
    vitkit.save(model, folder / "m.safetensors")
    for n in range(6):
        path = folder / "photos" / f"class {n % 2}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (60 + n, 50, 3), dtype=np.uint8)).save(path)
    return folder


def paths(folder: Path) -> list[str]:
    """The paths of the photos, sorted."""
    return [str(path) for path in sorted(folder.glob("photos/*/*.png"))]
