"""Load a model from any weight file: recognise the layout, infer the sizes, check all arrays, read them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import WeightsError
from vitkit.models.card import Origin, Preprocessing, pair, shorter_side, with_view
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.variants import Config, Model, fresh, skeleton
from vitkit.models.vit import ViT, ViTConfig, with_size_note
from vitkit.options import parse_view
from vitkit.weights.card import ADAPTER, Card, distinct_labels, from_json, imagenet_labels
from vitkit.weights.formats import formats, layouts
from vitkit.weights.formats.layout import Entry, Hints, Layout, ModelSpec, Source
from vitkit.weights.formats.text_rows import PREFIX as TEXT
from vitkit.weights.formats.vitkit import LAYOUT as OWN
from vitkit.weights.hub import is_hub
from vitkit.weights.limits import check_model
from vitkit.weights.locate import locate, open_weights, side_files
from vitkit.weights.published import by_source, licence_note, published_view
from vitkit.weights.tokenizer import TokenizerPlace
from vitkit.weights.untrusted import Arrays, UntrustedCheckpoint, listed, one_line

LONGEST = 1500  # characters of an error message, which may quote an untrusted file
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
    text: bool = False,
) -> Model:
    """A model from a file, a folder, a published name or the Hub; model.origin.notes records how it was read.

    source         a path, a name of `vitkit list weights`, or hf:owner/name with or without @revision
    allow_missing  prefixes of our parameters that the file may lack; they are initialised
    ignore         prefixes of the file's arrays to skip; one that our model has also needs allow_missing
    image_size, heads, gelu, labels, preprocessing   override what the file says or does not store
    text           also read the text tower of CLIP or SigLIP, if the file has one; it is model.text
    """
    path, origin = locate(source)
    arrays = open_weights(path)
    with readable_errors(path):
        card, layout, sources, spec = described(path, arrays, heads=heads, image_size=image_size, text=text)
        spec = with_gelu(spec, gelu)
        check_model(spec.config, spec.preprocessing, spec.labels)
        model, notes = assemble(
            arrays, layout, sources, spec, allow_missing=tuple(allow_missing), ignore=tuple(ignore)
        )
    model.labels, label_notes = choose_labels(labels, spec, model.config.classes, layout.name)
    notes = (*arrays.notes, *spec.notes, *notes, *label_notes)
    model.preprocessing = preprocessing or spec.preprocessing
    if not (card or preprocessing):
        model.preprocessing, more = published_preprocessing(origin.source, spec, model.config.image_size)
        notes += more
    model.task = card.task if card else usual_task(spec.config)
    model.reject_below = card.reject_below if card else 0.0
    model.origin = with_size_note(origin_of(origin, card, layout, notes), model.config)
    return with_tokenizer(model.eval(), TokenizerPlace(path, origin.source))


def usual_task(config: Config) -> str:
    """The task of a model whose file does not say it."""
    return config.task if isinstance(config, DenseConfig) else "classify"


def config_of(source: str | Path) -> Config:
    """The configuration of a model in any weight file, whose arrays are not read."""
    path, _ = locate(source)
    arrays = open_weights(path)
    with readable_errors(path):
        spec = described(path, arrays)[3]
        check_model(spec.config, spec.preprocessing, spec.labels)
    return spec.config


def described(
    path: Path,
    arrays: Arrays,
    *,
    heads: int | None = None,
    image_size: tuple[int, int] | int | None = None,
    text: bool = False,
) -> tuple[Card | None, Layout, dict[str, Source], ModelSpec]:
    """The card of a file if it has one, and what `identify` says about its arrays."""
    card = from_json(arrays.card) if arrays.card else None
    files = {} if card and card.layout == OWN.name else side_files(path)
    hints = Hints(heads=heads, image_size=None if image_size is None else pair(image_size), files=files)
    return card, *identify(arrays, card, hints, text=text)


@contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Every error of a file as a WeightsError that names it."""
    try:
        yield
    except UntrustedCheckpoint as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}", code=error.code) from None
    except ValueError as error:
        code = error.code if isinstance(error, WeightsError) else WeightsError.code
        raise WeightsError(f"{path}: {str(error)[:LONGEST]}", code=code) from None
    except (RuntimeError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise WeightsError(f"{path}: its description is not a valid model ({one_line(error)})") from None


def with_tokenizer(model: Model, place: TokenizerPlace) -> Model:
    if isinstance(model, ViT) and model.text is not None:
        model.text.tokenizer = place
    return model


def origin_of(origin: Origin, card: Card | None, layout: Layout, notes: tuple[str, ...]) -> Origin:
    """The origin that the card states; of a model from the Hub its repository and commit come first."""
    if card and is_hub(origin.source):
        notes = (*notes, f"trained from {card.origin.source}") if card.origin.source else notes
        origin = replace(origin, licence=origin.licence or card.origin.licence)
    elif card:
        origin = card.origin
    return replace(origin, format=layout.name, notes=notes + licence_note(origin))


def with_gelu(spec: ModelSpec, gelu: str | None) -> ModelSpec:
    if gelu is None or not isinstance(spec.config, ViTConfig):
        return spec
    text = replace(spec.config.text, gelu=gelu) if spec.config.text else None
    notes = tuple(note for note in spec.notes if "GELU" not in note)  # they say how to give it
    return replace(spec, config=replace(spec.config, gelu=gelu, text=text), notes=notes)


def published_preprocessing(
    source: str, spec: ModelSpec, size: tuple[int, int]
) -> tuple[Preprocessing, tuple[str, ...]]:
    """The preprocessing of a published checkpoint's publisher with a note, or that of the file."""
    published = by_source(source)
    if published and published.preprocessing:
        return published.preprocessing, ("preprocessed as its publisher does",)
    if view := published_view(source):
        note = f"preprocessed as for its published accuracy: view {view}"
        return with_view(spec.preprocessing, size, *parse_view(view)), (note,)
    return spec.preprocessing, ()


def identify(
    arrays: Arrays, card: Card | None, hints: Hints, *, text: bool
) -> tuple[Layout, dict[str, Source], ModelSpec]:
    """The layout of the arrays, the source of each canonical array, and the model that they describe.

    text: with its text tower, whose canonical names start with the same prefix in every layout.
    """
    if card:
        if card.layout == ADAPTER:
            raise WeightsError(
                "a LoRA adapter, not a whole model; merge it into the weights that it was trained on: "
                "vitkit.merge_adapter(model, path) in Python"
            )
        layout = next((known for known in layouts() if known.name == card.layout), None)
        if layout is None:
            raise WeightsError(f"the card of the file names the unknown layout {card.layout!r}")
        if reason := layout.unsupported(card.config):
            raise WeightsError(f"the card of the file names the layout {card.layout!r}, but {reason}")
    else:
        layout = next((known for known in layouts() if known.recognises(arrays.shapes)), None)
    if layout is None:
        raise WeightsError(
            f"the {len(arrays.shapes)} arrays match no known format ({', '.join(formats())}); "
            f"the first: {listed(list(arrays.shapes))}"
        )
    sources = layout.canonical_names(arrays.shapes)
    vision = {name: source for name, source in sources.items() if not name.startswith(TEXT)}
    if not text:
        sources, card = vision, without_text(card)
    if card and not (layout.json_files and hints.files):
        return layout, sources, from_card(card, hints)
    if card and not layout.json_fields:  # the card knows what the arrays do not show
        heads = hints.heads or getattr(card.config, "heads", None)
        hints = replace(hints, heads=heads, image_size=hints.image_size or card.config.image_size)
    spec = layout.infer({name: source_shape(arrays, source) for name, source in sources.items()}, hints)
    spec = with_json_files(from_card(card, hints), spec, hints, layout) if card else spec
    return layout, sources if getattr(spec.config, "text", None) else vision, spec


def without_text(card: Card | None) -> Card | None:
    """The card of the image tower alone."""
    if card is None or not isinstance(card.config, ViTConfig):
        return card
    return replace(card, config=replace(card.config, text=None))


def from_card(card: Card, hints: Hints) -> ModelSpec:
    """The model of a card, with the caller's hints instead of its fields."""
    names, config = ("heads", "image_size"), card.config
    inner: Any = config.vit if isinstance(config, DenseConfig) else config
    inner = replace(inner, **{k: v for k in names if (v := getattr(hints, k)) and hasattr(inner, k)})
    config = replace(config, vit=inner) if isinstance(config, DenseConfig) else inner
    return ModelSpec(config, card.preprocessing, card.labels)


def with_json_files(spec: ModelSpec, inferred: ModelSpec, hints: Hints, layout: Layout) -> ModelSpec:
    """The model of a card, changed as the JSON files say: other programs read those, and people edit them."""
    content = hints.files.get("config.json")
    if content is not None:
        changes = {k: getattr(inferred.config, k) for k in layout.json_fields}
        spec = replace(spec, config=replace(spec.config, **changes), labels=inferred.labels or spec.labels)
    if "preprocessor_config.json" in hints.files or "pretrained_cfg" in (content or {}):
        size, own, other = spec.config.image_size, spec.preprocessing, inferred.preprocessing
        # a processor states whole pixels, and those that vitkit 0.1 wrote have no central crop
        same = other.resize == own.resize and shorter_side(size, other) == shorter_side(size, own)
        crop = own if same or other.resize != "crop" else other
        spec = replace(spec, preprocessing=replace(other, resize=crop.resize, crop=crop.crop))
    return spec


def source_shape(arrays: Arrays, source: Source) -> tuple[int, ...]:
    shape = arrays.shapes[source.name]
    if source.rows is not None:
        return (source.rows[1] - source.rows[0], *shape[1:])
    return shape if source.layer is None else shape[1:]


def assemble(
    arrays: Arrays,
    layout: Layout,
    sources: dict[str, Source],
    spec: ModelSpec,
    *,
    allow_missing: tuple[str, ...],
    ignore: tuple[str, ...],
) -> tuple[Model, tuple[str, ...]]:
    """The model with every parameter read, or an error that lists everything that does not fit."""
    layers = layer_count(spec.config)
    if 8 * layers > len(sources):
        raise WeightsError(
            f"{layers} layers are declared, but the file has {len(sources)} arrays", code="weights.names"
        )
    entries = layout.entries(spec.config)
    known, unwanted = (*spec.ignored, *ignore), set[str]()
    constants = layout.constants(spec.config)
    expected = {name for entry in entries for name in entry.foreign} | constants.keys()
    for entry in entries:  # a parameter that is initialised although the file has it
        if entry.own.startswith(allow_missing):
            unwanted |= {name for name in entry.foreign if name.startswith(ignore)}
    skipped = [n for n in sources if n in unwanted or (n not in expected and n.startswith(known))]
    unexpected = [n for n in sources if n not in expected and not n.startswith(known)]
    incomplete = [e for e in entries if any(n not in sources or n in unwanted for n in e.foreign)]
    required = [e for e in incomplete if not e.own.startswith(allow_missing)]
    missing = [n for e in required for n in e.foreign if n not in sources]
    model = skeleton(spec.config)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    initialised = [e.own for e in incomplete]
    present = [e for e in entries if e.own not in set(initialised)]
    mismatches = [m for e in present if (m := shape_mismatch(arrays, sources, e, shapes[e.own]))]
    check_arrays(layout.name, missing, unexpected, mismatches)
    check_constants(arrays, sources, constants)
    tensors = {e.own: read_entry(arrays, sources, e) for e in present}
    computed = [name for name, _ in model.named_buffers() if name not in {e.own for e in entries}]
    notes = [f"skipped {len(skipped)} arrays: {listed(skipped)}"] if skipped else []
    if computed:  # such as RoPE's periods, which not every file stores
        start = fresh(spec.config).state_dict()
        tensors |= {name: start[name] for name in computed}
    if initialised:
        start = fresh(spec.config).state_dict()
        tensors |= {name: start[name] for name in initialised}
        notes.append(f"initialised, because the file lacks them: {listed(initialised)}")
    assert set(tensors) == set(shapes), "a layout's entries name every parameter"
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True), tuple(notes)


