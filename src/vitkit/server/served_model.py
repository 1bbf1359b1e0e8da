"""The model that is served: weights, engine, reloading, and its attention maps."""

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
from vitkit.inference.predict import evaluation_view, features, load_model, ready
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
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, dropped
from vitkit.report.overlay import stretched, to_bytes
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.server.settings import MOST_IMAGES, Settings
from vitkit.weights.locate import RECIPE, inside, model_files, run_model


def attention_objection(model: Model) -> str:
    """Why a model has no attention maps over all patches; empty where it has them."""
    try:
        if attention_count(transformer(model)) and model.config.attention == "axial":
            return "this model is axial: no layer of it has one attention over all patches to show"
    except ValueError as error:
        return str(error)
    return ""


def explain(model: ViT, pixels: Tensor, target: int | None) -> dict[str, Any]:
    """The maps of uint8 pixels (3, H, W) as plain numbers, ready for JSON; `target`: whose class map."""
    image = ready(model, pixels[None])
    grid, maps = grid_for(model, image), every_map(model, image)
    shape = (*maps.shape[:2], *grid)
    by_class = None if target is None else class_map(model, image, target=target)[0]
    each = np.stack([[to_bytes(255 * stretched(heat)) for heat in layer] for layer in maps])
    return {
        "grid": list(grid),
        "layers": shape[0],
        "heads": shape[1],
        "rollout": numbers(attention_rollout(model, image)[0]),
        "maps": b64encode(each.reshape(shape).tobytes()).decode("ascii"),
        "class_map": None if by_class is None else numbers(by_class),
        "image_size": list(pixels.shape[1:]),
    }


def every_map(model: ViT, image: Tensor) -> np.ndarray:
    """What each head of each layer looks at, (L, K, N), in one pass; see inspection.rollout.head_maps."""
    prefix = prefix_tokens(model)
    with eval_mode(model), torch.no_grad():
        weights = (w[0, ..., prefix:] for w in model.attention(image.to(model.project.weight)))  # (K, T, N)
        return np.stack([array(w[:, 0] if prefix else at_least_float32(w).mean(1)) for w in weights])


def numbers(heat: np.ndarray) -> list[float]:
    """A map scaled to 0..1, row after row."""
    return [round(float(value), 4) for value in stretched(heat).ravel()]


log = logging.getLogger("vitkit.server")
SHOWN_LABELS = 1000
WEIGHTS = (".safetensors", ".npz", ".pt", ".pth", ".bin")
TRIES = 5  # to load files that change meanwhile
MOST_BYTES = 100 * 10**9  # of a model file
COPY_SECONDS = 600.0  # to copy the files of a new model
PIECE = 2**24  # bytes copied at a time
Marks = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, eq=False)
class Served:
    """A model ready to answer. A request is answered by one of them, from its first image to its last."""

    name: str
    model: Model
    engine: Engine  # uint8 (B, 3, h, w) to logits (B, classes)
    runtime: Runtime
    view: View
    revision: int
    marks: Marks  # of the files that it was loaded from

    def features(self, images: Tensor) -> Tensor:
        """What the head sees, (B, D)."""
        with self.runtime.autocast():
            return features(self.model, images)

    def facts(self, settings: Settings) -> dict[str, Any]:
        """What a client may know of the model."""
        model, origin = self.model, self.model.origin
        return {
            "name": self.name,
            "revision": self.revision,
            "classes": model.config.classes,
            "labels": list(model.labels[:SHOWN_LABELS]),
            "image_size": list(model.config.image_size),
            "covered": list(getattr(model.config, "covered", model.config.image_size)),  # by patches
            "parameters": sum(p.numel() for p in model.parameters()),
            "task": model.task,
            "multilabel": model.multilabel,
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
                "bytes": settings.max_bytes, "pixels": settings.max_pixels, "images": MOST_IMAGES,
                "seconds": settings.timeout, "queue": settings.queue,
            },
        }  # fmt: skip


def open_served(settings: Settings, revision: int = 1) -> Served:
    """Load, put into memory, and try out; again, where the files change meanwhile.

    A later revision is loaded from a copy that nobody can cut short.
    """
    for _ in range(TRIES):
        before = marks(settings.model)
        try:
            served = opened(settings, revision, before)
        except Exception:
            if before == marks(settings.model):
                raise
        else:
            if before == marks(settings.model):
                return served
        log.info("%s has changed while it was loaded; it is loaded again", Path(settings.model).name)
    raise Error(f"{settings.model} has changed {TRIES} times while it was loaded", code="file.unreadable")


