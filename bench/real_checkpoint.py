"""A real published checkpoint: what it sees in photographs, and how far vitkit and timm are apart on it.

    python bench/real_checkpoint.py Ti_16-augreg-in1k-224.npz

Needs timm, scikit-image and scikit-learn (for their photographs).
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import importable_peers  # noqa: F401

import vitkit
from vitkit.weights.convert import timm_vit


def photographs() -> dict[str, np.ndarray]:
    from skimage import data
    from sklearn.datasets import load_sample_image

    result = {name: getattr(data, name)() for name in ("chelsea", "coffee", "rocket", "astronaut")}
    return result | {name: load_sample_image(name) for name in ("china.jpg", "flower.jpg")}


def pixels(picture: np.ndarray, side: int, crop: int) -> torch.Tensor:
    """Shorter side to `side` (bicubic, antialiased), the central `crop`, scaled to [-1, 1]."""
    image = Image.fromarray(picture).convert("RGB")
    w, h = image.size
    w, h = (side, int(side * h / w)) if w < h else (int(side * w / h), side)
    image = image.resize((w, h), Image.Resampling.BICUBIC)
    left, top = round((w - crop) / 2), round((h - crop) / 2)
    array = np.asarray(image.crop((left, top, left + crop, top + crop)), dtype=np.float32)
    return torch.from_numpy(array).permute(2, 0, 1)[None] / 127.5 - 1


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    path = parser.parse_args().checkpoint
    models = {gelu: vitkit.load(path, gelu=gelu) for gelu in ("tanh", "erf")}
    peers = {gelu: timm_vit(model.config).eval() for gelu, model in models.items()}
    for peer in peers.values():
        peer.load_pretrained(str(path))
    for name, picture in photographs().items():
        image = pixels(picture, 248, 224)
        for gelu, model in models.items():
            logits, theirs = model(image), peers[gelu](image)
            probability, index = logits.softmax(-1)[0].max(-1)
            apart = float((logits - theirs).abs().max())
            print(
                f"{name:11} {gelu:4}  {index:4} {model.labels[index]:32} {probability:.3f}  timm {apart:.1e}"
            )
        moved = float((models["tanh"](image) - models["erf"](image)).abs().max())
        print(f"{name:11} the other GELU moves the logits by {moved:.1e}")


if __name__ == "__main__":
    main()
