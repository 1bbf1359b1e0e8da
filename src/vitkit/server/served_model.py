"""The served model: loading, engine, description and attention maps."""

# L layers, K heads, T tokens, N patches; H, W pixels; h, w grid of patches

import logging
import os
import shutil
import stat
import tempfile
import time
from base64 import b64encode
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.names import readable_suffixes
from vitkit.data.views import View
from vitkit.errors import Error
from vitkit.inference.engines import Engine, choose_engine, torch_engine
from vitkit.inference.predict import evaluation_view, features, load_model, prepare_batch
from vitkit.inspection.attention import attention_rollout, class_map
from vitkit.inspection.subject import (
    array,
    at_least_float32,
    attention_count,
    eval_mode,
    grid_for,
    prefix_tokens,
    transformer,
)
from vitkit.io.system import READ
from vitkit.models.dense.dense_model import DenseModel
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, dropped
from vitkit.report.overlay import stretched, to_bytes
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.server.settings import MAX_IMAGES, Settings
from vitkit.tasks.task import task_of
from vitkit.weights.locate import RECIPE, inside, model_files, run_model


def attention_objection(model: Model) -> str:
    """Why a model has no attention maps over all patches; empty if it has them."""
    if isinstance(model, DenseModel):
        return f"a model for {model.task} answers with places in the image; it has no class maps"
    try:
        vit = transformer(model)
        if attention_count(vit) and vit.config.attention == "axial":
            return "this model has axial attention, so no layer attends to all patches"
    except ValueError as error:
        return str(error)
    return ""


def attention_maps(model: ViT, pixels: Tensor, target: int | None) -> dict[str, Any]:
    """The attention maps of uint8 pixels (3, H, W), and the class map of `target`, ready for JSON."""
    image = prepare_batch(model, pixels[None])
    grid, maps = grid_for(model, image), all_head_maps(model, image)
    shape = (*maps.shape[:2], *grid)
    by_class = None if target is None else class_map(model, image, target=target)[0]
    images = np.stack([[to_bytes(255 * stretched(heat)) for heat in layer] for layer in maps])
    return {
        "grid": list(grid),
        "layers": shape[0],
        "heads": shape[1],
        "rollout": to_list(attention_rollout(model, image)[0]),
        "maps": b64encode(images.reshape(shape).tobytes()).decode("ascii"),
        "class_map": None if by_class is None else to_list(by_class),
        "image_size": list(pixels.shape[1:]),
    }


def all_head_maps(model: ViT, image: Tensor) -> np.ndarray:
    """The head maps of all layers in one pass, (L, K, N); see inspection.attention.head_maps."""
    prefix = prefix_tokens(model)
    with eval_mode(model), torch.no_grad():
        weights = (w[0, ..., prefix:] for w in model.attention(image.to(model.project.weight)))  # (K, T, N)
        if model.class_token is not None:
            return np.stack([array(w[:, 0]) for w in weights])
        return np.stack([array(at_least_float32(w[:, prefix:]).mean(1)) for w in weights])


def to_list(heat: np.ndarray) -> list[float]:
    """A map scaled to 0..1, in row-major order."""
    return [round(float(value), 4) for value in stretched(heat).ravel()]


log = logging.getLogger("vitkit.server")
MAX_LABELS = 1000  # in the description of a model
WEIGHTS = (".safetensors", ".npz", ".pt", ".pth", ".bin")
TRIES = 5  # attempts to load files that change during the load
MAX_BYTES = 100 * 10**9  # of a model file
COPY_SECONDS = 600.0  # timeout for copying the files of a new model
PIECE = 2**24  # bytes copied at a time
FileStamps = tuple[tuple[str, int, int, int], ...]  # name, mtime, size and inode of each file


@dataclass(frozen=True, eq=False)
class Served:
    """A loaded model. All images of a request use the same one, even if a reload happens meanwhile."""

    name: str
    model: Model
    engine: Engine  # uint8 (B, 3, h, w) to logits (B, classes)
    runtime: Runtime
    view: View
    revision: int
    stamps: FileStamps  # of the files it was loaded from

    def features(self, images: Tensor) -> Tensor:
        """The input of the head, (B, D)."""
        with self.runtime.autocast():
            return features(self.model, images)

    def describe(self, settings: Settings) -> dict[str, Any]:
        """The public description of the model, for /v1/model."""
        model, origin = self.model, self.model.origin
        return {
            "name": self.name,
            "revision": self.revision,
            "classes": model.config.classes,
            "labels": list(model.labels[:MAX_LABELS]),
            "image_size": list(model.config.image_size),
            "covered": list(getattr(model.config, "covered", model.config.image_size)),  # by patches
            "parameters": sum(p.numel() for p in model.parameters()),
            "task": model.task,
            "multilabel": model.multilabel,
            "reject_below": model.reject_below or None,
            "threshold": getattr(task_of(model), "threshold", None),  # the minimum score of a detection
            "preprocessing": {"resize": model.preprocessing.resize, "crop": model.preprocessing.crop},
            "engine": self.engine.name,
            "device": self.runtime.device,
            "precision": self.runtime.precision,
            "origin": {
                "format": origin.format, "source": without_path(origin.source),
                "licence": origin.licence, "sha256": origin.sha256,
            },
            "attention": not attention_objection(model),
            "formats": list(readable_suffixes()),
            "limits": {
                "bytes": settings.max_bytes, "pixels": settings.max_pixels, "images": MAX_IMAGES,
                "seconds": settings.timeout, "queue": settings.queue,
            },
        }  # fmt: skip


