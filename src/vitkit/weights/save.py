"""Save a model in any weight format; a file is complete or not there at all."""

import errno
import json
import shutil
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
from vitkit.models.variants import Config, Model
from vitkit.models.vit import ViT, ViTConfig
from vitkit.weights.card import card_of, to_json
from vitkit.weights.formats import formats
from vitkit.weights.formats.layout import Hints, Layout, Shapes, Source
from vitkit.weights.formats.vitkit import LAYOUT as OWN
from vitkit.weights.tokenizer import TokenizerPlace
from vitkit.weights.untrusted import listed

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMENT_LIMIT = 65_535  # bytes of a zip comment, where an .npz stores its card


def save(model: Model, path: str | Path, format: str | None = None) -> tuple[str, ...]:
    """Write a model; without `format` the name decides (.safetensors, .npz, a folder).

    Returns notes: what the format cannot store, or what its library computes differently.
    """
    path = Path(path)
    format = format or format_of(path)
    given, model = model, formats()[format].equivalent(model) if format in formats() else model
    layout = layout_for(model.config, format, path)
    if reason := rounded_periods(model, layout) or unrepresented_parameters(model, layout):
        raise WeightsError(f"cannot save as {format}: {reason}", code="weights.unsupported")
    in_json = bool(layout.json_files) and not path.suffix
    notes = [*differences(model.config, layout, in_json=in_json), *lost_in_arrays(model, layout, path)]
    notes += changed_tokens(given.config, model.config, format)
    if getattr(given.config, "text", None) and not getattr(model.config, "text", None):
        notes.append(f"without the text tower, for which vitkit has no place in {format}")
    card = to_json(card_of(model, layout.name))
    with writable(path):
        if not path.suffix:
            save_folder(model, path, layout)
        elif path.suffix == ".npz":
            if len(card.encode()) > COMMENT_LIMIT:
                card = ""
                notes.append("too many labels for the comment of an .npz: it has arrays only, without a card")
            replace_file(path, lambda temporary: write_npz(temporary, model, layout, card))
        elif path.suffix == ".safetensors":
            arrays = {name: tensor.contiguous() for name, tensor in foreign_arrays(model, layout)}
            metadata = {"vitkit": card}  # one key: safetensors writes several in random order
            replace_file(path, lambda temporary: safetensors.torch.save_file(arrays, temporary, metadata))
        else:
            notes.append(f"a {path.suffix} file stores arrays only: no labels, preprocessing or numerics")
            arrays = {name: tensor.clone() for name, tensor in foreign_arrays(model, layout)}
            replace_file(path, lambda temporary: torch.save(arrays, temporary))
    return tuple(notes)


def format_of(path: Path) -> str:
    """The format that a file name selects."""
    for name, format in formats().items():
        if path.suffix == format.default_ending:
            return name
    message = f"{path.name}: the name does not select a format; give format=, one of {', '.join(formats())}"
    raise WeightsError(message, code="request.missing")


def layout_for(config: Config, format: str, path: Path) -> Layout:
    """The layout of a format for this model, or an error if the format cannot store it."""
    if format not in (known := formats()):
        raise WeightsError(f"no format {format!r}; known: {', '.join(known)}", code="request.unknown")
    endings = known[format].endings
    if path.suffix not in endings:
        expected = ", ".join(ending or "a folder: a name without an ending" for ending in endings)
        raise WeightsError(f"{path.name}: format {format} is written to {expected}", code="request.conflict")
    layout = known[format].layout_for(config)
    if reason := layout.unsupported(config):
        raise WeightsError(f"cannot save as {format}: {reason}", code="weights.unsupported")
    return layout


def changed_tokens(given: Config, written: Config, format: str) -> list[str]:
    """Notes on tokens that a format needs otherwise; the outputs are the same."""
    if not (isinstance(given, ViTConfig) and isinstance(written, ViTConfig)):
        return []
    notes = {
        "class_position": (
            "the position of the class token is added to it",
            "the class token has a position of zeros",
        ),
        "mask_token": ("without the mask token, which only pre-training uses", "with a mask token of zeros"),
    }
    changed = [field for field in notes if getattr(given, field) != getattr(written, field)]
    tokens = [f"{notes[field][getattr(written, field)]}, as {format} needs it" for field in changed]
    table = [] if given.positions == written.positions else [f"the fixed positions as a table, for {format}"]
    return tokens + table


def unrepresented_parameters(model: Model, layout: Layout) -> str:
    """Parameters that a file in this layout would lack; empty if there are none."""
    stored = {entry.own for entry in layout.entries(model.config)}
    lost = [name for name, _ in model.named_parameters() if name not in stored]
    return f"the {layout.name} layout has no names for {listed(lost)}; save it as vitkit" if lost else ""


def rounded_periods(model: Model, layout: Layout) -> str:
    """Why a file without RoPE's periods would be another model; empty if its reader computes the same."""
    rope = model.encoder.rope if isinstance(model, ViT) else None
    stored = {entry.own for entry in layout.entries(model.config)}
    if rope is None or "encoder.rope.periods" in stored or torch.equal(rope.periods, rope.exact_periods()):
        return ""
    return (
        "the periods of this model's RoPE are rounded, as in the original files of DINOv3, and "
        f"{layout.peer or 'its reader'} computes exact ones; save it as dino or vitkit, or start from timm's "
        "files, whose periods are exact (vitkit list weights)"
    )


