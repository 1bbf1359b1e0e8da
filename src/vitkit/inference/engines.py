"""Inference engines: torch, or a faster runtime that agrees with it on this machine.

    engine = choose_engine(model, "auto", batch=32)
    logits = engine(images)                          # uint8 (B, 3, h, w) -> float32 (B, classes)

An engine is used only if it agrees with torch in float32 on sample images. int8 changes predictions: "auto"
uses it only with calibration images, and only if the top-1 of every sample image stays the same.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from vitkit.errors import Error
from vitkit.inference.agreement import Agreement, agreement, sample_images
from vitkit.inference.builders import ENGINES, available, build_engine, on_cpu
from vitkit.inference.engine_cache import EngineCache
from vitkit.inference.predict import logits
from vitkit.models.variants import Model
from vitkit.tasks.task import task_of

QUICK_SECONDS = 120.0  # for less work than this, measuring engines takes longer than a faster one saves
LONG_SECONDS = 3600.0  # only for more work than this is a compilation worth its time
MIN_SPEEDUP = 1.05  # over torch; below it torch stays
RECHECK_IMAGES = 2  # on which a cached choice is checked again
MAX_ROUNDS, MAX_SECONDS = 3, 6.0  # timed batches of one engine: no more rounds, and none begins later


@dataclass(frozen=True)
class Engine:
    """uint8 images (B, 3, h, w) of the model's size to float32 logits on the CPU; any batch, any thread."""

    name: str
    run: Callable[[Tensor], Tensor]
    seconds: float | None = None  # for a batch, where that was measured
    note: str = ""  # why this engine was chosen

    def __call__(self, images: Tensor) -> Tensor:
        return self.run(images)


def torch_engine(model: Model, note: str = "") -> Engine:
    """The reference: the model itself, on its own device."""
    model.eval()
    return Engine("torch", lambda images: logits(model, images), note=note)


