"""Errors that users can fix, each with a stable code for programs."""

import errno
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

CODES = {  # area.reason -> meaning; docs/reference/errors.md lists them
    # requests
    "request.value": "A flag or argument has a value that is not allowed.",
    "request.unknown": "There is no command, flag, field or name like this.",
    "request.conflict": "Two options exclude each other, or an option requires another one.",
    "request.missing": "A required argument or option is missing.",
    "request.extra-missing": "An optional dependency is not installed.",
    # files and folders
    "file.not-found": "A file or folder does not exist.",
    "file.not-writable": "A file or folder cannot be written, or something else is at its path.",
    "file.exists": "The output already exists.",
    "file.unreadable": "A file cannot be read or has unexpected content.",
    "file.permission": "This user has no permission to read or write a file or folder.",
    "disk.full": "There is not enough disk space.",
    "system.failed": "The operating system reported a failure of a device, a process or a limit.",
    # data sets
    "data.not-found": "There is no data set at this path or URL.",
    "data.empty": "The data set, or a required split, has no images.",
    "data.layout": "The layout of the folder, table or archive is not recognised.",
    "data.labels": "Labels are missing, malformed or inconsistent.",
    "data.classes": "There are too few classes, or not the expected ones.",
    "data.changed": "The data differs from the data of the run.",
    "data.corrupt": "A data file is truncated or damaged.",
    "data.too-large": "A file exceeds the size limit.",
    "data.too-many-bad": "More images are unreadable than a run tolerates.",
    "data.unsafe": "A data file could execute code, or refers to a path outside of itself.",
    "image.unreadable": "An image cannot be decoded.",
    "image.too-large": "An image exceeds the pixel limit.",
    # downloads and remote data
    "network.unreachable": "A server cannot be reached, or does not answer in time.",
    "network.refused": "A server answered with an error.",
    "network.changed": "The downloaded content is not the expected one.",
    # weights
    "weights.not-found": "There are no weights with this name or at this path.",
    "weights.gated": "The publisher gives these weights only to those who accept its licence.",
    "weights.format": "The weight file has an unknown format or is malformed.",
    "weights.names": "Tensors are missing, or do not belong to the model.",
    "weights.shape": "A tensor does not have the shape that the model needs.",
    "weights.values": "A tensor holds invalid values.",
    "weights.untrusted": "The file could execute code or exhaust the machine's memory, so it was not read.",
    "weights.unsupported": "The format cannot represent this model.",
    # models
    "model.unknown": "There is no model with this name.",
    "model.config": "The model's options are inconsistent or out of range.",
    "model.input": "The images do not have a size or shape that the model accepts.",
    "model.unsupported": "The model does not support this operation.",
    # recipes and runs
    "recipe.unknown": "There is no recipe with this name.",
    "recipe.unknown-field": "Recipes have no field with this name.",
    "recipe.value": "A recipe field has a value that is not allowed.",
    "recipe.format": "A recipe file is malformed.",
    "run.not-found": "This is not a run folder.",
    "run.changed": "The folder holds a run with different options.",
    "run.unfinished": "The run has not finished yet.",
    "run.locked": "Another process is using this folder.",
    "run.corrupt": "A file in the run folder is damaged.",
    "checkpoint.corrupt": "No checkpoint of the run can be read.",
    "checkpoint.mismatch": "A checkpoint does not match the model or the number of processes.",
    "training.diverged": "The loss is no longer finite.",
    "training.collapsed": "A model without labels gives all images the same output, so it learns nothing.",
    "training.out-of-memory": "The device is out of memory, even with the smallest micro-batch.",
    "training.stopped": "The run was interrupted.",
    "device.unavailable": "The device does not exist or cannot be used.",
    # evaluation, inspection, studies
    "evaluation.unsupported": "This metric is not available for this data or model.",
    "evaluation.classes": "The classes of the model and of the data do not match.",
    "inspection.unsupported": "The model does not support this inspection.",
    "study.unknown": "There is no study with this name.",
    "study.value": "A study setting has a value that is not allowed.",
    "study.corrupt": "A file in the study folder is damaged or belongs to another study.",
    # export and engines
    "export.unsupported": "The model cannot be exported in this way.",
    "export.disagrees": "The exported model's output differs from the original's.",
    "engine.unknown": "There is no engine with this name.",
    "engine.failed": "An engine cannot load or run the model.",
    # server
    "server.busy": "The server is overloaded; try again later.",
    "server.unauthorized": "The token is missing or wrong.",
    "server.request": "The request is malformed.",
    "server.too-large": "The request exceeds a size limit.",
    "server.failed": "The server failed to process the request.",
    "server.not-found": "There is no such endpoint.",
}  # fmt: skip