def differences(config: Config, layout: Layout, *, in_json: bool = False) -> Iterator[str]:
    """Notes on fields that the layout's library computes differently; in_json: config.json has remedies."""
    own, native = flat(config), flat(layout.native(config))
    for field in own:
        if own[field] != native[field] and not (in_json and field in layout.remedies):
            hint = f"; {layout.remedies[field]}" if field in layout.remedies else ""
            yield f"{layout.name} code computes with {field}={native[field]}, this model {own[field]}{hint}"


def lost_in_arrays(model: Model, layout: Layout, path: Path) -> Iterator[str]:
    """Notes on fields that a reader of the arrays alone would guess wrongly."""
    config = model.config
    in_json = bool(layout.json_files) and not path.suffix
    if layout.name == OWN.name or in_json or not isinstance(config, ViTConfig):
        return
    written = {name: tuple(tensor.shape) for name, tensor in foreign_arrays(model, layout)}
    shapes = {
        name: rows_of(written[source.name], source)
        for name, source in layout.canonical_names(written).items()
    }
    for field, flag, argument in (
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
        actual, guessed = (str(n).strip("()").replace(", ", "x") for n in (value, guess or "nothing"))
        for_vitkit = f"for vitkit, vitkit convert FILE OUT.safetensors {flag} {actual}"
        if path.suffix in (".safetensors", ".npz"):
            for_vitkit = "vitkit reads it from the file's metadata"
        yield (
            f"the arrays do not store {field}={actual}, and a reader would guess {guessed}: give "
            f"{layout.name} {argument}={actual}; {for_vitkit}"
        )
    yield from lost_head(config, shapes, layout, path)


def lost_head(config: ViTConfig, shapes: Shapes, layout: Layout, path: Path) -> Iterator[str]:
    """A note if a reader of the arrays alone would take the features from other tokens."""
    try:
        guess = layout.infer(shapes, Hints(heads=config.heads, image_size=config.image_size)).config
    except WeightsError:
        return
    if isinstance(guess, ViTConfig) and guess.head != config.head:
        hint = f"; {layout.remedies['head']}" if "head" in layout.remedies else ""
        card = path.suffix in (".safetensors", ".npz")
        own = "vitkit reads it from the file's metadata" if card else "for vitkit, write a .safetensors file"
        yield f"the arrays do not store head={config.head}, a reader would guess {guess.head}{hint}; {own}"


def rows_of(shape: tuple[int, ...], source: Source) -> tuple[int, ...]:
    """The shape of a canonical array that is some rows of a written one."""
    return shape if source.rows is None else (source.rows[1] - source.rows[0], *shape[1:])


def flat(config: Config) -> dict[str, Any]:
    """The fields of a configuration; those of its stem as stem.NAME."""
    fields = asdict(config)
    fields |= {f"vit.{name}": value for name, value in (fields.pop("vit", None) or {}).items()}
    return fields | {f"stem.{name}": value for name, value in (fields.pop("stem", None) or {}).items()}


def foreign_arrays(model: Model, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Every array with its name and shape in the layout; arrays that share a name are rows of one."""
    names = [layout.written_name(n, model.config) for e in layout.entries(model.config) for n in e.foreign]
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in canonical_arrays(model, layout):
        name = layout.written_name(name, model.config)
        rows = [*parts.pop(name, []), tensor]
        if len(rows) < names.count(name):
            parts[name] = rows
        else:
            yield name, torch.cat(rows, layout.axes.get(name, 0)) if len(rows) > 1 else tensor


def canonical_arrays(model: Model, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    state = model.state_dict()
    for entry in layout.entries(model.config):
        parts = entry.joined.write(state[entry.own].detach().cpu()).chunk(len(entry.foreign))
        for name, part in zip(entry.foreign, parts, strict=True):
            yield name, entry.form.write(part)
    yield from layout.constants(model.config).items()


def write_npz(path: Path, model: Model, layout: Layout, card: str) -> None:
    """Like numpy.savez, but with one array in memory at a time and the same bytes for the same model."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, tensor in foreign_arrays(model, layout):
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(tensor.numpy()), allow_pickle=False)
        archive.comment = card.encode()


def save_folder(model: Model, folder: Path, layout: Layout) -> None:
    """A folder of safetensors and, if the layout has them, the JSON files of its library."""
    contents = layout.json_files(model) if layout.json_files else {}
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: tensor.contiguous() for name, tensor in foreign_arrays(model, layout)}
    metadata = {"format": "pt", "vitkit": to_json(card_of(model, layout.name))}
    replace_file(
        folder / "model.safetensors",
        lambda temporary: safetensors.torch.save_file(arrays, temporary, metadata),
    )
    for name, content in contents.items():
        write_json(folder / name, content)
    copy_tokenizer(model, folder)


def copy_tokenizer(model: Model, folder: Path) -> None:
    """The tokenizer beside the old weights, beside the new ones; a text tower is of no use without it."""
    place = model.text.tokenizer if isinstance(model, ViT) and model.text is not None else None
    if isinstance(place, TokenizerPlace) and (path := place.beside()):
        replace_file(folder / path.name, lambda temporary: shutil.copyfile(path, temporary))


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, "utf-8"))


class writable:
    """A context manager that turns write failures into one error with the path; the old file stays."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        if self.path.suffix and not self.path.parent.is_dir():
            message = f"cannot write {self.path}: no folder {self.path.parent}"
            raise WeightsError(message, code="file.not-found")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | safetensors.SafetensorError | RuntimeError):
            reason = getattr(error, "strerror", None) or error
            message = f"cannot write {self.path}: {reason}; the old file is unchanged"
            full = getattr(error, "errno", 0) in FULL
            raise WeightsError(message, code="disk.full" if full else "file.not-writable") from None
