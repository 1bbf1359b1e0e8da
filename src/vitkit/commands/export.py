"""`vitkit export`: a file for other runtimes, written only if its outputs match the model's."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitkit.commands.shared import Emit, loaded
from vitkit.errors import Error
from vitkit.inference.agreement import Agreement, agreement, sample_images, warn_unread
from vitkit.inference.export import NAMES, check_kind, runner, write
from vitkit.inference.graphs import TYPES, Form, check_form
from vitkit.inference.predict import logits, with_merging
from vitkit.models.adapt import adapt
from vitkit.models.dense.dense_model import DenseModel
from vitkit.models.variants import Model
from vitkit.models.vit import ViTConfig, dropped
from vitkit.report.terminal import say, warn
from vitkit.tasks.shared.dense import resized
from vitkit.tasks.task import task_of

CHECKED, CALIBRATED = 16, 128  # maximum number of images
LEAST_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}  # per parameter
FULL = 64 * 1024  # bytes; a disk with less free space counts as full


@dataclass(frozen=True)
class Comparison:
    """Outputs of the exported file compared with the model on the same images."""

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
    """The exported files and how they were checked."""

    files: tuple[Path, ...]
    format: str
    precision: str
    output: str  # of the graph: logits, features or probabilities
    bytes: int
    compared: tuple[Comparison, ...]
    unread: int = 0  # unreadable images, which were skipped

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [str(path) for path in self.files],
            "format": self.format,
            "precision": self.precision,
            "output": self.output,
            "bytes": self.bytes,
            "compared": [comparison.to_json() for comparison in self.compared],
            "unread": self.unread,
        }


def export(
    model: Model,
    out: str | os.PathLike,
    *,
    precision: str = "fp32",
    image_size: tuple[int, int] | None = None,
    strict_size: bool = False,
    merge_tokens: int = 0,
    any_size: bool = False,
    pixels: bool = False,
    compiled: bool = False,
    images: Sequence[str] = (),
    calibrate: Sequence[str] = (),
    overwrite: bool = False,
    quiet: bool = False,
) -> Exported:
    """Write a model as .onnx, .pt2 or .xml to a temporary file, compare it, and then move it to `out`.

    Unreadable files among `images` and `calibrate` are skipped and counted and, unless `quiet`, reported on
    standard error.
    """
    out, form = Path(out), Form(precision=precision, pixels=pixels, any_size=any_size)
    check_output(model, out, form, compiled=compiled, calibrated=bool(calibrate))
    check_free(out, overwrite)
    check_form(model, form)
    model = model.eval() if image_size is None else at_size(model.eval(), image_size)
    model = cast(Model, with_merging(model, merge_tokens))
    dropped(model.config, strict=strict_size)
    check_form(model, form)
    unread: set[str] = set()
    calibration, samples = calibration_and_test(model, images, calibrate, unread, quiet)
    needed = sum(p.numel() for p in model.parameters()) * LEAST_BYTES[precision]
    with temporary_path(out, needed) as trial:
        write(model, form, trial, calibrate=calibration, compiled=compiled)
        compared = tuple(compare(model, form, trial, images, samples, compiled))
        if not all(comparison.result.ok for comparison in compared):
            details = "; ".join(comparison.text() for comparison in compared)
            raise Error(
                f"{out} was not written: its outputs differ from the model's. {details}",
                code="export.disagrees",
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


def at_size(model: Model, image_size: tuple[int, int]) -> Model:
    """The model for images of another size; positions are resized."""
    if not isinstance(model, DenseModel):
        return adapt(model, image_size=image_size)
    return resized(model, image_size).eval()


def check_output(model: Model, out: Path, form: Form, *, compiled: bool, calibrated: bool) -> None:
    """Reject an export that cannot be written or compared before any long work."""
    if form.precision not in TYPES:
        raise Error(
            f"unknown precision {form.precision!r}; expected one of {', '.join(TYPES)}", code="request.value"
        )
    check_kind(out, form, compiled=compiled, device=next(model.parameters()).device.type)
    if (form.precision == "int8") != calibrated:
        raise Error(
            "--precision int8 and --calibrate DATA|IMAGE must be used together",
            code="request.conflict",
        )
    if model.config.channels != 3:
        raise Error(
            f"the model has {model.config.channels} input channels; only RGB models can be exported",
            code="export.unsupported",
        )


def check_free(out: Path, overwrite: bool) -> None:
    """Reject existing files, including the weights files of OpenVINO and ONNX, without --overwrite."""
    if not overwrite and (existing := siblings(out)):
        names = " and ".join(str(path) for path in reversed(existing))
        verb = "exists" if len(existing) == 1 else "exist"
        raise Error(f"{names} already {verb}; use another name or --overwrite", code="file.exists")


def calibration_and_test(
    model: Model, images: Sequence[str], calibrate: Sequence[str], unread: set[str], quiet: bool
) -> tuple[Tensor | None, Tensor]:
    """Images for calibration and for comparison; with --calibrate alone, every eighth is for comparison.

    unread: the names of unreadable files are added to it.
    """

    def sampled(count: int, places: Sequence[str]) -> Tensor:
        return sample_images(model, count, places=places, unread=skip)

    def skip(bad: list[tuple[str, str]], total: int) -> None:
        if not quiet:
            warn_unread(bad, total)
        unread.update(name for name, _ in bad)

    samples = sampled(CHECKED, images) if images or not calibrate else None
    calibration = sampled(CALIBRATED, calibrate) if calibrate else None
    if samples is None:
        assert calibration is not None
        held_out = torch.arange(len(calibration)) % 8 == 7
        if not held_out.any():
            return calibration, calibration
        samples, calibration = calibration[held_out], calibration[~held_out]
    return calibration, samples


def compare(
    model: Model, form: Form, path: Path, images: Sequence[str], samples: Tensor, compiled: bool
) -> Iterator[Comparison]:
    """Compare at batch size 1 and a larger one and, with any_size, also at another, non-square size."""
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
        result = agreement(values, run(batch), form.precision, task_of(model))
        yield Comparison((height, width), len(batch), result)


def other_size(model: Model) -> tuple[int, int]:
    c = model.config
    step = c.stride if isinstance(c, ViTConfig) else 32
    height, width = c.covered if isinstance(c, ViTConfig) else c.image_size
    return max(height + step, 2 * step), max(width + 2 * step, 2 * step)


@contextmanager
def temporary_path(out: Path, needed: int) -> Iterator[Path]:
    """A path of the same name in a temporary sibling folder with `needed` free bytes; removed at the end."""
    if not out.parent.is_dir():
        raise Error(f"cannot write {out}: folder {out.parent} does not exist", code="file.not-found")
    usage = shutil.disk_usage(out.parent)
    if usage.total and usage.free < needed:  # virtual file systems such as /proc report 0 and fail later
        raise full_disk(out, f"{needed:,} bytes are needed, {usage.free:,} are free")
    try:
        folder = tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent)
    except OSError as error:
        raise Error(f"cannot write {out}: {error.strerror}", code="file.not-writable") from None
    try:
        yield Path(folder) / out.name
    except (OSError, RuntimeError) as error:  # libraries report a full disk in many ways
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = shutil.disk_usage(folder).free
        if full or free < FULL:
            raise full_disk(out, f"{free:,} bytes are left") from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def full_disk(out: Path, details: str) -> OSError:
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {details}; nothing was written", str(out))


def siblings(out: Path) -> list[Path]:
    """The existing files of an export: weights file first, then the file itself."""
    others = [out.with_suffix(".bin")] if out.suffix == ".xml" else [out.with_name(f"{out.name}.data")]
    return [path for path in (*others, out) if path.exists()]


def publish(folder: Path, out: Path) -> tuple[Path, ...]:
    """Move the files of a folder into place, all or none: old files are restored if a move fails."""
    backup = folder / "before"
    backup.mkdir()
    old, new = siblings(out), siblings(folder / out.name)
    try:
        for path in old:
            os.rename(path, backup / path.name)
        for path in new:
            os.rename(path, out.parent / path.name)
    except OSError as error:
        for path in backup.iterdir():
            os.replace(path, out.parent / path.name)
        raise Error(
            f"cannot write {out}: {error.strerror}; existing files are unchanged", code="file.not-writable"
        ) from None
    return tuple(out.parent / path.name for path in reversed(new))


def export_verb(place: str, out: Path, device: str, *, emit: Emit, **options: Any) -> None:
    """Export a model and print the files and the comparison."""
    if not emit:
        say(f"writing {out} and comparing it with the model ...")
    exported = export_loaded(place, out, device, say=warn, **options)
    if emit:
        return emit(exported.to_json())
    for comparison in exported.compared:
        say(comparison.text())
    files = ", ".join(str(path) for path in exported.files)
    size = f"{exported.bytes / 1e6:,.1f} MB"
    say(f"{files}: {exported.format} {exported.precision}, {size}, output: {exported.output}")


def export_loaded(
    model: Model | str, out: Path, device: str, *, say: Callable[[str], None], **options: Any
) -> Exported:
    """Export a model or the model at a path; `say` is called if its patches do not cover the whole image."""
    check_free(out, options["overwrite"])  # before a model is loaded or downloaded
    model = loaded(model, device)
    if note := dropped(model.config, options["image_size"]):
        say(note)
    return export(model, out, **options)