def open_served(settings: Settings, revision: int = 1) -> Served:
    """Load a model and run it once; retries if the files change during the load.

    Later revisions are loaded from a copy, which no other process can truncate.
    """
    for _ in range(TRIES):
        stamps = file_stamps(settings.model)
        try:
            served = open_revision(settings, revision, stamps)
        except Exception:
            if stamps == file_stamps(settings.model):
                raise
        else:
            if stamps == file_stamps(settings.model):
                return served
        log.info("%s changed while it was being loaded; loading it again", Path(settings.model).name)
    raise Error(f"{settings.model} changed {TRIES} times while it was being loaded", code="file.unreadable")


def open_revision(settings: Settings, revision: int, stamps: FileStamps) -> Served:
    name = Path(settings.model).name if Path(settings.model).exists() else settings.model
    check_files(settings.model)
    if revision == 1:
        return load_served(settings, settings.model, name, revision, stamps)
    with tempfile.TemporaryDirectory(prefix="vitkit-", ignore_cleanup_errors=True) as folder:
        return load_served(settings, copy_model(settings.model, Path(folder)), name, revision, stamps)


def load_served(settings: Settings, source: str, name: str, revision: int, stamps: FileStamps) -> Served:
    runtime = choose_runtime(settings.device, settings.precision)
    model = load_model(source, settings.device, settings.view)
    if model.preprocessing.resize == "windows":
        model.preprocessing = replace(model.preprocessing, resize="fit")
        log.info("the service resizes each image to fit; windows are for vitkit predict and evaluate")
    if (note := dropped(model.config)) and revision == 1:
        log.info(note)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # off the file, which may be memory-mapped and may change
    model.requires_grad_(False)
    view = evaluation_view(model.preprocessing, model.config.image_size)
    served = Served(name, model, engine_for(model, settings, runtime), runtime, view, revision, stamps)
    image = torch.randint(0, 256, (1, 3, *view.size), dtype=torch.uint8)
    output = served.engine(image) if model.config.classes else served.features(image)
    if not output.isfinite().all():
        raise Error(f"{name}: the output of the model is not finite", code="weights.values")
    return served


def engine_for(model: Model, settings: Settings, runtime: Runtime) -> Engine:
    """The engine that computes logits: torch, or another that agrees with it."""
    if not model.config.classes:  # only features are served, which torch computes
        return torch_engine(model)
    if settings.engine != "torch":
        return choose_engine(model, settings.engine, batch=settings.max_batch, log=log.info)
    engine = torch_engine(model)

    def run(images: Tensor) -> Tensor:
        with runtime.autocast():
            return engine(images)

    return replace(engine, run=run)


def source_kind(source: str) -> str:
    """What a model is loaded from; a reload must not change it."""
    if (Path(source) / RECIPE).exists():
        return "a run folder"
    return "a folder" if Path(source).is_dir() else "a file"


def file_stamps(source: str) -> FileStamps:
    """The stamps of the model's files, which show whether a file has changed; empty without files."""
    stamps = []
    for file in model_files(source):
        try:
            status = file.stat()
        except OSError:
            continue
        stamps.append((file.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(stamps)


def check_files(source: str) -> None:
    """Refuse files that could take forever to read: pipes, devices, sockets and huge files."""
    for file in model_files(source):
        check_file(file, file.stat())


def check_file(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Error(f"{file} is not a regular file (but a pipe, device or socket)", code="file.unreadable")
    if status.st_size > MAX_BYTES:
        raise Error(
            f"{file} has {status.st_size} bytes; at most {MAX_BYTES} are allowed", code="weights.untrusted"
        )


def copy_model(source: str, folder: Path) -> str:
    """Copy the model's files into a folder; returns their new location, or a published name as it is."""
    path, files, deadline = Path(source), model_files(source), time.monotonic() + COPY_SECONDS
    if not files:
        return source
    target = folder / path.resolve().name if path.is_dir() and len(files) > 1 else folder
    target.mkdir(exist_ok=True)
    for file in files:
        original = inside(path, file.name) if path.is_dir() and run_model(source) is None else file
        copy_file(original, target / file.name, deadline)
    return str(folder / files[0].name if target == folder else target)


def copy_file(file: Path, target: Path, deadline: float) -> None:
    """Copy a file at its current size; O_NONBLOCK and a second check guard against a pipe in its place."""
    with open(os.open(file, READ), "rb") as source:
        status = os.fstat(source.fileno())
        check_file(file, status)
        left, free = status.st_size, shutil.disk_usage(target.parent).free
        if left > free:
            raise Error(
                f"cannot copy {file} of {left} bytes: only {free} are free in {target.parent}",
                code="disk.full",
            )
        with target.open("wb") as out:
            while left and (piece := source.read(min(left, PIECE))):
                left -= out.write(piece)
                if time.monotonic() > deadline:
                    raise Error(
                        f"{file} takes more than {COPY_SECONDS:.0f} s to copy", code="file.unreadable"
                    )


def without_path(source: str) -> str:
    """The origin of a model without the folders of the machine that made it."""
    if "://" in source:
        return source
    return Path(source).name if Path(source).is_absolute() or source.endswith(WEIGHTS) else source