def layer_count(config: Config) -> int:
    """Encoder layers and residual units, each of which has at least eight arrays."""
    if isinstance(config, DenseConfig):
        return layer_count(config.vit)
    if isinstance(config, ViTConfig):
        text = config.text.depth if config.text else 0
        return config.depth + text + (sum(config.stem.blocks) if config.stem else 0)
    return sum(config.blocks)


def shape_mismatch(arrays: Arrays, sources: dict[str, Source], entry: Entry, shape: tuple[int, ...]) -> str:
    """What is wrong with the shapes of an entry's arrays, computed on the meta device; empty if they fit."""
    stored = [source_shape(arrays, sources[name]) for name in entry.foreign]
    try:
        result = joined_shape([entry.form.read(torch.empty(s, device="meta")).shape for s in stored])
        result = tuple(entry.joined.read(torch.empty(result, device="meta")).shape) if result else ()
    except (RuntimeError, IndexError):
        result = ()
    if result == shape:
        return ""
    actual = stored if len(stored) > 1 else stored[0]
    return f"{', '.join(entry.foreign)}: found {actual}, our {entry.own} is {shape}"


def joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the concatenation; empty if there is none.

    torch.cat would say the same on the meta device, but there it imports torch._dynamo, which takes seconds.
    """
    first, *rest = map(tuple, shapes)
    if not rest:
        return first
    if not first or any(shape[1:] != first[1:] or len(shape) != len(first) for shape in rest):
        return ()
    return (sum(shape[0] for shape in (first, *rest)), *first[1:])


def check_arrays(layout: str, missing: list[str], unexpected: list[str], mismatches: list[str]) -> None:
    """Raise one error with all missing, unexpected and misshapen arrays."""
    if not (missing or unexpected or mismatches):
        return
    lines = [f"the arrays do not fit the model (layout {layout})"]
    lines += [f"  missing: {listed(missing)}"] if missing else []
    lines += [f"  unexpected: {listed(unexpected)}"] if unexpected else []
    lines += [f"  wrong shape: {listed(mismatches)}"] if mismatches else []
    lines += [
        "  to accept this: vitkit convert FILE OUT.safetensors --allow-missing OURS --ignore THEIRS "
        "(load(FILE, allow_missing=, ignore=) in Python)"
    ]
    raise WeightsError("\n".join(lines), code="weights.names" if missing or unexpected else "weights.shape")


def read_entry(arrays: Arrays, sources: dict[str, Source], entry: Entry) -> Tensor:
    """One parameter from its arrays, which must be finite floating-point numbers."""
    parts = []
    for name in entry.foreign:
        source = sources[name]
        array = arrays.read(source.name)
        array = array if source.layer is None else array[source.layer]
        array = array if source.rows is None else array[slice(*source.rows)]
        if array.dtype not in FLOATS:
            raise UntrustedCheckpoint(
                f"array {source.name!r} has dtype {array.dtype}, not a floating-point one",
                code="weights.values",
            )
        array = array.float()  # models are float32, whatever the file stores
        if not array.isfinite().all():
            count = int((~array.isfinite()).sum())
            raise UntrustedCheckpoint(
                f"array {source.name!r} has {count} values that are not finite in float32",
                code="weights.values",
            )
        parts.append(entry.form.read(array))
    tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    return entry.joined.read(tensor).contiguous()


def check_constants(arrays: Arrays, sources: dict[str, Source], constants: dict[str, Tensor]) -> None:
    """Refuse a file whose fixed arrays have other values, which would be another model."""
    for name, value in constants.items():
        if name in sources and not torch.equal(arrays.read(sources[name].name).to(value), value):
            raise UntrustedCheckpoint(
                f"array {sources[name].name!r} does not have the fixed values of this format",
                code="weights.values",
            )


def choose_labels(
    labels: Iterable[str] | None, spec: ModelSpec, classes: int, layout: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The caller's labels, the file's, or ImageNet's for 1000 outputs; with notes."""
    names = tuple(labels) if labels is not None else distinct_labels(spec.labels)
    if names and len(names) != classes:
        raise WeightsError(f"there are {len(names)} labels for {classes} classes", code="data.labels")
    if names or layout == OWN.name or classes != 1000:
        return names, ()
    return imagenet_labels(), ("1000 outputs: assumed to be the ImageNet classes (labels= overrides this)",)