def opened(settings: Settings, revision: int, now: Marks) -> Served:
    name = Path(settings.model).name if Path(settings.model).exists() else settings.model
    check_files(settings.model)
    if revision == 1:
        return prepared(settings, settings.model, name, revision, now)
    with tempfile.TemporaryDirectory(prefix="vitkit-") as folder:
        return prepared(settings, copied(settings.model, Path(folder)), name, revision, now)


def prepared(settings: Settings, place: str, name: str, revision: int, now: Marks) -> Served:
    runtime = choose_runtime(settings.device, settings.precision)
    model = load_model(place, settings.device, settings.view)
    if (note := dropped(model.config)) and revision == 1:
        log.info(note)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # out of the file, which may be mapped and may change
    model.requires_grad_(False)
    view = evaluation_view(model.preprocessing, model.config.image_size)
    served = Served(name, model, engine_for(model, settings, runtime), runtime, view, revision, now)
    trial = torch.randint(0, 256, (1, 3, *view.size), dtype=torch.uint8)
    said = served.engine(trial) if model.config.classes else served.features(trial)
    if not said.isfinite().all():
        raise Error(f"{name}: the model gives numbers that are not finite", code="weights.values")
    return served


def engine_for(model: Model, settings: Settings, runtime: Runtime) -> Engine:
    """How logits are computed: by torch, or by another engine that says the same."""
    if not model.config.classes:  # only features are asked for, and those are torch's
        return torch_engine(model)
    if settings.engine != "torch":
        return choose_engine(model, settings.engine, batch=settings.max_batch, log=log.info)
    engine = torch_engine(model)

    def run(images: Tensor) -> Tensor:
        with runtime.autocast():
            return engine(images)

    return replace(engine, run=run)


def kind_of(place: str) -> str:
    """Where a model is read from: what was a file is not replaced by a folder, nor the other way round."""
    if (Path(place) / RECIPE).exists():
        return "a run folder"
    return "a folder" if Path(place).is_dir() else "a file"


def marks(place: str) -> Marks:
    """By what a change of the model's files is seen: name, time, size and number of each. No file: none."""
    found = []
    for file in model_files(place):
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((file.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def check_files(place: str) -> None:
    """Refuse what could be read for ever: a pipe, a device or a socket in place of a file, or a huge one."""
    for file in model_files(place):
        check_file(file, file.stat())


def check_file(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Error(f"{file} is not an ordinary file (a pipe, a device or a socket)", code="file.unreadable")
    if status.st_size > MOST_BYTES:
        raise Error(
            f"{file} has {status.st_size} bytes; at most {MOST_BYTES} are read", code="weights.untrusted"
        )


def copied(place: str, folder: Path) -> str:
    """The model's files as they are now, in a folder of our own; a published name is its own place."""
    path, files, until = Path(place), model_files(place), time.monotonic() + COPY_SECONDS
    if not files:
        return place
    into = folder / path.resolve().name if path.is_dir() and len(files) > 1 else folder
    into.mkdir(exist_ok=True)
    for file in files:
        source = inside(path, file.name) if path.is_dir() and run_model(place) is None else file
        copy_file(source, into / file.name, until)
    return str(folder / files[0].name if into == folder else into)


def copy_file(file: Path, target: Path, until: float) -> None:
    """Its bytes, as many as it has now; opened without waiting, and checked once more when it is open."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as source:
        status = os.fstat(source.fileno())
        check_file(file, status)
        left, free = status.st_size, shutil.disk_usage(target.parent).free
        if left > free:
            raise Error(
                f"{file} has {left} bytes; there are {free} free in {target.parent} for a copy",
                code="disk.full",
            )
        with target.open("wb") as out:
            while left and (piece := source.read(min(left, PIECE))):
                left -= out.write(piece)
                if time.monotonic() > until:
                    raise Error(
                        f"{file} takes more than {COPY_SECONDS:.0f} s to copy", code="file.unreadable"
                    )


def without_path(source: str) -> str:
    """Where a model came from, without the folders of the machine that it was made on."""
    if "://" in source:
        return source
    return Path(source).name if Path(source).is_absolute() or source.endswith(WEIGHTS) else source
