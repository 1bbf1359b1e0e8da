"""Errors that a user can put right, each with a stable code for programs."""

import errno
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

CODES = {  # area.reason -> what it means; docs/errors.md lists them
    # what was asked for
    "request.value": "A flag or an argument has a value outside of what it takes.",
    "request.unknown": "There is no verb, flag, field or name like this.",
    "request.conflict": "Two options exclude each other, or one needs another that is missing.",
    "request.missing": "Something that is needed was not given.",
    "request.extra-missing": "An optional library is not installed.",
    # files and folders
    "file.not-found": "A file or folder is not there.",
    "file.not-writable": "A file or folder cannot be written, or is in the way.",
    "file.exists": "The output is there already.",
    "file.unreadable": "A file cannot be read or is not what it should be.",
    "file.permission": "The system does not let this user read or write a file or folder.",
    "disk.full": "There is too little space left.",
    "system.failed": "The operating system reports a failure: a device, a process, a limit.",
    # data sets
    "data.not-found": "There is no data set at this place.",
    "data.empty": "The data set, or a split that is needed, has no images.",
    "data.layout": "The folder, table or archive is not laid out in a way that is understood.",
    "data.labels": "Labels are missing, malformed or do not fit.",
    "data.classes": "The classes are too few, or are not those that are needed.",
    "data.changed": "The data differs from that of the run.",
    "data.corrupt": "A data file is cut short or damaged.",
    "data.too-large": "A file is larger than what is accepted.",
    "data.too-many-bad": "More images are unreadable than a run accepts.",
    "data.unsafe": "A data file could run code, or names something outside of itself.",
    "image.unreadable": "An image cannot be decoded.",
    "image.too-large": "An image has more pixels than what is accepted.",
    # downloads and remote data
    "network.unreachable": "A server cannot be reached, or does not answer in time.",
    "network.refused": "A server answered with an error.",
    "network.changed": "What was fetched is not what was expected.",
    # weights
    "weights.not-found": "There are no weights of this name or at this place.",
    "weights.format": "The file is in no weight format that is known, or is malformed.",
    "weights.names": "Tensors are missing, or there are some that the model does not have.",
    "weights.shape": "A tensor has another shape than the model needs.",
    "weights.values": "A tensor holds values that cannot be right.",
    "weights.untrusted": "The file could run code or exhaust the machine, and was not read.",
    "weights.unsupported": "The format cannot hold this model.",
    # models
    "model.unknown": "There is no model of this name.",
    "model.config": "The model's options contradict each other or are out of range.",
    "model.input": "Images have a size or shape that the model does not take.",
    "model.unsupported": "The model lacks what this needs.",
    # recipes and runs
    "recipe.unknown": "There is no recipe of this name.",
    "recipe.unknown-field": "A recipe has no field of this name.",
    "recipe.value": "A field of a recipe has a value that it does not take.",
    "recipe.format": "A recipe file is malformed.",
    "run.not-found": "This is no run folder.",
    "run.changed": "The folder holds a run with other options.",
    "run.unfinished": "The run has not finished yet.",
    "run.locked": "Another process works in this folder.",
    "run.corrupt": "A file of the run folder is damaged.",
    "checkpoint.corrupt": "No checkpoint of the run can be read.",
    "checkpoint.mismatch": "A checkpoint does not fit the model or the number of processes.",
    "training.diverged": "The loss is not finite any more.",
    "training.out-of-memory": "The device has too little memory, even for the smallest micro-batch.",
    "training.stopped": "The run was interrupted.",
    "device.unavailable": "The device is not there or cannot compute.",
    # evaluation, inspection, studies
    "evaluation.unsupported": "This cannot be measured on this data or model.",
    "evaluation.classes": "The model's classes and the data's do not match.",
    "inspection.unsupported": "The model has nothing of this kind to show.",
    "study.unknown": "There is no study of this name.",
    "study.value": "A setting of a study is not one that it takes.",
    "study.corrupt": "A file of the study folder is damaged or belongs to another study.",
    # export and engines
    "export.unsupported": "The model cannot be exported like this.",
    "export.disagrees": "The exported model computes something else than the original.",
    "engine.unknown": "There is no engine of this name.",
    "engine.failed": "An engine cannot load or run the model.",
    # server
    "server.busy": "The server has more to do than it can; try again later.",
    "server.unauthorized": "The token is missing or wrong.",
    "server.request": "A request is malformed.",
    "server.too-large": "A request is larger than what is accepted.",
    "server.failed": "The server failed on this request.",
    "server.not-found": "There is no such address.",
}  # fmt: skip


class Error(ValueError):
    """What happened, with the value; what was expected; what to do. `code` is one of CODES and stays."""

    code = "request.value"

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        if code:
            self.code = code


class WrongType(Error, TypeError):
    """A value of another type than what is taken, for Python code; it is a TypeError, too."""


SYSTEM = {  # what the operating system reports -> code
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


def code_of(error: BaseException, other: str = "") -> str:
    """The code of any error: its own, or that of the system's reason, or `other`."""
    own = getattr(error, "code", None)
    if isinstance(own, str) and own in CODES:  # urllib and SystemExit have codes of other kinds
        return own
    if isinstance(error, OSError):
        return SYSTEM.get(error.errno or 0, other or "system.failed")
    return other or "request.value"


class ConfigError(Error):
    """A model's options contradict each other or are out of range."""

    code = "model.config"


class WeightsError(Error):
    """A weight file is not what it should be; the message names what was expected and what the file holds."""

    code = "weights.format"
