"""Which engine was the fastest for a model on this machine, and its graph, in the user's cache folder."""

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.io.cache import MAKING, cache_folder, touch, trim
from vitkit.io.files import replace_file, sha256
from vitkit.models.variants import Model
from vitkit.weights.card import card_of, to_json

LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf")
SUMS = "sha256.json"  # of the files of a graph, beside them
LIMIT = 10 * 10**9  # bytes of all engines in the user's cache folder; a graph is as large as its model


class Memory:
    """A folder for each model and set of versions; a choice for each machine and batch in it."""

    def __init__(
        self,
        model: Model,
        batch: int,
        calibrate: Tensor | None = None,
        folder: Path | None = None,
        log: Callable[[str], None] = lambda text: None,
    ):
        self.model, self.batch, self.calibrate, self.log = model, batch, calibrate, log
        self.root = cache_folder() / "engines" if folder is None else folder
        self.limit = LIMIT if folder is None else None  # from a folder that was given nothing is removed

    @cached_property
    def folder(self) -> Path:
        """Of this model's graphs, as these versions write them."""
        digest = hashlib.sha256(to_json(card_of(self.model, "vitkit")).encode("utf-8", "surrogatepass"))
        digest.update(json.dumps(versions()).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return self.root / digest.hexdigest()[:32]

    @cached_property
    def calibration(self) -> str:
        """A name for the images of int8."""
        if self.calibrate is None:
            return ""
        return hashlib.sha256(self.calibrate.numpy().tobytes()).hexdigest()[:16]

    @cached_property
    def device(self) -> str:
        """What computes: the processor, or the GPU where the model is."""
        device = next(self.model.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()

    @property
    def note(self) -> Path:
        """The file of the choice."""
        here = json.dumps([self.device, torch.get_num_threads(), self.calibration])
        return self.folder / f"batch-{self.batch}-{hashlib.sha256(here.encode()).hexdigest()[:16]}.json"

    def choice(self) -> str | None:
        touch(self.folder)
        try:
            return str(json.loads(self.note.read_text("utf-8"))["engine"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, engine: str, seconds: float | None) -> None:
        """Write the choice down; a cache that cannot be written is done without."""
        told = {"engine": engine, "batch": self.batch, "seconds": seconds, "device": self.device}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.note, lambda path: path.write_text(json.dumps(told | versions()), "utf-8"))
        except OSError:
            return

    def forget(self) -> None:
        """The choice and the graphs, which may be damaged."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def file(self, name: str, write: Callable[[Path], Any]) -> Path:
        """A graph of this model, written once, in a folder with its siblings (.bin, .data)."""
        folder = self.folder / name.replace(".", "-")
        touch(self.folder)
        if (folder / name).exists():
            if intact(folder):
                return folder / name
            self.log(f"{folder / name}: the cached graph is damaged or of an older kind; it is made again")
            shutil.rmtree(folder, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trial = Path(tempfile.mkdtemp(prefix=MAKING, dir=self.folder))
        except OSError:  # no cache here: for this process alone
            self.spare = tempfile.TemporaryDirectory(prefix="vitkit-")
            write(Path(self.spare.name) / name)
            return Path(self.spare.name) / name
        try:
            write(trial / name)
            (trial / SUMS).write_text(json.dumps(sums(trial)), "utf-8")
            with suppress(OSError):  # another process was quicker: its file is as good
                trial.rename(folder)
        finally:
            shutil.rmtree(trial, ignore_errors=True)
        if self.limit is not None:
            trim(self.root, self.limit, using=self.folder)
        return folder / name


def sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a graph."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != SUMS:
            found[path.name] = sha256(path)
    return found


def intact(folder: Path) -> bool:
    """Whether the files of a graph are those that were written."""
    try:
        return json.loads((folder / SUMS).read_text("utf-8")) == sums(folder)
    except (OSError, ValueError):
        return False


def versions() -> dict[str, str]:
    """Of vitkit and of what takes part, as far as it is installed."""
    found = {}
    for name in ("vitkit", *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def processor() -> str:
    """The processor by name and abilities, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return f"{platform.machine()} {hashlib.sha256(repr(sorted(told)).encode()).hexdigest()[:16]}"
