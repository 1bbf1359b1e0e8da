"""Load a model from any file: recognise the layout, infer the sizes, check everything, then read."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.layouts import LAYOUTS
from vitkit.layouts.layout import SAME, Entry, Found, Hints, Layout, Source, WeightsError
from vitkit.models.card import Origin, Preprocessing, pair
from vitkit.models.variants import Config, Model, fresh, skeleton
from vitkit.models.vit import ViTConfig
from vitkit.weights.archive import Arrays, UntrustedCheckpoint, one_line, open_arrays
from vitkit.weights.card import Card, from_json
from vitkit.weights.labels import imagenet_labels
from vitkit.weights.published import PUBLISHED, fetch, near_names

SIDE_FILES = ("config.json", "preprocessor_config.json")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHOWN = 6  # names in an error message before "and so many more"


def load(
    source: str | Path,
    *,
    allow_missing: Iterable[str] = (),
    ignore: Iterable[str] = (),
    image_size: tuple[int, int] | int | None = None,
    heads: int | None = None,
    gelu: str | None = None,
    labels: Iterable[str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> Model:
    """A model from a file, a folder or a published name; what was done stands in model.origin.notes.

    allow_missing  prefixes of our parameters that the file may lack; they start fresh
    ignore         prefixes of the file's arrays to leave out
    image_size, heads, gelu, labels, preprocessing   what the file does not say, or says wrongly
    """
    path, origin = locate(source)
    arrays, files = open_source(path)
    hints = Hints(heads=heads, image_size=None if image_size is None else pair(image_size), files=files)
    try:
        layout, places, found, card = understand(arrays, hints)
        if gelu is not None and isinstance(found.config, ViTConfig):
            found = replace(found, config=replace(found.config, gelu=gelu))
        model, notes = assemble(
            arrays, layout, places, found, allow_missing=tuple(allow_missing), ignore=tuple(ignore)
        )
    except UntrustedCheckpoint:
        raise
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from None
    except (RuntimeError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise WeightsError(f"{path}: what it says of itself makes no model ({one_line(error)})") from None
    model.labels, label_notes = choose_labels(labels, found, model.config.classes, layout.name)
    model.preprocessing = preprocessing or found.preprocessing
    model.multilabel = card is not None and card.multilabel
    notes = (*arrays.notes, *found.notes, *notes, *label_notes)
    model.origin = replace(card.origin if card else origin, format=layout.name, notes=notes)
    return model.eval()


def locate(source: str | Path) -> tuple[Path, Origin]:
    """The file or folder behind a path or a published name."""
    path = Path(source)
    if path.exists():
        return path, Origin(source=path.name)
    if str(source) in PUBLISHED:
        weight = PUBLISHED[str(source)]
        path, sha256 = fetch(weight)
        return path, Origin(source=weight.address, licence=weight.licence, sha256=sha256)
    near = near_names(str(source))
    hint = (
        f"; did you mean {' or '.join(near)}?" if near else "; vitkit list weights shows the published names"
    )
    raise WeightsError(f"no file, folder or published weights {str(source)!r}{hint}")


def open_source(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays behind a path; for a folder, the JSON files beside them too."""
    if not path.is_dir():
        return open_arrays(path), {}
    if (path / ".metadata").exists():
        raise UntrustedCheckpoint(
            f"{path}: a distributed checkpoint, which can run code; load it where it was made, then save it"
        )
    files = {name: read_json(path, name) for name in SIDE_FILES if (path / name).exists()}
    index = "model.safetensors.index.json"
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).exists():
            return open_arrays(inside(path, name)), files
    if (path / index).exists():
        return open_shards(path, read_json(path, index)), files
    raise WeightsError(f"{path}: the folder holds no model.safetensors, {index} or pytorch_model.bin")


