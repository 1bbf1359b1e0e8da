"""The options of the training verbs as a frozen dataclass, and parsers of option values; without torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tyro.conf import arg

from vitkit.errors import Error
from vitkit.listing import tasks_without_labels

Precision = Literal["auto", "fp32", "bf16"]
DEVICES = ("cpu", "cuda", "mps", "xpu")  # kinds that can run a model; "meta" cannot
MOST_PIXELS = 4096  # per side: 65,536 patches of 16 x 16 pixels
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
LONGEST = 365 * 86400  # seconds
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
IN_RECIPES = (  # options that are recipe fields of the same name
    "weights", "model", "train", "batch", "seed", "subset", "corrections", "against", "split_of", "keep",
    "patience",
)  # fmt: skip


@dataclass(frozen=True)
class Range:
    """The range of numbers that a flag or a recipe field accepts; inclusive by default."""

    least: float
    largest: float
    above: bool = False  # exclude `least`
    below: bool = False  # exclude `largest`

    def expected(self, *, whole: bool) -> str:
        first, last = "above" if self.above else "from", "to below" if self.below else "to"
        if whole:
            return f"a whole number {first} {self.least:,} {last} {self.largest:,}"
        return f"a number {first} {self.least:g} {last} {self.largest:g}"

    def __contains__(self, value: float) -> bool:
        """NaN is never in range, because every comparison with it is false."""
        low = self.least < value if self.above else self.least <= value
        return low and (value < self.largest if self.below else value <= self.largest)


def check_within(value: Any, ranges: Mapping[str, Range], prefix: str = "") -> None:
    """Raise an error with name, value and range for the first number of a dataclass that is out of range."""
    for field in fields(value):
        allowed, content = ranges.get(field.name), getattr(value, field.name)
        if allowed is None or content is None:
            continue
        for number in content if isinstance(content, tuple) else (content,):
            numeric = isinstance(number, int | float) and not isinstance(number, bool)
            if not numeric or number not in allowed:
                text = repr(content)
                text = text if len(text) <= 60 else f"{text[:60]} ..."
                raise Error(
                    f"{prefix}{field.name} must be {allowed.expected(whole=False)}, not {text}",
                    code="recipe.value",
                )


BATCH, RATE, SHARE = Range(1, 65_536), Range(0, 1000), Range(0, 1)  # shared by flags and recipe fields
PENALTY, PATIENCES = Range(1e-30, 1e30), Range(0, 10**6)
STEPS, EPOCHS, SHOTS, SEEDS = Range(1, 10**9), Range(1e-6, 1e6), Range(1, 1_000_000), Range(1, 1000)
SERVICE = {  # of `vitkit serve`, by field of server.settings.Settings
    "port": Range(0, 65_535), "max_batch": Range(1, 4096), "max_wait_ms": Range(0, 60_000),
    "queue": Range(1, 1_000_000), "attention_queue": Range(1, 1_000_000), "timeout": Range(1e-3, 86_400),
    "max_bytes": Range(1000, 10**9), "max_pixels": Range(1, 10**9), "workers": Range(1, 256),
}  # fmt: skip
RANGES = {  # of the numeric options, by their Python names
    "batch": BATCH, "epochs": EPOCHS, "lr": RATE, "max_bad": SHARE, "merge_tokens": Range(0, 2**18),
    "more_steps": STEPS, "part_size": Range(1, 10**7), "patience": PATIENCES, "price_per_hour": Range(0, 1e6),
    "processes": Range(1, 256), "seed": Range(0, 2**63 - 1), "seeds": SEEDS, "steps": STEPS,
    "top": Range(1, 1_000_000), "workers": Range(0, 256),
}  # fmt: skip
PACK_SIZE = Range(10_000, 10**12)  # bytes of a packed study, or of each of its parts
PATIENCE = 5  # early stopping of fine-tuning after 5 evaluations without improvement; a run has 10
LENGTH = (  # of fine-tuning, as planning.finetune_rules.steps_for computes it
    "from the recipe; finetune: 25 epochs and at least 500 steps, fewer epochs above 51,200 images; on a CPU "
    "at most 12,800 images or two epochs"
)
FROM_RECIPE_OR_DATA = "(default: from the recipe; finetune chooses it from the images)"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of finetune and pretrain; the recipe supplies the values of options that are not set."""

    weights: Annotated[
        str,
        arg(
            metavar="FILE|FOLDER|NAME",
            help="Pretrained model to start from. It sets the architecture; excludes --model.",
            help_behavior_hint="(default: finetune chooses published weights; pretrain uses none)",
        ),
    ] = ""
    model: Annotated[str, arg(metavar="NAME", help="Train this model from scratch; excludes --weights.")] = ""
    out: Annotated[
        Path | None,
        arg(
            metavar="DIR",
            help="Run folder.",
            help_behavior_hint="(default: runs/<data>, then runs/<data>-2, ...)",
        ),
    ] = None
    recipe: Annotated[str, arg(metavar="NAME", help="Recipe name; see vitkit list recipes.")] = ""
    task: Annotated[
        str,
        arg(
            metavar="NAME",
            help="What is learned. finetune: segment (images with masks), detect (with boxes) or instances "
            "(with masks of objects). pretrain, "
            f"without labels: {', '.join(tasks_without_labels())}. The recipe of that name is the default.",
            help_behavior_hint="(default: the task of the recipe)",
        ),
    ] = ""
    teacher: Annotated[
        str,
        arg(metavar="FILE|NAME", help="Model whose features or labels a task of distillation learns."),
    ] = ""
    train: Annotated[
        str,
        arg(
            metavar="all|head|last-N|lora",
            help="What to train; the rest is frozen. last-N: the last N blocks, the final norm and the head; "
            "lora: LoRA adapters and the head.",
            help_behavior_hint="(default: all)",
        ),
    ] = ""
    image_size: Annotated[
        str | None,
        arg(metavar="N|HxW", help="Image resolution in pixels.", help_behavior_hint=FROM_RECIPE_OR_DATA),
    ] = None
    strict_size: Annotated[
        bool,
        arg(help="Reject a resolution that is not a multiple of the patch size, instead of dropping pixels."),
    ] = False
    batch: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Global batch size: images per step over all processes.",
            help_behavior_hint=FROM_RECIPE_OR_DATA,
        ),
    ] = None
    steps: Annotated[
        int | None,
        arg(metavar="N", help="Number of training steps.", help_behavior_hint=f"(default: {LENGTH})"),
    ] = None
    epochs: Annotated[
        float | None, arg(metavar="X", help="Training length in epochs, instead of --steps.")
    ] = None
    keep: Annotated[
        Literal["best", "last"] | None,
        arg(
            metavar="best|last",
            help="Which weights to save: best on the validation split, or last.",
            help_behavior_hint="(default: last, but for finetune an earlier one that is clearly better on "
            "validation; best for the recipes table4, lora and scratch)",
        ),
    ] = None
    patience: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Early stopping: stop after N evaluations without improvement; 0 disables it.",
            help_behavior_hint=f"(default: 0; {PATIENCE} of 10 for the recipes table4, lora and scratch)",
        ),
    ] = None
    lr: Annotated[
        float | None,
        arg(
            metavar="X",
            help="Peak learning rate.",
            help_behavior_hint="(default: from the recipe; finetune chooses it by the batch)",
        ),
    ] = None
    seed: Annotated[int | None, arg(metavar="N", help="Random seed.", help_behavior_hint="(default: 0)")] = (
        None
    )
    subset: Annotated[
        str | None, arg(metavar="PART", help="Train on a subset: 1000 images, 10%, 25/class, imbalanced=100.")
    ] = None
    corrections: Annotated[
        str,
        arg(
            metavar="FILE",
            help="Exclude or relabel images as the column action of this table says; vitkit doctor --model "
            "writes one.",
        ),
    ] = ""
    against: Annotated[
        tuple[str, ...],
        arg(
            metavar="DATA...",
            help="Remove images from train that are duplicates or near-duplicates of images in these sets.",
        ),
    ] = ()
    set: Annotated[
        tuple[str, ...],
        arg(metavar="FIELD=VALUE...", help="Override any recipe field, e.g. model.head=gap."),
    ] = ()
    device: Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto"
    workers: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Data loader worker processes.",
            help_behavior_hint="(default: by the number of CPU cores, at most 16)",
        ),
    ] = None
    decoded: Annotated[
        Path | None,
        arg(metavar="DIR", help="Cache decoded images in this folder for later epochs and runs."),
    ] = None
    max_bad: Annotated[float, arg(metavar="X", help="Maximum fraction of unreadable images.")] = 0.05
    compile: Annotated[
        Literal["no", "yes", "auto"],
        arg(metavar="[auto]", help="Compile the model (torch.compile). auto: only where it pays."),
    ] = "no"
    recompute: Annotated[
        bool, arg(help="Activation checkpointing: less memory, about a third more time.")
    ] = False
    cuda_graph: Annotated[
        bool,
        arg(help="On a GPU, launch the kernels one by one instead of replaying a CUDA graph."),
    ] = True
    deterministic: Annotated[bool, arg(help="Use only deterministic GPU kernels (slower).")] = False
    parallel: Annotated[
        Literal["auto", "ddp", "fsdp"],
        arg(
            metavar="auto|ddp|fsdp",
            help="Under torchrun: replicate the model (ddp) or shard it (fsdp). auto: fsdp only if the model "
            "does not fit on one device.",
        ),
    ] = "auto"
    save_aside: Annotated[bool, arg(help="Write checkpoints asynchronously.")] = False
    track: Annotated[
        tuple[str, ...],
        arg(
            metavar="NAME...",
            help="Experiment trackers: wandb, mlflow, trackio. TensorBoard logs are always written.",
        ),
    ] = ()
    price_per_hour: Annotated[
        float | None, arg(metavar="X", help="Price of one device-hour, to report the cost of the run.")
    ] = None
    accept_changed_data: Annotated[
        bool,
        arg(help="Resume even if images or class names changed; the classes must stay the same."),
    ] = False
    more_steps: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Continue a finished run for N steps from its last weights and optimizer state, with a new "
            "learning-rate schedule: warm-up of at most N/10 steps, then decay. The previous model is kept "
            "as model-STEP.safetensors.",
        ),
    ] = None
    split_of: Annotated[
        str,
        arg(metavar="RUN", help="Keep the train/val/test split of this run; only new images are assigned."),
    ] = ""
    plan: Annotated[bool, arg(help="Print the plan only: nothing is trained, downloaded or written.")] = False

    def changes(self) -> dict[str, Any]:
        """The options that were set and override the recipe field of the same name."""
        values = {name: getattr(self, name) for name in IN_RECIPES}
        values["image_size"] = parse_size(self.image_size)
        return {name: value for name, value in values.items() if value not in (None, "", ())}

    def words(self) -> list[str]:
        """These options as command-line flags."""
        flags: list[str] = []
        for field in fields(self):
            value, flag = getattr(self, field.name), field.name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
        return flags


