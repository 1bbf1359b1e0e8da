"""How each engine is built: torch compiled, in bf16 or as a CUDA graph, ONNX Runtime, OpenVINO."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.views import normalise
from vitkit.inference import runtimes
from vitkit.inference.bf16 import Bf16Model, CudaGraphEngine
from vitkit.inference.engine_cache import EngineCache
from vitkit.inference.graphs import EXTRAS, Form, needs, save_onnx, to_onnx, to_openvino, trace
from vitkit.inference.per_core import per_core
from vitkit.inference.quantize import in_blocks, quantised
from vitkit.models.variants import Model

Run = Callable[[Tensor], Tensor]
FORM = Form()


@dataclass(frozen=True)
class Request:
    """What an engine is built for."""

    model: Model
    batch: int
    calibrate: Tensor | None  # images for int8
    cache: EngineCache


@dataclass(frozen=True)
class Builder:
    """One engine: uint8 images (B, 3, h, w) to float32 logits."""

    build: Callable[[Request], Run]
    precision: str = "fp32"
    libraries: tuple[str, ...] = ()  # that must be installed
    missing: Callable[[], str] = lambda: ""  # what else this machine lacks for it; empty if nothing
    gpu: bool = False  # whether it runs on a GPU, and not on the CPU


def on_cpu(model: Model) -> bool:
    return next(model.parameters()).device.type == "cpu"


def available(name: str, calibrated: bool, cpu: bool = True) -> str:
    """Why an engine is not available on the CPU, or on a GPU; empty if it is."""
    if name == "torch":
        return ""
    engine = BUILDERS[name]
    if engine.gpu == cpu:
        return f"runs on {'a GPU: give --device cuda' if cpu else 'the CPU: give --device cpu'}"
    for library in engine.libraries:
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed: pip install 'vitkit[{EXTRAS.get(library, 'openvino')}]'"
    if engine.precision == "int8" and not calibrated:
        return engine.missing() or "int8 is calibrated on images, which predict takes by --calibrate"
    return engine.missing()


def build_engine(name: str, model: Model, batch: int, calibrate: Tensor | None, cache: EngineCache) -> Run:
    """The engine of a name: uint8 images (B, 3, h, w) to float32 logits."""
    return BUILDERS[name].build(Request(model, batch, calibrate, cache))


@cache
def fast_bf16() -> bool:
    """Whether the processor multiplies in bf16; one that does not is many times slower in it than in fp32."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16", "svebf16"})


def without_fast_bf16() -> str:
    return "" if fast_bf16() else "this processor has no fast bf16"


def without_compiler() -> str:
    return "" if compiler() else "there is no C++ compiler (g++ or clang++)"


def without_compiler_or_bf16() -> str:
    return without_fast_bf16() or without_compiler()


def without_openvino(precision: str) -> str:
    supported = precision in runtimes.openvino_precisions()
    return "" if supported else f"OpenVINO has no {precision} on this processor"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")


def write_onnx(model: Model, path: Path, calibrate: Tensor | None = None) -> None:
    graph = to_onnx(trace(model, FORM), FORM, "logits")
    if calibrate is not None:
        graph = quantised(graph, model, FORM, calibrate)
    save_onnx(graph, path)


def write_openvino(model: Model, path: Path, calibrate: Tensor | None = None) -> None:
    graph = to_openvino(trace(model, FORM), FORM, "logits")
    if calibrate is not None:
        graph = quantised(graph, model, FORM, calibrate)
    needs("openvino").save_model(graph, path, compress_to_fp16=False)


def torch_bf16(request: Request) -> Run:
    copy = Bf16Model(request.model, fuse_dense=True)
    mean, std = request.model.preprocessing.mean, request.model.preprocessing.std

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return copy(normalise(images, mean, std))

    return partial(per_core, run, copy)


def compiled(request: Request, *, bf16: bool) -> Run:
    """torch.compile with frozen weights for one batch size; smaller batches are padded."""
    module = Bf16Model(request.model) if bf16 else request.model
    call = torch.compile(module, options={"freezing": True}, dynamic=False)
    mean, std = request.model.preprocessing.mean, request.model.preprocessing.std

    @torch.no_grad()  # which freezing requires
    def run(images: Tensor) -> Tensor:
        parts = []
        for part in normalise(images, mean, std).split(request.batch):
            padded = F.pad(part, (0, 0, 0, 0, 0, 0, 0, request.batch - len(part)))
            parts.append(call(padded)[: len(part)].float())
        return torch.cat(parts)

    return run


def cuda_graph(request: Request, *, compiled: bool) -> Run:
    return CudaGraphEngine(request.model, request.batch, compiled=compiled)


def onnx_runtime(request: Request, precision: str) -> Run:
    model, cache = request.model, request.cache
    images = request.calibrate if precision == "int8" else None
    path = cache.file(f"{graph_name(request, images)}.onnx", lambda path: write_onnx(model, path, images))
    if precision == "8bit":
        full = path
        path = cache.file("8bit.onnx", lambda path: save_onnx(in_blocks(needs("onnx").load(full)), path))
    return normalised(model, runtimes.onnx_runtime(path))


def openvino(request: Request, precision: str) -> Run:
    model, cache = request.model, request.cache
    images = request.calibrate if precision == "int8" else None
    path = cache.file(f"{graph_name(request, images)}.xml", lambda path: write_openvino(model, path, images))
    return normalised(model, runtimes.openvino(path, "fp32" if precision == "int8" else precision))


def graph_name(request: Request, calibrated_on: Tensor | None) -> str:
    return "model" if calibrated_on is None else f"int8-{request.cache.calibration}"


def normalised(model: Model, run: runtimes.Run) -> Run:
    """A runtime that takes arrays, called with uint8 images."""
    mean, std = model.preprocessing.mean, model.preprocessing.std
    return lambda images: run(normalise(images, mean, std).numpy())


ONNX, NNCF = ("onnx", "onnxscript", "onnxruntime"), ("nncf",)
BUILDERS = {  # in the order in which "auto" tries them; "torch" itself is the reference
    "torch-bf16": Builder(torch_bf16, "bf16", missing=without_fast_bf16),
    "onnxruntime": Builder(partial(onnx_runtime, precision="fp32"), "fp32", ONNX),
    "onnxruntime-8bit": Builder(partial(onnx_runtime, precision="8bit"), "8bit", ONNX),
    "onnxruntime-int8": Builder(partial(onnx_runtime, precision="int8"), "int8", ONNX + NNCF),
    "openvino": Builder(partial(openvino, precision="fp32"), "fp32", ("openvino",)),
    "openvino-fp16": Builder(
        partial(openvino, precision="fp16"), "fp16", ("openvino",), partial(without_openvino, "fp16")
    ),
    "openvino-bf16": Builder(
        partial(openvino, precision="bf16"), "bf16", ("openvino",), partial(without_openvino, "bf16")
    ),
    "openvino-int8": Builder(partial(openvino, precision="int8"), "int8", ("openvino", *NNCF)),
    "compile": Builder(partial(compiled, bf16=False), "fp32", missing=without_compiler),
    "compile-bf16": Builder(partial(compiled, bf16=True), "bf16", missing=without_compiler_or_bf16),
    "graph": Builder(partial(cuda_graph, compiled=False), "bf16", gpu=True),
    "graph-compiled": Builder(partial(cuda_graph, compiled=True), "bf16", ("triton",), gpu=True),
}
# name -> precision of every engine, the reference first
ENGINES = {"torch": "fp32"} | {name: builder.precision for name, builder in BUILDERS.items()}
