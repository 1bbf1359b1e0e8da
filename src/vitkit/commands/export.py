"""vitkit export: a file for other runtimes, kept only if its own runtime gives the model's answers."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.commands.shared import Emit, loaded
from vitkit.errors import Error
from vitkit.inference.agreement import Agreement, agreement, sample_images, warn_unread
from vitkit.inference.export import NAMES, check_kind, runner, write
from vitkit.inference.graphs import TYPES, Form, check_form
from vitkit.inference.predict import logits
from vitkit.models.adapt import adapt
from vitkit.models.variants import Model
from vitkit.models.vit import ViTConfig, dropped
from vitkit.report.terminal import say, warn
from vitkit.tasks.task import task_of

CHECKED, CALIBRATED = 16, 128  # images, at most
LEAST_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}  # of a parameter
FULL = 64 * 1024  # bytes; a disk with fewer is full


@dataclass(frozen=True)
class Comparison:
    """The file and the model on the same images."""

    size: tuple[int, int]
    batch: int
    result: Agreement

    def text(self) -> str:
        height, width = self.size
        return f"{height}x{width}, batch {self.batch}: {self.result.text()}"

    def to_json(self) -> dict[str, Any]:
        return {"size": list(self.size), "batch": self.batch} | self.result.to_json()


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was checked."""

    files: tuple[Path, ...]
    format: str
    precision: str
    output: str  # what the graph gives: logits, features or probabilities
    bytes: int
    compared: tuple[Comparison, ...]
    unread: int = 0  # images that could not be read, and were left out

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [str(path) for path in self.files],
            "format": self.format,
            "precision": self.precision,
            "output": self.output,
            "bytes": self.bytes,
            "compared": [one.to_json() for one in self.compared],
            "unread": self.unread,
        }


def export(
    model: Model,
    out: str | os.PathLike,
    *,
    precision: str = "fp32",
    image_size: tuple[int, int] | None = None,
    strict_size: bool = False,
    any_size: bool = False,
    pixels: bool = False,
    compiled: bool = False,
    images: Sequence[str] = (),
    calibrate: Sequence[str] = (),
    overwrite: bool = False,
    quiet: bool = False,
) -> Exported:
    """Write a model as .onnx, .pt2 or .xml beside `out`, run and compare it, and only then put it there.

    Of `images` and `calibrate`, those that cannot be read are left out and counted; unless `quiet`, a line on
    standard error names them.
    """
    out, form = Path(out), Form(precision=precision, pixels=pixels, any_size=any_size)
    check_output(model, out, form, compiled=compiled, calibrated=bool(calibrate))
    check_free(out, overwrite)
    model = model.eval() if image_size is None else adapt(model.eval(), image_size=image_size)
    dropped(model.config, strict=strict_size)
    check_form(model, form)
    unread: set[str] = set()
    learned, samples = chosen(model, images, calibrate, unread, quiet)
    needed = sum(p.numel() for p in model.parameters()) * LEAST_BYTES[precision]
    with beside(out, needed) as trial:
        write(model, form, trial, calibrate=learned, compiled=compiled)
        compared = tuple(compare(model, form, trial, images, samples, compiled))
        if not all(one.result.ok for one in compared):
            numbers = "; ".join(one.text() for one in compared)
            raise Error(
                f"{out} was not written: it disagrees with the model. {numbers}", code="export.disagrees"
            )
        return Exported(
            files=publish(trial.parent, out),
            format=NAMES[out.suffix] + (" (AOTInductor)" if compiled else ""),
            precision=precision,
            output=form.output(model),
            bytes=sum(path.stat().st_size for path in siblings(out)),
            compared=compared,
            unread=len(unread),
        )


