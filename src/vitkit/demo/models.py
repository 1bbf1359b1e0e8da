"""Every model beside its published size, then one model of each family through every weight format."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitkit.catalogue import sizes
from vitkit.models.variants import Model, fresh, variant
from vitkit.models.vit import ViTConfig
from vitkit.report.terminal import print_table, say
from vitkit.weights.convert import convert
from vitkit.weights.load import load
from vitkit.weights.parity import pixels_for
from vitkit.weights.save import save

JOURNEYS = {  # model -> the formats it is taken through, in this order
    "ViT-Ti/16": ("official", "timm", "hf", "torchvision", "vitkit"),
    "R26+ViT-S/32": ("official", "timm", "vitkit"),
    "BiT-R50x1": ("official", "timm", "vitkit"),
}
NAMES = {"official": "model.npz", "hf": "model", "torchvision": "model.pt"}


def run(emit: Callable[[Any], None] | None = None) -> bool:
    """Print both tables (or emit one value); whether every figure and every round trip is right."""
    rows = sizes()
    right = all(row["published"] in (None, row["parameters"]) for row in rows)
    journeys = [leg for name, formats in JOURNEYS.items() for leg in journey(name, formats)]
    right = right and all(leg["equal"] for leg in journeys)
    if emit:
        emit({"models": rows, "conversions": journeys, "ok": right})
        return right
    print_table(rows, "Every model: parameters at 224 pixels and 1000 classes, cost of one image")
    say("")
    print_table(journeys, "One model of each family, random weights, through every format and back")
    say("")
    say("All sizes and round trips are as they should be." if right else "SOMETHING IS NOT AS IT SHOULD BE.")
    return right


@torch.no_grad()
def journey(name: str, formats: tuple[str, ...]) -> list[dict[str, Any]]:
    """Save, load and compare, from format to format; at the end the model must be the one that set out."""
    model = randomised(name)
    pixels = pixels_for(model)
    start = model(pixels)
    legs = []
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "start.safetensors"
        save(model, here)
        for i, format in enumerate(formats):
            there = Path(folder) / f"{i}-{NAMES.get(format, 'model.safetensors')}"
            c = convert(here, there, format=format)
            peer, back = c.parity, load(there)
            legs.append(
                {
                    "model": name,
                    "format": c.format,
                    "arrays": "bit-equal" if c.read_back else "DIFFER",
                    "logits_moved": float((back(pixels) - start).abs().max()),
                    "peer": peer.peer if peer else "-",
                    "peer_logits_differ": peer.logits if peer else None,
                    "peer_features_differ": peer.features if peer else None,
                    "equal": c.ok,
                    "remark": peer.skipped if peer else "",
                }
            )
            here = there
    return legs


def randomised(name: str) -> Model:
    """A small-headed model with random numbers in every parameter, so that no array can hide."""
    config = variant(name)
    if isinstance(config, ViTConfig):
        config = replace(config, gelu="erf")  # the one GELU that every format can hold
    model = fresh(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model.eval()
