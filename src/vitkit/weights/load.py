"""Load a model from any file: recognise the layout, infer the sizes, check everything, then read."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.errors import WeightsError
from vitkit.models.card import Preprocessing, pair, with_view
from vitkit.models.variants import Config, Model, fresh, skeleton
from vitkit.models.vit import ViTConfig, with_size_note
from vitkit.options import parse_view
from vitkit.weights.card import Card, from_json, imagenet_labels
from vitkit.weights.formats import LAYOUTS, huggingface
from vitkit.weights.formats.layout import SAME, Entry, Found, Hints, Layout, Source
from vitkit.weights.limits import check_model
from vitkit.weights.locate import locate, open_weights, side_files
from vitkit.weights.published import published_view
from vitkit.weights.untrusted import Arrays, UntrustedCheckpoint, listed, one_line

LONGEST = 1500  # characters of an error, some of which a stranger may have written
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    arrays = open_weights(path)
    try:
        card = from_json(arrays.card) if arrays.card else None
        files = {} if card and card.layout == OWN.name else side_files(path)
        hints = Hints(heads=heads, image_size=None if image_size is None else pair(image_size), files=files)
        layout, places, found = understand(arrays, card, hints)
        if gelu is not None and isinstance(found.config, ViTConfig):
            found = replace(found, config=replace(found.config, gelu=gelu))
        check_model(found.config, found.preprocessing, found.labels)
        model, notes = assemble(
            arrays, layout, places, found, allow_missing=tuple(allow_missing), ignore=tuple(ignore)
        )
    except UntrustedCheckpoint as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}", code=error.code) from None
    except ValueError as error:
        code = error.code if isinstance(error, WeightsError) else WeightsError.code
        raise WeightsError(f"{path}: {str(error)[:LONGEST]}", code=code) from None
    except (RuntimeError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise WeightsError(f"{path}: its description makes no valid model ({one_line(error)})") from None
    model.labels, label_notes = choose_labels(labels, found, model.config.classes, layout.name)
    notes = (*arrays.notes, *found.notes, *notes, *label_notes)
    model.preprocessing = preprocessing or found.preprocessing
    if not (card or preprocessing) and (view := published_view(origin.source)):
        model.preprocessing = with_view(found.preprocessing, model.config.image_size, *parse_view(view))
        notes = (*notes, f"evaluated with the view of its published accuracy, {view}")
    model.task = card.task if card else "classify"
    origin = replace(card.origin if card else origin, format=layout.name, notes=notes)
    model.origin = with_size_note(origin, model.config)
    return model.eval()


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


def understand(arrays: Arrays, card: Card | None, hints: Hints) -> tuple[Layout, dict[str, Source], Found]:
    """Which layout the arrays are in, where each array lies, and what model they make."""
    if card:
        layout = next((known for known in (OWN, *LAYOUTS) if known.name == card.layout), None)
        if layout is None:
            raise WeightsError(f"the file is described as of layout {card.layout!r}, which is unknown")
        if reason := layout.objection(card.config):
            raise WeightsError(f"the file is described as of layout {card.layout!r}, but {reason}")
    else:
        layout = next((known for known in LAYOUTS if known.recognises(arrays.shapes)), None)
    if layout is None:
        raise WeightsError(
            f"{len(arrays.shapes)} arrays in no known layout (official, BiT, timm, Hugging Face, "
            f"torchvision, vitkit); the first: {listed(list(arrays.shapes))}"
        )
    places = layout.tidy(arrays.shapes)
    if card and not (layout is huggingface.LAYOUT and hints.files):
        return layout, places, from_card(card, hints)
    inferred = layout.infer({name: shape_at(arrays, place) for name, place in places.items()}, hints)
    return layout, places, beside_card(from_card(card, hints), inferred, hints) if card else inferred


def from_card(card: Card, hints: Hints) -> Found:
    """What the card says, with what the caller knows better."""
    given = {k: v for k in ("heads", "image_size") if (v := getattr(hints, k)) and hasattr(card.config, k)}
    return Found(replace(card.config, **given), card.preprocessing, card.labels)


def beside_card(found: Found, inferred: Found, hints: Hints) -> Found:
    """A folder that vitkit wrote, where the JSON is what other programs read and people edit: it decides."""
    if "config.json" in hints.files and isinstance(inferred.config, ViTConfig):
        told = {k: getattr(inferred.config, k) for k in ("heads", "gelu", "norm_eps")}
        found = replace(found, config=replace(found.config, **told), labels=inferred.labels or found.labels)
    if "preprocessor_config.json" in hints.files:
        theirs, ours = inferred.preprocessing, found.preprocessing
        kept = (
            theirs if theirs.resize == "crop" else ours
        )  # how the centre is cut may stand in the card alone
        found = replace(found, preprocessing=replace(theirs, resize=kept.resize, crop=kept.crop))
    return found


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
        raise WeightsError(
            f"{layers} layers are declared, but the file has {len(places)} arrays", code="weights.names"
        )
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
    lines += [
        "  to accept this: vitkit convert FILE OUT.safetensors --allow-missing OURS --ignore THEIRS "
        "(load(FILE, allow_missing=, ignore=) in Python)"
    ]
    raise WeightsError("\n".join(lines), code="weights.names" if missing or left_over else "weights.shape")


def read_entry(arrays: Arrays, places: dict[str, Source], entry: Entry) -> Tensor:
    """One parameter: its arrays read, laid out our way, joined, and found to be finite numbers."""
    parts = []
    for name in entry.foreign:
        place = places[name]
        array = arrays.read(place.name)
        array = array if place.layer is None else array[place.layer]
        if array.dtype not in FLOATS:
            raise UntrustedCheckpoint(
                f"array {place.name!r} holds {array.dtype}, not floating-point numbers", code="weights.values"
            )
        array = array.float()  # models compute in float32, whatever the file was written in
        if not array.isfinite().all():
            count = int((~array.isfinite()).sum())
            raise UntrustedCheckpoint(
                f"array {place.name!r} holds {count} values that are not finite numbers in float32",
                code="weights.values",
            )
        parts.append(entry.form.read(array))
    tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    return nn.Parameter(tensor.contiguous())


def choose_labels(
    given: Iterable[str] | None, found: Found, classes: int, layout: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names for the classes: those given, those of the file, or ImageNet's for 1000 outputs."""
    names = tuple(given) if given is not None else found.labels
    if names and len(names) != classes:
        raise WeightsError(f"there are {len(names)} labels for {classes} classes", code="data.labels")
    if names or layout == "vitkit" or classes != 1000:
        return names, ()
    return imagenet_labels(), ("1000 outputs: taken to be ImageNet's classes (labels= says otherwise)",)
