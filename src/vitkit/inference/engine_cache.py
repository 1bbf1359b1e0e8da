"""The on-disk cache of inference engines: the fastest engine for a model on this machine, and its graphs."""

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
SUMS = "sha256.json"  # checksums of a graph's files, in the same folder
LIMIT = 10 * 10**9  # bytes of the default cache folder; a graph is as large as its model


class EngineCache:
    """One folder per model and set of library versions, with one saved choice per device and batch size."""

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
        self.limit = LIMIT if folder is None else None  # a folder of the caller's is never trimmed

    @cached_property
    def folder(self) -> Path:
        """Keyed by weights, configuration and library versions, any of which changes the graphs."""
        digest = hashlib.sha256(to_json(card_of(self.model, "vitkit")).encode("utf-8", "surrogatepass"))
        digest.update(json.dumps(versions()).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return self.root / digest.hexdigest()[:32]

    @cached_property
    def calibration(self) -> str:
        """A hash of the int8 calibration images; empty without them."""
        if self.calibrate is None:
            return ""
        return hashlib.sha256(self.calibrate.numpy().tobytes()).hexdigest()[:16]

    @cached_property
    def device(self) -> str:
        """The name of the GPU that the model is on, or of the CPU."""
        device = next(self.model.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()

    @property
    def choice_file(self) -> Path:
        setup = json.dumps([self.device, torch.get_num_threads(), self.calibration])
        return self.folder / f"batch-{self.batch}-{hashlib.sha256(setup.encode()).hexdigest()[:16]}.json"

    def load_choice(self) -> str | None:
        """The name of the engine that was saved, if any."""
        touch(self.folder)
        try:
            return str(json.loads(self.choice_file.read_text("utf-8"))["engine"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save_choice(self, engine: str, seconds: float | None) -> None:
        """Save the fastest engine; a cache that cannot be written is no error."""
        record = {"engine": engine, "batch": self.batch, "seconds": seconds, "device": self.device}
        text = json.dumps(record | versions())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.choice_file, lambda path: path.write_text(text, "utf-8"))
        except OSError:
            return

    def clear(self) -> None:
        """Remove the choice and the graphs, which may be damaged."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def file(self, name: str, write: Callable[[Path], Any]) -> Path:
        """The path of a graph, written on first use into a folder of its own with its .bin or .data file."""
        folder = self.folder / name.replace(".", "-")
        touch(self.folder)
        if (folder / name).exists():
            if intact(folder):
                return folder / name
            self.log(f"{folder / name}: the cached graph is damaged or outdated; rebuilding it")
            shutil.rmtree(folder, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=MAKING, dir=self.folder))
        except OSError:  # the cache is not writable: a temporary folder for this process
            self.temporary = tempfile.TemporaryDirectory(prefix="vitkit-")
            write(Path(self.temporary.name) / name)
            return Path(self.temporary.name) / name
        try:
            write(staging / name)
            (staging / SUMS).write_text(json.dumps(checksums(staging)), "utf-8")
            with suppress(OSError):  # another process was faster: its files are the same
                staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if self.limit is not None:
            trim(self.root, self.limit, using=self.folder)
        return folder / name


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a graph."""
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name != SUMS}


def intact(folder: Path) -> bool:
    """Whether the files of a graph match their checksums."""
    try:
        return json.loads((folder / SUMS).read_text("utf-8")) == checksums(folder)
    except (OSError, ValueError):
        return False


def versions() -> dict[str, str]:
    """Versions of vitkit and of the libraries; empty for one that is not installed."""
    installed = {}
    for name in ("vitkit", *LIBRARIES):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = ""
    return installed


def processor() -> str:
    """Identifies the CPU by model and instruction sets, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    traits = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return f"{platform.machine()} {hashlib.sha256(repr(sorted(traits)).encode()).hexdigest()[:16]}"