def choose_engine(
    model: Model,
    name: str = "auto",
    *,
    batch: int = 32,
    work: int | None = None,
    images: Tensor | None = None,
    calibrate: Tensor | None = None,
    folder: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Engine:
    """Build and check an engine; "auto" chooses the fastest that agrees with torch and caches the choice.

    work       number of images to come (None: many); for little work torch is used at once
    images     uint8 (N, 3, h, w) to check on; generated if None
    calibrate  uint8 (N, 3, h, w) for int8
    folder     of the cache; the user's cache folder if None
    """
    if name not in ("auto", *ENGINES):
        raise Error(f"unknown engine {name!r}; known: auto, {', '.join(ENGINES)}", code="engine.unknown")
    if batch < 1:
        raise Error(f"batch must be at least 1, not {batch}")
    reference = torch_engine(model)
    if name == "torch":
        return reference
    if name == "auto" and work is not None:
        seconds = estimate_seconds(reference, model, work)
        if seconds < QUICK_SECONDS:
            return replace(reference, note=f"only about {seconds:.0f} s of work")
    cache = EngineCache(model, batch, calibrate, folder, log)
    selector = EngineSelector(model, reference, batch, images, calibrate, cache)
    if name != "auto":
        return selector.build_checked(name)
    return selector.from_cache() or selector.fastest(work, log)


def estimate_seconds(reference: Engine, model: Model, work: int) -> float:
    """Seconds that `work` images take in torch, extrapolated from one."""
    image = torch.zeros(1, model.config.channels, *model.config.image_size, dtype=torch.uint8)
    if not work:
        return 0.0
    reference(image)
    start = time.perf_counter()
    reference(image)
    return work * (time.perf_counter() - start)


class EngineSelector:
    """Builds engines of one model, checks them against the reference and measures them."""

    def __init__(
        self,
        model: Model,
        reference: Engine,
        batch: int,
        images: Tensor | None,
        calibrate: Tensor | None,
        cache: EngineCache,
    ):
        self.model, self.reference, self.batch = model, reference, batch
        self.images = sample_images(model) if images is None else images
        self.calibrate, self.cache = calibrate, cache

    @cached_property
    def reference_logits(self) -> Tensor:
        return self.reference(self.images)

    def unavailable(self, name: str) -> str:
        """Why an engine is not available; empty if it is."""
        return available(name, self.calibrate is not None, on_cpu(self.model))

    def build(self, name: str, count: int | None = None) -> tuple[Engine, Agreement]:
        """An engine and its agreement with the reference on all sample images, or on the first `count`."""
        try:
            run = build_engine(name, self.model, self.batch, self.calibrate, self.cache)
            images = self.images[:count]
            expected = self.reference_logits if count is None else self.reference(images)
            result = agreement(expected, run(images), ENGINES[name], task_of(self.model))
        except Error:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no other common base class
            remedy = f"delete its graph in {self.cache.folder}, or " if has_graph_file(name) else ""
            raise Error(
                f"engine {name!r} cannot run this model: {short_text(error)}; {remedy}use --engine torch",
                code="engine.failed",
            ) from error
        return Engine(name, run, note=result.text()), result

    def build_checked(self, name: str, count: int | None = None) -> Engine:
        """An engine; an error if it is not available or disagrees with the reference."""
        if reason := self.unavailable(name):
            raise Error(f"engine {name!r}: {reason}", code="engine.failed")
        engine, result = self.build(name, count)
        if not result.ok:
            raise Error(
                f"engine {name!r} disagrees with torch: {result.text()}; use --engine torch",
                code="engine.failed",
            )
        return engine

    def from_cache(self) -> Engine | None:
        """The engine that an earlier process chose, if it still agrees."""
        name = self.cache.load_choice()
        if name is None:
            return None
        if name == "torch":
            return replace(self.reference, note="the fastest when it was measured")
        try:
            return self.build_checked(name, RECHECK_IMAGES)
        except Error:  # a damaged file or another runtime: measure again
            self.cache.clear()
            return None

    def fastest(self, work: int | None, log: Callable[[str], None]) -> Engine:
        """Build, check and measure every available engine; the choice is cached."""
        best = self.timed(self.reference)
        assert best.seconds is not None
        worth_compiling = work is not None and best.seconds * work / self.batch > LONG_SECONDS
        limit = best.seconds / MIN_SPEEDUP
        for name in list(ENGINES)[1:]:
            if self.unavailable(name) or ("compile" in name and not worth_compiling):
                continue
            try:
                engine, result = self.build(name)
            except Error as error:
                log(f"{name}: {short_text(error)}")
                continue
            if not result.ok or (ENGINES[name] in ("8bit", "int8") and result.same_top1 < 1):
                log(f"{name}: not used, {result.text()}")
                continue
            engine = self.timed(engine)
            log(f"{name}: {self.batch / (engine.seconds or 1):.1f} images per second, {result.text()}")
            if engine.seconds is not None and engine.seconds < limit:
                best, limit = engine, engine.seconds
        self.cache.save_choice(best.name, best.seconds)
        return best

    def timed(self, engine: Engine) -> Engine:
        """The engine with its median time for a batch, after one image as a warm-up."""
        images = self.images.repeat(-(-self.batch // len(self.images)), 1, 1, 1)[: self.batch]
        engine(images[:1])
        seconds: list[float] = []
        while len(seconds) < MAX_ROUNDS and sum(seconds) < MAX_SECONDS:
            start = time.perf_counter()
            engine(images)
            seconds.append(time.perf_counter() - start)
        return replace(engine, seconds=statistics.median(seconds))


def has_graph_file(name: str) -> bool:
    """Whether an engine reads its graph from a file, which may be damaged."""
    return name.startswith(("onnxruntime", "openvino"))


def short_text(error: Exception) -> str:
    """The error message on one line, cut to 200 characters."""
    return " ".join(str(error).split())[:200]
