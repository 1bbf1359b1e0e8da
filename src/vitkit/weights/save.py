"""Save a model in any layout; the file appears whole or not at all."""

import errno
import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.io.files import replace_file
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.card import card_of, to_json
from vitkit.weights.formats import bit, huggingface, official, timm, torchvision
from vitkit.weights.formats.layout import Hints, Layout
from vitkit.weights.load import OWN

FORMATS = ("vitkit", "official", "timm", "hf", "torchvision")
CONTAINERS = {  # format -> endings that it is written with
    "vitkit": (".safetensors",),
    "official": (".npz",),
    "timm": (".safetensors", ".pth", ".pt", ".bin"),
    "torchvision": (".pth", ".pt", ".bin", ".safetensors"),
    "hf": ("",),
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMENT_LIMIT = 65_535  # bytes of a zip file's comment, where an .npz carries its card


def save(model: Model, path: str | Path, format: str | None = None) -> tuple[str, ...]:
    """Write a model; the format follows from the name (.safetensors, .npz, a folder) unless given.

    Returns notes: what the format cannot hold, or what its library computes differently.
    """
    path = Path(path)
    format = format or format_of(path)
    layout = layout_for(model.config, format, path)
    notes = [*differences(model.config, layout), *lost_in_arrays(model, layout, path)]
    card = to_json(card_of(model, layout.name))
    with writable(path):
        if format == "hf":
            save_folder(model, path, layout)
        elif path.suffix == ".npz":
            if len(card.encode()) > COMMENT_LIMIT:
                card = ""
                notes.append("an .npz has no room for so many labels and what else is not an array")
            replace_file(path, lambda temporary: write_npz(temporary, model, layout, card))
        elif path.suffix == ".safetensors":
            arrays = {name: tensor.contiguous() for name, tensor in foreign_arrays(model, layout)}
            metadata = {"vitkit": card}  # one key alone: the order of several is not the same every time
            replace_file(path, lambda temporary: safetensors.torch.save_file(arrays, temporary, metadata))
        else:
            notes.append(f"a {path.suffix} file holds arrays alone: no labels, preprocessing or numerics")
            arrays = {name: tensor.clone() for name, tensor in foreign_arrays(model, layout)}
            replace_file(path, lambda temporary: torch.save(arrays, temporary))
    return tuple(notes)


def format_of(path: Path) -> str:
    by_name = {".safetensors": "vitkit", ".npz": "official", "": "hf"}
    if path.suffix in by_name:
        return by_name[path.suffix]
    why = f"{path.name}: the format does not follow from the name; give format=, one of {', '.join(FORMATS)}"
    raise WeightsError(why, code="request.missing")


def layout_for(config: Config, format: str, path: Path) -> Layout:
    """The layout of a format for this model, or the reason why there is none."""
    if format not in FORMATS:
        raise WeightsError(f"no format {format!r}; known: {', '.join(FORMATS)}", code="request.unknown")
    if path.suffix not in CONTAINERS[format]:
        endings = ", ".join(CONTAINERS[format]) or "a folder: a name without an ending"
        raise WeightsError(f"{path.name}: format {format} is written to {endings}", code="request.conflict")
    resnet = isinstance(config, ResNetConfig)
    authors = bit.BIG_VISION if getattr(config, "root_padding", "") == "-inf" else bit.OFFICIAL
    layout = {
        "vitkit": OWN,
        "official": authors if resnet else official.LAYOUT,  # of the code that computes as the model does
        "timm": bit.TIMM if resnet else timm.LAYOUT,
        "hf": huggingface.LAYOUT,
        "torchvision": torchvision.LAYOUT,
    }[format]
    if reason := layout.objection(config):
        raise WeightsError(f"cannot save as {format}: {reason}", code="weights.unsupported")
    return layout


def differences(config: Config, layout: Layout) -> Iterator[str]:
    """Where the layout's own library computes otherwise than the model does."""
    ours, theirs = flat(config), flat(layout.native(config))
    for field in ours:
        if ours[field] != theirs[field]:
            hint = "; give it act_layer='gelu_tanh'" if (layout.name, field) == ("timm", "gelu") else ""
            yield f"{layout.name} code computes with {field}={theirs[field]}, this model {ours[field]}{hint}"


def lost_in_arrays(model: Model, layout: Layout, path: Path) -> Iterator[str]:
    """What a reader of the arrays alone cannot know, and would guess wrongly."""
    config = model.config
    if layout.name in ("vitkit", "hf") or not isinstance(config, ViTConfig):
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in foreign_arrays(model, layout)}
    for field, flag, theirs in (
        ("heads", "--heads", "num_heads"),
        ("image_size", "--image-size", "img_size"),
    ):
        known: dict[str, Any] = {k: getattr(config, k) for k in ("heads", "image_size") if k != field}
        try:
            guess = getattr(layout.infer(shapes, Hints(**known)).config, field)
        except WeightsError:
            guess = None
        if guess == (value := getattr(config, field)):
            continue
        shown, other = (str(n).strip("()").replace(", ", "x") for n in (value, guess or "nothing"))
        back = f"for vitkit, vitkit convert FILE OUT.safetensors {flag} {shown}"
        if path.suffix in (".safetensors", ".npz"):
            back = "vitkit reads it from the file's metadata"
        yield (
            f"the arrays do not hold {field}={shown}, and a reader would guess {other}: give {layout.name} "
            f"{theirs}={shown}; {back}"
        )


def flat(config: Config) -> dict[str, Any]:
    """The fields of a configuration, those of its stem among them."""
    told = asdict(config)
    return told | {f"stem.{name}": value for name, value in (told.pop("stem", None) or {}).items()}


def foreign_arrays(model: Model, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Every array under the layout's name and in its form."""
    state = model.state_dict()
    for entry in layout.entries(model.config):
        parts = state[entry.own].detach().cpu().chunk(len(entry.foreign))
        for name, part in zip(entry.foreign, parts, strict=True):
            yield name, entry.form.write(part)


def write_npz(path: Path, model: Model, layout: Layout, card: str) -> None:
    """Like numpy.savez, one array in memory at a time, the same bytes for the same model."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, tensor in foreign_arrays(model, layout):
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(tensor.numpy()), allow_pickle=False)
        archive.comment = card.encode()


def save_folder(model: Model, folder: Path, layout: Layout) -> None:
    """A Hugging Face folder: the weights and the two JSON files that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        huggingface.prefixed(name, model.config): tensor.contiguous()
        for name, tensor in foreign_arrays(model, layout)
    }
    metadata = {"format": "pt", "vitkit": to_json(card_of(model, layout.name))}
    replace_file(
        folder / "model.safetensors",
        lambda temporary: safetensors.torch.save_file(arrays, temporary, metadata),
    )
    write_json(
        folder / "preprocessor_config.json", huggingface.preprocessor_json(model.config, model.preprocessing)
    )
    write_json(folder / "config.json", huggingface.config_json(model.config, model.labels))


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, "utf-8"))


class writable:
    """Turns the failures of writing into one error that names the file; nothing old is lost."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        if self.path.suffix and not self.path.parent.is_dir():
            why = f"cannot write {self.path}: no folder {self.path.parent}"
            raise WeightsError(why, code="file.not-found")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | safetensors.SafetensorError | RuntimeError):
            reason = getattr(error, "strerror", None) or error
            why = f"cannot write {self.path}: {reason}; what was there before is untouched"
            full = getattr(error, "errno", 0) in FULL
            raise WeightsError(why, code="disk.full" if full else "file.not-writable") from None
