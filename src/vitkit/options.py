"""The words that the training verbs share, as one frozen value, and how texts are read; light to import."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tyro.conf import arg

from vitkit.errors import Error

Precision = Literal["auto", "fp32", "bf16"]
DEVICES = ("cpu", "cuda", "mps", "xpu")  # that hold numbers and compute with them; "meta" does neither
MOST_PIXELS = 4096  # of a side: 65,536 patches of 16 pixels
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
LONGEST = 365 * 86400  # seconds
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
IN_RECIPES = (  # options that a recipe has under the same name
    "weights", "model", "batch", "seed", "subset", "against", "split_of", "keep", "patience",
)  # fmt: skip


@dataclass(frozen=True)
class Range:
    """The numbers that a flag or a field takes, with both ends unless it says otherwise."""

    least: float
    largest: float
    above: bool = False  # without `least` itself
    below: bool = False  # without `largest` itself

    def expected(self, *, whole: bool) -> str:
        first, last = "above" if self.above else "from", "to below" if self.below else "to"
        if whole:
            return f"a whole number {first} {self.least:,} {last} {self.largest:,}"
        return f"a number {first} {self.least:g} {last} {self.largest:g}"

    def __contains__(self, value: float) -> bool:
        """Never true of nan, which compares with nothing."""
        low = self.least < value if self.above else self.least <= value
        return low and (value < self.largest if self.below else value <= self.largest)


def check_within(value: Any, ranges: Mapping[str, Range], prefix: str = "") -> None:
    """Every number of a frozen value within its range, or an error with its name, its value and the range."""
    for field in fields(value):
        allowed, content = ranges.get(field.name), getattr(value, field.name)
        if allowed is None or content is None:
            continue
        for number in content if isinstance(content, tuple) else (content,):
            numeric = isinstance(number, int | float) and not isinstance(number, bool)
            if not numeric or number not in allowed:
                shown = repr(content)
                shown = shown if len(shown) <= 60 else f"{shown[:60]} ..."
                raise Error(
                    f"{prefix}{field.name} must be {allowed.expected(whole=False)}, not {shown}",
                    code="recipe.value",
                )


BATCH, RATE, SHARE = Range(1, 65_536), Range(0, 1000), Range(0, 1)  # of flags and of a recipe's fields alike
PENALTY, PATIENCES = Range(1e-30, 1e30), Range(0, 10**6)
STEPS, EPOCHS, SHOTS, SEEDS = Range(1, 10**9), Range(1e-6, 1e6), Range(1, 1_000_000), Range(1, 1000)
SERVICE = {  # the numbers that `vitkit serve` takes, by the field of service.settings.Settings
    "port": Range(0, 65_535),
    "max_batch": Range(1, 4096),
    "max_wait_ms": Range(0, 60_000),
    "queue": Range(1, 1_000_000),
    "attention_queue": Range(1, 1_000_000),
    "timeout": Range(1e-3, 86_400),
    "max_bytes": Range(1000, 10**9),
    "max_pixels": Range(1, 10**9),
    "workers": Range(1, 256),
}
RANGES = {  # of the numbers among the options, by their names in Python
    "batch": BATCH,
    "epochs": EPOCHS,
    "lr": RATE,
    "max_bad": SHARE,
    "more_steps": STEPS,
    "patience": PATIENCES,
    "price_per_hour": Range(0, 1e6),
    "seed": Range(0, 2**63 - 1),
    "seeds": SEEDS,
    "steps": STEPS,
    "top": Range(1, 1_000_000),
    "workers": Range(0, 256),
}
PATIENCE = 5  # evaluations without a better one after which a fine-tuning stops; it has 10
LENGTH = (  # of a fine-tuning, as tasks.automatic.steps_for computes it
    "the recipe's; of finetune by the training images: on a GPU 500 steps, 10,000 from 20,000 images, 20,000 "
    "from 500,000; on a CPU as many as see 12,800 images, at most 500, but two passes at least"
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of finetune and pretrain; what is not given, the recipe decides."""

    weights: Annotated[
        str,
        arg(
            metavar="FILE|FOLDER|NAME",
            help="The trained model to start from. It decides the architecture: not with --model.",
        ),
    ] = ""
    model: Annotated[
        str, arg(metavar="NAME", help="Train this model from scratch instead; not with --weights.")
    ] = ""
    out: Annotated[
        Path | None, arg(metavar="DIR", help="The run folder; if not given runs/<data>, or -2, -3, ...")
    ] = None
    recipe: Annotated[str, arg(metavar="NAME", help="See vitkit list recipes.")] = ""
    image_size: Annotated[str | None, arg(metavar="N|HxW", help="Resolution.")] = None
    strict_size: Annotated[
        bool, arg(help="Refuse a resolution that is no whole number of patches; else its rest is dropped.")
    ] = False
    batch: Annotated[int | None, arg(metavar="N", help="Images a step, over all processes.")] = None
    steps: Annotated[
        int | None,
        arg(metavar="N", help="Length of the run.", help_behavior_hint=f"(default: {LENGTH})"),
    ] = None
    epochs: Annotated[float | None, arg(metavar="X", help="Length in passes over the data.")] = None
    keep: Annotated[
        Literal["best", "last"] | None,
        arg(
            metavar="best|last",
            help="The weights that the run ends with: best on the validation images, or last.",
            help_behavior_hint="(default: best where there are validation images; last for a paper's recipe)",
        ),
    ] = None
    patience: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Stop early after so many evaluations in a row without a better one; 0: never.",
            help_behavior_hint=f"(default: {PATIENCE} of 10 where best weights are kept; 0 for a paper's)",
        ),
    ] = None
    lr: Annotated[float | None, arg(metavar="X", help="Peak learning rate.")] = None
    seed: Annotated[int | None, arg(metavar="N", help="Decides every random choice.")] = None
    subset: Annotated[
        str | None, arg(metavar="N|P%|N/class", help="Train on a part: 1000 images, 10%, or 25/class.")
    ] = None
    against: Annotated[
        tuple[str, ...],
        arg(metavar="DATA...", help="Take out of train what is in these sets too, or looks like it."),
    ] = ()
    set: Annotated[
        tuple[str, ...],
        arg(metavar="FIELD=VALUE...", help="Any other field of the recipe, as in model.head=gap."),
    ] = ()
    device: Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto"
    workers: Annotated[int | None, arg(metavar="N", help="Processes that prepare images.")] = None
    decoded: Annotated[
        Path | None,
        arg(metavar="DIR", help="Keep decoded images there: later passes and runs read pixels."),
    ] = None
    max_bad: Annotated[float, arg(metavar="X", help="Maximum fraction of unreadable images.")] = 0.05
    compile: Annotated[bool, arg(help="Compile the model (torch.compile).")] = False
    recompute: Annotated[
        bool, arg(help="Compute activations twice instead of keeping them: less memory, a third more time.")
    ] = False
    cuda_graph: Annotated[
        bool,
        arg(help="On a GPU, launch the kernels of every step one by one instead of replaying a CUDA graph."),
    ] = True
    deterministic: Annotated[
        bool, arg(help="On a GPU, only kernels that give the same bits every time: slower.")
    ] = False
    parallel: Annotated[
        Literal["auto", "ddp", "fsdp"],
        arg(
            metavar="ddp|fsdp",
            help="Under torchrun: replicate the model, or shard it. auto: shard it only if it does not fit.",
        ),
    ] = "auto"
    save_aside: Annotated[bool, arg(help="Write checkpoints while the training goes on.")] = False
    track: Annotated[
        tuple[str, ...], arg(metavar="NAME...", help="wandb, mlflow, trackio; TensorBoard is always written.")
    ] = ()
    price_per_hour: Annotated[
        float | None, arg(metavar="X", help="What a device costs an hour; the result tells the price.")
    ] = None
    accept_changed_data: Annotated[
        bool,
        arg(help="Resume although images or class names changed since the run began; classes stay the same."),
    ] = False
    more_steps: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Train a finished run on by N steps, from its last weights and optimizer state. The "
            "learning rate starts again: warm-up of at most N/10 steps, peak, decay over the N steps. The "
            "model until then stays as model-STEP.safetensors.",
        ),
    ] = None
    split_of: Annotated[
        str,
        arg(metavar="RUN", help="Images stay in train, val or test as in this run; new ones are divided."),
    ] = ""
    plan: Annotated[
        bool, arg(help="Only say what would happen: nothing is trained, downloaded or written.")
    ] = False

    def changes(self) -> dict[str, Any]:
        """What was given of the fields that a recipe has under the same name."""
        given = {name: getattr(self, name) for name in IN_RECIPES}
        size = parse_size(self.image_size)
        return {k: v for k, v in (given | {"image_size": size}).items() if v not in (None, "", ())}

    def words(self) -> list[str]:
        """The flags of a command line that give these options."""
        found: list[str] = []
        for field in fields(self):
            value, flag = getattr(self, field.name), field.name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, bool):
                found.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                found += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
        return found