def open_shards(folder: Path, index: dict[str, Any]) -> Arrays:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise UntrustedCheckpoint(f"{folder}: the index has no table weight_map")
    shards = {name: open_arrays(inside(folder, name)) for name in sorted(set(where.values()))}
    lost = [name for name, shard in where.items() if name not in shards[shard].shapes]
    if lost:
        raise WeightsError(f"{folder}: the index names arrays that its shards lack: {listed(lost)}")
    shapes = {name: shards[shard].shapes[name] for name, shard in where.items()}
    return Arrays(shapes, lambda name: shards[where[name]].read(name))


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, refused when its name or a link leads elsewhere (but for a hub's own blobs)."""
    root = folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    plain = name.isprintable() and Path(name).name == name
    if not plain or not any((root / name).resolve().is_relative_to(r) for r in roots):
        raise UntrustedCheckpoint(f"{folder}: {name!r} leads out of the folder")
    return root / name


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        path = inside(folder, name)
        if not path.is_file() or path.stat().st_size > 4 * 2**20:
            raise UntrustedCheckpoint(f"{folder / name}: no file, or larger than any real one")
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, UntrustedCheckpoint):
            raise
        raise UntrustedCheckpoint(f"{folder / name}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UntrustedCheckpoint(f"{folder / name}: not a JSON table")
    return content


def own_entries(config: Config) -> list[Entry]:
    return [Entry(name, (name,), SAME) for name in skeleton(config).state_dict()]


OWN = Layout(
    name="vitkit",
    recognises=lambda shapes: False,  # by its card alone
    infer=lambda shapes, hints: Found(ViTConfig()),
    entries=own_entries,
    objection=lambda config: "",
    native=lambda config: config,
)


def understand(arrays: Arrays, hints: Hints) -> tuple[Layout, dict[str, Source], Found, Card | None]:
    """Which layout the arrays are in, where each array lies, and what model they make."""
    if arrays.card:
        card = from_json(arrays.card)
        layout = next((known for known in (OWN, *LAYOUTS) if known.name == card.layout), None)
        if layout is None:
            raise WeightsError(f"the file says it is in layout {card.layout!r}, which is not known")
        if reason := layout.objection(card.config):
            raise WeightsError(f"the file says it is in layout {card.layout!r}, but {reason}")
        found = Found(card.config, card.preprocessing, card.labels)
        return layout, layout.tidy(arrays.shapes), found, card
    layout = next((known for known in LAYOUTS if known.recognises(arrays.shapes)), None)
    if layout is None:
        raise WeightsError(
            f"{len(arrays.shapes)} arrays in no known layout (official, BiT, timm, Hugging Face, "
            f"torchvision, vitkit); the first: {listed(list(arrays.shapes))}"
        )
    places = layout.tidy(arrays.shapes)
    shapes = {name: shape_at(arrays, place) for name, place in places.items()}
    return layout, places, layout.infer(shapes, hints), None


def shape_at(arrays: Arrays, place: Source) -> tuple[int, ...]:
    shape = arrays.shapes[place.name]
    return shape if place.layer is None else shape[1:]


def assemble(
    arrays: Arrays,
    layout: Layout,
    places: dict[str, Source],
    found: Found,
    *,
    allow_missing: tuple[str, ...],
    ignore: tuple[str, ...],
) -> tuple[Model, tuple[str, ...]]:
    """The model with every parameter read, or an error that names all that does not fit."""
    layers = layer_count(found.config)
    if 8 * layers > len(places):
        raise WeightsError(f"{layers} layers are declared, but the file has {len(places)} arrays")
    entries = layout.entries(found.config)
    dropped = (*found.ignored, *ignore)
    wanted = {name for entry in entries for name in entry.foreign}
    left_out = [n for n in places if n not in wanted and n.startswith(dropped)]
    left_over = [n for n in places if n not in wanted and not n.startswith(dropped)]
    absent = [e for e in entries if any(n not in places for n in e.foreign)]
    missing = [n for e in absent if not e.own.startswith(allow_missing) for n in e.foreign if n not in places]
    model = skeleton(found.config)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    lost = {e.own for e in absent}
    present = [e for e in entries if e.own not in lost]
    wrong = [w for e in present if (w := misfit(arrays, places, e, shapes[e.own]))]
    complain(layout.name, missing, left_over, wrong)
    tensors = {e.own: read_entry(arrays, places, e) for e in present}
    notes = [f"left out {len(left_out)} arrays: {listed(left_out)}"] if left_out else []
    if absent:
        start = fresh(found.config).state_dict()
        tensors |= {e.own: start[e.own] for e in absent}
        notes.append(f"started fresh, not in the file: {listed([e.own for e in absent])}")
    assert set(tensors) == set(shapes), "a layout's entries name every parameter"
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(True)
    return model, tuple(notes)


def layer_count(config: Config) -> int:
    """Layers and units, each of which has eight arrays or more."""
    if isinstance(config, ViTConfig):
        return config.depth + (sum(config.stem.blocks) if config.stem else 0)
    return sum(config.blocks)


def misfit(arrays: Arrays, places: dict[str, Source], entry: Entry, shape: tuple[int, ...]) -> str:
    """What is wrong with the shapes of an entry's arrays; tried out on tensors without memory."""
    found = [shape_at(arrays, places[name]) for name in entry.foreign]
    try:
        parts = [entry.form.read(torch.empty(s, device="meta")) for s in found]
        ours = tuple((torch.cat(parts) if len(parts) > 1 else parts[0]).shape)
    except (RuntimeError, IndexError):
        ours = ()
    if ours == shape:
        return ""
    is_now = found if len(found) > 1 else found[0]
    return f"{', '.join(entry.foreign)}: found {is_now}, our {entry.own} is {shape}"


def complain(layout: str, missing: list[str], left_over: list[str], wrong: list[str]) -> None:
    if not (missing or left_over or wrong):
        return
    lines = [f"the arrays do not make the model that they seem to be (layout {layout})"]
    lines += [f"  missing: {listed(missing)}"] if missing else []
    lines += [f"  left over: {listed(left_over)}"] if left_over else []
    lines += [f"  of another shape: {listed(wrong)}"] if wrong else []
    lines += ["  to accept this: allow_missing= our names, ignore= theirs; "]
    lines[-1] += "vitkit convert has --allow-missing and --ignore"
    raise WeightsError("\n".join(lines))


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(ascii(name)[1:-1][:120] for name in names[:SHOWN]) + more


def read_entry(arrays: Arrays, places: dict[str, Source], entry: Entry) -> Tensor:
    """One parameter: its arrays read, laid out our way, joined, and found to be finite numbers."""
    parts = []
    for name in entry.foreign:
        place = places[name]
        array = arrays.read(place.name)
        array = array if place.layer is None else array[place.layer]
        if array.dtype not in FLOATS:
            raise UntrustedCheckpoint(f"array {place.name!r} holds {array.dtype}, not floating-point numbers")
        if not array.isfinite().all():
            count = int((~array.isfinite()).sum())
            raise UntrustedCheckpoint(
                f"array {place.name!r} holds {count} values that are not finite numbers"
            )
        parts.append(entry.form.read(array))
    tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    tensor = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    return nn.Parameter(tensor.contiguous())


def choose_labels(
    given: Iterable[str] | None, found: Found, classes: int, layout: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names for the classes: those given, those of the file, or ImageNet's for 1000 outputs."""
    names = tuple(given) if given is not None else found.labels
    if names and len(names) != classes:
        raise WeightsError(f"{len(names)} labels for {classes} classes")
    if names or layout == "vitkit" or classes != 1000:
        return names, ()
    return imagenet_labels(), ("1000 outputs: taken to be ImageNet's classes (labels= says otherwise)",)