def check_output(model: Model, out: Path, form: Form, *, compiled: bool, calibrated: bool) -> None:
    """Refuse a file that cannot be written, or not be compared, before anything takes time."""
    if form.precision not in TYPES:
        raise Error(f"no precision {form.precision!r}; known: {', '.join(TYPES)}", code="request.value")
    check_kind(out, form, compiled=compiled, device=next(model.parameters()).device.type)
    if (form.precision == "int8") != calibrated:
        raise Error(
            "int8 is calibrated: --precision int8 and --calibrate DATA|IMAGES go together",
            code="request.conflict",
        )
    if model.config.channels != 3:
        raise Error(
            f"the model takes {model.config.channels} channels; only RGB can be compared",
            code="export.unsupported",
        )


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse to replace files, OpenVINO's or ONNX's second one too, unless that is asked for."""
    if not overwrite and (there := siblings(out)):
        names = " and ".join(str(path) for path in reversed(there))
        raise Error(
            f"{names} exist{'s' * (len(there) == 1)}; give another name, or --overwrite", code="file.exists"
        )


def chosen(
    model: Model, images: Sequence[str], calibrate: Sequence[str], unread: set[str], quiet: bool
) -> tuple[Tensor | None, Tensor]:
    """Images to calibrate on and images to compare on; of one collection, every eighth is for comparing.

    unread: gets the names of those that could not be read.
    """

    def sampled(count: int, places: Sequence[str]) -> Tensor:
        return sample_images(model, count, places=places, unread=left_out)

    def left_out(bad: list[tuple[str, str]], total: int) -> None:
        if not quiet:
            warn_unread(bad, total)
        unread.update(name for name, _ in bad)

    samples = sampled(CHECKED, images) if images or not calibrate else None
    learned = sampled(CALIBRATED, calibrate) if calibrate else None
    if samples is None:
        assert learned is not None
        held = torch.arange(len(learned)) % 8 == 7
        samples, learned = (learned[held], learned[~held]) if held.any() else (learned, learned)
    return learned, samples


def compare(
    model: Model, form: Form, path: Path, images: Sequence[str], samples: Tensor, compiled: bool
) -> Iterator[Comparison]:
    """At batch 1 and at another; at another size too, not square, where any size is taken."""
    run = runner(model, form, path, compiled=compiled)
    if len(samples) < 3:
        samples = samples.repeat(3, 1, 1, 1)
    sets = [samples[:1], samples]
    if form.any_size:
        sets.append(sample_images(model, CHECKED, size=other_size(model), places=images)[:3])
    for batch in sets:
        values = logits(model, batch)
        if form.pixels:
            values = task_of(model).activate(values)
        height, width = batch.shape[2:]
        yield Comparison((height, width), len(batch), agreement(values, run(batch), form.precision))


def other_size(model: Model) -> tuple[int, int]:
    c = model.config
    step = c.stride if isinstance(c, ViTConfig) else 32
    height, width = c.covered if isinstance(c, ViTConfig) else c.image_size
    return max(height + step, 2 * step), max(width + 2 * step, 2 * step)


@contextmanager
def beside(out: Path, needed: int) -> Iterator[Path]:
    """A place of the same name in a folder beside, for so many bytes; it goes again whatever happens."""
    if not out.parent.is_dir():
        raise Error(f"cannot write {out}: no folder {out.parent}", code="file.not-found")
    room = shutil.disk_usage(out.parent)
    if room.total and room.free < needed:  # /proc and its like have no room at all, and another error
        raise full_disk(out, f"{needed:,} bytes are needed, {room.free:,} are free")
    try:
        folder = tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent)
    except OSError as error:
        raise Error(f"cannot write {out}: {error.strerror}", code="file.not-writable") from None
    try:
        yield Path(folder) / out.name
    except (OSError, RuntimeError) as error:  # libraries report a full disk in many ways, or write on
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = shutil.disk_usage(folder).free
        if full or free < FULL:
            raise full_disk(out, f"{free:,} bytes were free in the end") from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def full_disk(out: Path, details: str) -> OSError:
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {details}; nothing was written", str(out))


def siblings(out: Path) -> list[Path]:
    """The file and those that belong to it, as far as they are there; the one that is opened last."""
    others = [out.with_suffix(".bin")] if out.suffix == ".xml" else [out.with_name(f"{out.name}.data")]
    return [path for path in (*others, out) if path.exists()]


def publish(folder: Path, out: Path) -> tuple[Path, ...]:
    """Move the files of a folder to their place, all or none: what was there is put back if one fails."""
    aside = folder / "before"
    aside.mkdir()
    old, new = siblings(out), siblings(folder / out.name)
    try:
        for path in old:
            os.rename(path, aside / path.name)
        for path in new:
            os.rename(path, out.parent / path.name)
    except OSError as error:
        for path in aside.iterdir():
            os.replace(path, out.parent / path.name)
        raise Error(
            f"cannot write {out}: {error.strerror}; what was there is untouched", code="file.not-writable"
        ) from None
    return tuple(out.parent / path.name for path in reversed(new))


def export_verb(place: str, out: Path, device: str, *, emit: Emit, **options: Any) -> None:
    """Export, and print what was written and how near it is."""
    if not emit:
        say(f"writing {out} and running it ...")
    done = export_loaded(place, out, device, say=warn, **options)
    if emit:
        return emit(done.to_json())
    for one in done.compared:
        say(one.text())
    files = ", ".join(str(path) for path in done.files)
    say(f"{files}: {done.format} {done.precision}, {done.bytes / 1e6:,.1f} MB, gives {done.output}")


def export_loaded(
    model: Model | str, out: Path, device: str, *, say: Callable[[str], None], **options: Any
) -> Exported:
    """A model, or the one at a place, exported; `say` gets a line on pixels that its patches do not cover."""
    check_free(out, options["overwrite"])  # before a model is loaded or fetched
    model = loaded(model, device)
    if note := dropped(model.config, options["image_size"]):
        say(note)
    return export(model, out, **options)
