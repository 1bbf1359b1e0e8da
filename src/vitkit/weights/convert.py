"""Convert a weight file to another format, and prove that it is the same model before it is kept."""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vitkit.errors import WeightsError
from vitkit.models.card import with_view
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Model
from vitkit.options import parse_view
from vitkit.weights.load import OWN, load
from vitkit.weights.parity import Parity, compare, pixels_for, with_config
from vitkit.weights.save import format_of, layout_for, save


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, and how the result was checked."""

    source: str
    source_format: str
    out: str
    format: str
    parameters: int
    read_back: bool  # every array equal, bit for bit
    parity: Parity | None  # against the library whose format it is
    changed: float | None  # how far that library's numerics move the logits
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.read_back and (self.parity is None or self.parity.ok)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def convert(
    source: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    overwrite: bool = False,
    view: str = "model",
    **options: Any,
) -> Conversion:
    """Load, save, read back, compare with the peer; `out` appears only when all is equal.

    view: how images are brought to the model's size from now on, as in vitkit evaluate --view.
    """
    out = Path(out)
    format = format or format_of(out)
    if out.exists() and not overwrite:
        raise WeightsError(f"{out} exists; give another name, or --overwrite", code="file.exists")
    model = load(source, **options)
    model.preprocessing = with_view(model.preprocessing, model.config.image_size, *parse_view(view))
    trial = out.with_name(f".checking-{out.name}")
    remove(trial)
    try:
        result = check(model, source, out, trial, format)
        if result.ok:
            remove(out)
            os.replace(trial, out)
    finally:
        remove(trial)
    return result


def check(model: Model, source: str | Path, out: Path, trial: Path, format: str) -> Conversion:
    layout = layout_for(model.config, format, out)
    notes = save(model, trial, format)
    again = load(trial, image_size=model.config.image_size, heads=getattr(model.config, "heads", None))
    same = model.state_dict().keys() == again.state_dict().keys() and all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    parity, changed = None, None
    if layout is not OWN:
        parity = compare(trial, model, layout)
        with torch.no_grad():
            pixels = pixels_for(model)
            native = with_config(model, layout.native(model.config))
            changed = float((model.eval()(pixels) - native(pixels)).abs().max())
    return Conversion(
        source=str(source),
        source_format=model.origin.format,
        out=str(out),
        format=layout.name,
        parameters=sum(p.numel() for p in model.parameters()),
        read_back=same,
        parity=parity,
        changed=changed,
        notes=(*model.origin.notes, *root_note(model), *notes),
    )


def root_note(model: Model) -> tuple[str, ...]:
    """By which of the two published conventions a ResNet's root is pooled."""
    if not isinstance(model.config, ResNetConfig):
        return ()
    whose = {"zeros": "BiT's own code", "-inf": "big_vision's bit_paper"}[model.config.root_padding]
    return (f"the root's max pooling is padded with {model.config.root_padding}, as in {whose}",)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