class Error(ValueError):
    """The message says what happened, what was expected and what to do; `code` is one of CODES."""

    code = "request.value"

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        if code:
            self.code = code


class WrongType(Error, TypeError):
    """A Python argument has the wrong type; also a TypeError."""


SYSTEM = {  # errno -> code
    errno.ENOENT: "file.not-found", errno.ENOTDIR: "file.not-found", errno.ENAMETOOLONG: "file.not-found",
    errno.ELOOP: "file.not-found", errno.EEXIST: "file.exists", errno.EISDIR: "file.not-writable",
    errno.EROFS: "file.not-writable", errno.ENOTEMPTY: "file.not-writable", errno.EACCES: "file.permission",
    errno.EPERM: "file.permission", errno.ENXIO: "file.unreadable", errno.ENODEV: "file.unreadable",
    errno.EIO: "file.unreadable", errno.ENOSPC: "disk.full", errno.EDQUOT: "disk.full",
    errno.ECONNREFUSED: "network.unreachable", errno.ECONNRESET: "network.unreachable",
    errno.EHOSTUNREACH: "network.unreachable", errno.ENETUNREACH: "network.unreachable",
    errno.ETIMEDOUT: "network.unreachable",
}  # fmt: skip


def did_you_mean(
    name: str, known: Iterable[str], *, matches: Sequence[str] = (), count: int = 1, cutoff: float = 0.6
) -> str:
    """The hint " did you mean X or Y?" for an unknown name; empty if no known name is similar.

    matches: suggestions that take precedence over names of similar spelling.
    """
    by_lower = {other.lower(): other for other in known}
    similar = [by_lower[lower] for lower in get_close_matches(name.lower(), by_lower, count, cutoff)]
    suggestions = matches or similar
    return f" did you mean {' or '.join(suggestions)}?" if suggestions else ""


def similar_path(place: str | os.PathLike[str]) -> str:
    """The hint " did you mean X?" for a path that does not exist; empty if no file there is similar.

    The first part of the path that does not exist is compared with the files beside it.
    """
    path = Path(place)
    try:
        wrong = next((part for part in (*reversed(path.parents), path) if not part.exists()), None)
        if wrong is None or not wrong.name:
            return ""
        with os.scandir(wrong.parent) as entries:
            names = [entry.name for entry in islice(entries, 10_000) if entry.name.isprintable()]
    except (OSError, ValueError):  # not readable, or not a path at all
        return ""
    beside = {name.lower(): name for name in names}
    for close in get_close_matches(wrong.name.lower(), beside, 1, 0.6):
        nearest = wrong.with_name(beside[close])
        whole = nearest / path.relative_to(wrong)
        return f" did you mean {whole if whole.exists() else nearest}?"
    return ""


def code_of(error: BaseException, default: str = "") -> str:
    """The code of any error: its own, the one for its errno, or `default`."""
    code = getattr(error, "code", None)
    if isinstance(code, str) and code in CODES:  # errors of urllib and SystemExit have other codes
        return code
    if isinstance(error, OSError):
        return SYSTEM.get(error.errno or 0, default or "system.failed")
    return default or "request.value"


class ConfigError(Error):
    """A model's options are inconsistent or out of range."""

    code = "model.config"


class WeightsError(Error):
    """A weight file does not match; the message says what was expected and what the file holds."""

    code = "weights.format"