def check_options(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Reject a value of the wrong type or out of range, as the command line does.

    hints: the type of each option. Ranges of numbers are in RANGES, parsers of texts in FORMS.
    """
    for name, value in values.items():
        kinds = [kind for kind in kinds_of(hints[name]) if kind is not type(None)]
        if value is None and len(kinds) < len(kinds_of(hints[name])):
            continue
        for item in value if isinstance(value, tuple) else (value,):
            check_option(name, item, kinds_of(kinds[0])[0])


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The possible types of one value: members of a union, element type of a tuple; Annotated is removed."""
    while get_origin(hint) in (Annotated, tuple):
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_option(name: str, value: Any, kind: Any) -> None:
    text, allowed = f"{name}={value!r}"[:100], RANGES.get(name)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise Error(f"{text}: expected one of {', '.join(get_args(kind))}", code="request.value")
    elif kind in (int, float):
        whole = kind is int
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or (allowed is not None and value not in allowed):
            expected = allowed.expected(whole=whole) if allowed else "a whole number" if whole else "a number"
            raise Error(f"{text}: expected {expected}", code="request.value")
    elif not isinstance(value, kind):
        expected = {bool: "True or False", str: "a string", Path: "a path"}.get(kind, "another type")
        raise Error(f"{text}: expected {expected}", code="request.value")
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
        raise Error(f"--image-size {text!r}: expected N or HxW, e.g. 384 or 384x256", code="request.value")
    if not all(1 <= int(part) <= MOST_PIXELS for part in parts):
        raise Error(
            f"--image-size {text!r}: expected 1 to {MOST_PIXELS:,} pixels per side", code="request.value"
        )
    return int(parts[0]), int(parts[-1])


def parse_train(text: str) -> tuple[str, int]:
    """'all', 'head', 'lora' or 'last-4' -> the kind and, for the last blocks, their number."""
    match = re.fullmatch(r"(all|head|lora)|(last)-([1-9][0-9]{0,3})", text)
    if match is None:
        raise Error(
            f"--train {text!r}: expected all, head, lora or last-N, e.g. last-4", code="request.value"
        )
    return match[1] or match[2], int(match[3] or 0)


def check_device(name: str) -> None:
    """Reject a device that no model can run on."""
    if not re.fullmatch(f"auto|({'|'.join(DEVICES)})(:[0-9]{{1,3}})?", name):
        raise Error(
            f"--device {name!r}: expected auto, {', '.join(DEVICES)}, or a numbered device such as cuda:1",
            code="request.value",
        )


def parse_view(text: str) -> tuple[str, int | None]:
    """'model', 'squash', 'fit', 'windows', 'centre' or 'centre:256' -> the kind and any shorter side."""
    match = re.fullmatch(r"(model|squash|fit|windows|cent(?:re|er))(?::([0-9]{1,5}))?", text)
    if match is None or (match[2] and not match[1].startswith("cent")) or match[2] == "0":
        raise Error(
            f"--view {text!r}: expected model (the model's own), squash (resize without cropping), fit "
            "(keep the aspect ratio and pad), windows (of a segmenter: the image in overlapping windows), "
            "centre (shorter side to 256/224 of the size, then centre crop) or centre:N (shorter side to N)",
            code="request.value",
        )
    return "centre" if match[1] == "center" else match[1], int(match[2]) if match[2] else None


def parse_frozen_view(text: str) -> None:
    """Check a view of fewshot: one of parse_view, or that of the official evaluation code."""
    try:
        text == "official" or parse_view(text)
    except ValueError as error:
        raise Error(
            f"{error}, or official (squash to 256/224 of the size, then centre crop)", code="request.value"
        ) from None


def part_of(text: str) -> dict[str, int | float]:
    """'1000', '10%', '25/class' or 'imbalanced=100' as arguments of data.splits.subset; empty: all images."""
    if not text:
        return {}
    match = re.fullmatch(
        r"(?P<count>[0-9]{1,12})|(?P<per_class>[0-9]{1,12})/class|(?P<fraction>[0-9]+(?:\.[0-9]+)?)%"
        r"|imbalanced=(?P<imbalance>[0-9]{1,6})",
        text.strip(),
    )
    name = match.lastgroup or "" if match else ""
    number = float(match[name]) if match else 0.0
    if number <= (name == "imbalance") or (name == "fraction" and number > 100):
        forms = "1000 (images), 10%, 25/class or imbalanced=100"
        raise Error(f"--subset {text!r}: expected a part such as {forms}", code="request.value")
    return {name: number / 100 if name == "fraction" else int(number)}


FORMS: dict[str, Callable[[str], Any]] = {  # parsers of text options; their Error names the expected form
    "device": check_device, "image_size": parse_size, "subset": part_of, "train": parse_train,
    "view": parse_view,
}  # fmt: skip


def parse_budget(text: str, flag: str = "--budget") -> float:
    """'20min', '90s' or '1.5h' -> seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    seconds = float(match[1]) * SECONDS.get(match[2] or "min", 0) if match else 0.0
    if not 0 < seconds <= LONGEST:
        raise Error(
            f"{flag} {text!r}: expected a duration of at most a year, e.g. 90s, 20min or 1.5h",
            code="request.value",
        )
    return seconds


def size_in_bytes(text: str, flag: str = "--max-bytes", allowed: Range = SERVICE["max_bytes"]) -> int:
    """'10MB', '500kB', '2e6' or '1000000' -> bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = float(match[1]) * BYTES[match[2]] if match else 0.0
    except (KeyError, ValueError):
        size = 0.0
    if size not in allowed:
        raise Error(
            f"{flag} {text!r}: expected {allowed.least:,} to {allowed.largest:,} bytes, e.g. 10MB or 500kB",
            code="request.value",
        )
    return int(size)


def parse_l2(text: str) -> float | None:
    """The L2 penalty of fewshot: a number above 0, or None for a grid search."""
    if text == "grid":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value not in PENALTY:
        raise Error(f"--l2 {text!r}: expected {PENALTY.expected(whole=False)}, or grid", code="request.value")
    return value
