"""What computes a model's answers on this machine: torch, or a runtime that is faster and says the same.

    engine = choose_engine(model, "auto", batch=32)
    logits = engine(images)                          # uint8 (B, 3, h, w) -> float32 (B, classes)

An engine is used only if it agrees with torch in float32 on check images. int8 changes answers: "auto" takes
it only where calibration images were given and every check image keeps its top-1.
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
from vitkit.inference.engine_cache import Memory
from vitkit.inference.predict import logits
from vitkit.models.variants import Model

QUICK = 120.0  # seconds of work below which looking for a faster engine takes longer than it saves
LONG = 3600.0  # seconds of work that are worth a compilation
GAIN = 1.05  # times as fast as torch, below which torch stays
AGAIN = 2  # images on which the choice of last time is checked
ROUNDS, SPENT = 3, 6.0  # of one engine: at most so many timed batches, and no new one after so many seconds


@dataclass(frozen=True)
class Engine:
    """uint8 images (B, 3, h, w) of the model's size to float32 logits on the CPU; any batch, any thread."""

    name: str
    run: Callable[[Tensor], Tensor]
    seconds: float | None = None  # for a batch, where that was measured
    note: str = ""  # why this one

    def __call__(self, images: Tensor) -> Tensor:
        return self.run(images)


def torch_engine(model: Model, note: str = "") -> Engine:
    """The reference: the model as it is, on the device where it is."""
    model.eval()
    return Engine("torch", lambda images: logits(model, images), note=note)


def choose_engine(
    model: Model,
    how: str = "auto",
    *,
    batch: int = 32,
    work: int | None = None,
    images: Tensor | None = None,
    calibrate: Tensor | None = None,
    folder: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Engine:
    """The engine of a name, checked; or "auto": the fastest of those that agree, remembered for next time.

    work       how many images will come (None: many); for little work torch is taken at once
    images     uint8 (N, 3, h, w) to check on; generated if None
    calibrate  uint8 (N, 3, h, w) for int8
    folder     where the choice and its graph are kept; the user's cache folder if None
    """
    if how not in ("auto", *ENGINES):
        raise Error(f"no engine {how!r}; known: auto, {', '.join(ENGINES)}", code="engine.unknown")
    if batch < 1:
        raise Error(f"batch must be at least 1, not {batch}")
    reference = torch_engine(model)
    if how == "torch":
        return reference
    if how == "auto" and work is not None and (expected := one_by_one(reference, model, work)) < QUICK:
        return replace(reference, note=f"about {expected:.0f} s of work in all")
    memory = Memory(model, batch, calibrate, folder, log)
    trial = Trial(model, reference, batch, images, calibrate, memory)
    if how != "auto":
        return trial.asked(how)
    return trial.remembered() or trial.fastest(work, log)


def one_by_one(reference: Engine, model: Model, work: int) -> float:
    """Seconds that so many images take in torch, judged by one."""
    image = torch.zeros(1, model.config.channels, *model.config.image_size, dtype=torch.uint8)
    if not work:
        return 0.0
    reference(image)
    start = time.perf_counter()
    reference(image)
    return work * (time.perf_counter() - start)


class Trial:
    """Engines of one model, tried against the reference."""

    def __init__(
        self,
        model: Model,
        reference: Engine,
        batch: int,
        images: Tensor | None,
        calibrate: Tensor | None,
        memory: Memory,
    ):
        self.model, self.reference, self.batch = model, reference, batch
        self.images = sample_images(model) if images is None else images
        self.calibrate, self.memory = calibrate, memory

    @cached_property
    def want(self) -> Tensor:
        return self.reference(self.images)

    def missing(self, name: str) -> str:
        """Why an engine cannot be had."""
        return available(name, self.calibrate is not None, on_cpu(self.model))

    def build(self, name: str, count: int | None = None) -> tuple[Engine, Agreement]:
        """An engine and how far it is from the reference, on all check images or some of them."""
        try:
            run = build_engine(name, self.model, self.batch, self.calibrate, self.memory)
            images = self.images[:count]
            want = self.want if count is None else self.reference(images)
            found = agreement(want, run(images), ENGINES[name])
        except Error:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no other class in common
            kept = f"delete its graph in {self.memory.folder}, or " if on_disk(name) else ""
            raise Error(
                f"engine {name!r} cannot run this model here: {in_a_line(error)}; {kept}use --engine torch",
                code="engine.failed",
            ) from error
        return Engine(name, run, note=found.text()), found

    def asked(self, name: str, count: int | None = None) -> Engine:
        if reason := self.missing(name):
            raise Error(f"engine {name!r}: {reason}", code="engine.failed")
        engine, found = self.build(name, count)
        if not found.ok:
            raise Error(
                f"engine {name!r} disagrees with torch: {found.text()}; use --engine torch",
                code="engine.failed",
            )
        return engine

    def remembered(self) -> Engine | None:
        """The choice of last time, if it still agrees."""
        name = self.memory.choice()
        if name is None:
            return None
        if name == "torch":
            return replace(self.reference, note="the fastest when it was measured")
        try:
            return self.asked(name, AGAIN)
        except Error:  # a damaged file, another runtime: measure again
            self.memory.forget()
            return None

    def fastest(self, work: int | None, log: Callable[[str], None]) -> Engine:
        best = self.timed(self.reference)
        assert best.seconds is not None
        slow = work is not None and best.seconds * work / self.batch > LONG
        limit = best.seconds / GAIN
        for name in list(ENGINES)[1:]:
            if self.missing(name) or ("compile" in name and not slow):
                continue
            try:
                engine, found = self.build(name)
            except Error as error:
                log(f"{name}: {in_a_line(error)}")
                continue
            if not found.ok or (ENGINES[name] in ("8bit", "int8") and found.same_top1 < 1):
                log(f"{name}: not used, {found.text()}")
                continue
            engine = self.timed(engine)
            log(f"{name}: {self.batch / (engine.seconds or 1):.1f} images a second, {found.text()}")
            if engine.seconds is not None and engine.seconds < limit:
                best, limit = engine, engine.seconds
        self.memory.keep(best.name, best.seconds)
        return best

    def timed(self, engine: Engine) -> Engine:
        """The median time of a few batches, after one image to warm up."""
        images = self.images.repeat(-(-self.batch // len(self.images)), 1, 1, 1)[: self.batch]
        engine(images[:1])
        took: list[float] = []
        while len(took) < ROUNDS and sum(took) < SPENT:
            start = time.perf_counter()
            engine(images)
            took.append(time.perf_counter() - start)
        return replace(engine, seconds=statistics.median(took))


def on_disk(name: str) -> bool:
    """Whether an engine reads its graph from a file, which may be damaged."""
    return name.startswith(("onnxruntime", "openvino"))


def in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