def check_options(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse a value that is not of its option's type or outside of its range, as the command line does.

    hints: the type of each option. Numbers are looked up in RANGES, texts in FORMS.
    """
    for name, value in values.items():
        kinds = [kind for kind in kinds_of(hints[name]) if kind is not type(None)]
        if value is None and len(kinds) < len(kinds_of(hints[name])):
            continue
        for one in value if isinstance(value, tuple) else (value,):
            check_option(name, one, kinds[0])


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of one value: the parts of a union, without Annotated, of a tuple that of each value."""
    while get_origin(hint) in (Annotated, tuple):
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_option(name: str, value: Any, kind: Any) -> None:
    shown, allowed = f"{name}={value!r}"[:100], RANGES.get(name)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise Error(f"{shown}: expected one of {', '.join(get_args(kind))}", code="request.value")
    elif kind in (int, float):
        whole = kind is int
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or (allowed is not None and value not in allowed):
            expected = allowed.expected(whole=whole) if allowed else "a whole number" if whole else "a number"
            raise Error(f"{shown}: expected {expected}", code="request.value")
    elif not isinstance(value, kind):
        expected = {bool: "True or False", str: "a text", Path: "a path"}.get(kind, "another type")
        raise Error(f"{shown}: expected {expected}", code="request.value")
    elif value and name in FORMS:
        try:
            FORMS[name](value)
        except ValueError as error:
            raise Error(str(error), code=getattr(error, "code", "request.value")) from None


def parse_size(text: str | None) -> tuple[int, int] | None:
    """'384' or '384x256' -> (height, width)."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        raise Error(f"--image-size {text!r}: give N or HxW, as in 384 or 384x256", code="request.value")
    if not all(1 <= int(part) <= MOST_PIXELS for part in parts):
        raise Error(f"--image-size {text!r}: a side has 1 to {MOST_PIXELS:,} pixels", code="request.value")
    return int(parts[0]), int(parts[-1])


def check_device(name: str) -> None:
    """Refuse a device of a kind that no model can run on."""
    if not re.fullmatch(f"auto|({'|'.join(DEVICES)})(:[0-9]{{1,3}})?", name):
        raise Error(
            f"--device {name!r}: expected auto, {', '.join(DEVICES)}, or one of several, as cuda:1",
            code="request.value",
        )


def parse_view(text: str) -> tuple[str, int | None]:
    """'model', 'squash', 'centre' or 'centre:256' -> its kind, and the pixels of the shorter side if any."""
    found = re.fullmatch(r"(model|squash|cent(?:re|er))(?::([0-9]{1,5}))?", text)
    if found is None or (found[2] and not found[1].startswith("cent")) or found[2] == "0":
        raise Error(
            f"--view {text!r}: expected model (its own), squash (all of an image to the size), centre "
            "(shorter side to 256/224 of the size, then the central crop) or centre:N (shorter side to N)",
            code="request.value",
        )
    return "centre" if found[1] == "center" else found[1], int(found[2]) if found[2] else None


def parse_frozen_view(text: str) -> None:
    """The views of fewshot: those of parse_view, and the official evaluator's."""
    try:
        text == "official" or parse_view(text)
    except ValueError as error:
        raise Error(
            f"{error}, or official (squash to 256/224 of the size, then the centre)", code="request.value"
        ) from None


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names: those that --set takes."""
    rows: dict[str, Any] = {}
    for name, value in table.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return rows


def settings_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """What decides a run, by the names that --set takes, out of a recipe's table; model options as texts.

    Nothing is checked here: the table may be one of an earlier version, or not a recipe at all.
    """
    table = {name: content for name, content in recipe.items() if name not in ("version", "auto")}
    if isinstance(options := table.get("model_options"), dict):
        table["model_options"] = [f"{name}={setting(value)}" for name, value in flat(options).items()]
    return flat(table)


def setting(value: Any) -> str:
    """A value as --set takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def part_of(text: str) -> dict[str, int | float]:
    """'1000', '10%' or '25/class' as what data.splits.subset takes; nothing for all."""
    if not text:
        return {}
    found = re.fullmatch(r"([0-9]{1,12})(/class)?|([0-9]+(?:\.[0-9]+)?)%", text.strip())
    if found is None or (found[3] and not 0 < float(found[3]) <= 100) or (found[1] and not int(found[1])):
        raise Error(
            f"--subset {text!r}: give a number of images, a percentage or a number of images per class, "
            "as in 1000, 10% or 25/class",
            code="request.value",
        )
    if found[3]:
        return {"fraction": float(found[3]) / 100}
    return {"per_class" if found[2] else "count": int(found[1])}


FORMS: dict[str, Callable[[str], Any]] = {  # how the text of an option is read; an error says what it takes
    "device": check_device,
    "image_size": parse_size,
    "subset": part_of,
    "view": parse_view,
}


def parse_budget(text: str) -> float:
    """'20min', '90s', '1.5h' in seconds."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    seconds = float(found[1]) * SECONDS.get(found[2] or "min", 0) if found else 0.0
    if not 0 < seconds <= LONGEST:
        raise Error(
            f"--budget {text!r}: give a time, as in 90s, 20min or 1.5h, of at most a year",
            code="request.value",
        )
    return seconds


def size_in_bytes(text: str) -> int:
    """10MB, 500kB, 2e6 or 1000000."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        assert found
        size = float(found[1]) * BYTES[found[2]]
    except (AssertionError, KeyError, ValueError):
        size = 0.0
    if size not in (allowed := SERVICE["max_bytes"]):
        raise Error(
            f"--max-bytes {text!r}: no size from {allowed.least:,} to {allowed.largest:,} bytes; "
            "give one such as 10MB or 500kB",
            code="request.value",
        )
    return int(size)


def parse_l2(text: str) -> float | None:
    """fewshot's penalty: a number above 0, or None for a grid of them."""
    if text == "grid":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value not in PENALTY:
        raise Error(f"--l2 {text!r}: expected {PENALTY.expected(whole=False)}, or grid", code="request.value")
    return value
