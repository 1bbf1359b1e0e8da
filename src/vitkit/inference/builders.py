"""How each engine is built: torch compiled, in bf16 or as a CUDA graph, ONNX Runtime, OpenVINO."""

import importlib.util
import os
import shutil
from collections.abc import Callable
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
ENGINES = {  # name -> precision
    "torch": "fp32",
    "torch-bf16": "bf16",
    "onnxruntime": "fp32",
    "onnxruntime-8bit": "8bit",
    "onnxruntime-int8": "int8",
    "openvino": "fp32",
    "openvino-fp16": "fp16",
    "openvino-bf16": "bf16",
    "openvino-int8": "int8",
    "compile": "fp32",
    "compile-bf16": "bf16",
    "graph": "bf16",
    "graph-compiled": "bf16",
}
ON_GPU = ("graph", "graph-compiled")  # torch runs anywhere, all others on the CPU
LIBRARIES = {
    "onnxruntime": ("onnx", "onnxscript", "onnxruntime"),
    "onnxruntime-int8": ("onnx", "onnxscript", "onnxruntime", "nncf"),
    "openvino": ("openvino",),
    "openvino-int8": ("openvino", "nncf"),
}


def on_cpu(model: Model) -> bool:
    return next(model.parameters()).device.type == "cpu"


def available(name: str, calibrated: bool, cpu: bool = True) -> str:
    """Why an engine is not available on the CPU, or on a GPU; empty if it is."""
    kind, precision = name.split("-")[0], ENGINES[name]
    if name != "torch" and (name in ON_GPU) == cpu:
        return f"runs on {'a GPU: give --device cuda' if cpu else 'the CPU: give --device cpu'}"
    for library in LIBRARIES.get(name) or LIBRARIES.get(kind, ()):
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed: pip install 'vitkit[{EXTRAS.get(library, 'openvino')}]'"
    if kind in ("torch", "compile") and precision == "bf16" and not fast_bf16():
        return "this processor has no fast bf16"
    if name == "graph-compiled" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if kind == "compile" and not compiler():
        return "there is no C++ compiler (g++ or clang++)"
    if (
        kind == "openvino"
        and precision in ("fp16", "bf16")
        and precision not in runtimes.openvino_precisions()
    ):
        return f"OpenVINO has no {precision} on this processor"
    if precision == "int8" and not calibrated:
        return "int8 is calibrated on images, which predict takes by --calibrate"
    return ""


@cache
def fast_bf16() -> bool:
    """Whether the processor multiplies in bf16; one that does not is many times slower in it than in fp32."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16", "svebf16"})


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")


def build_engine(name: str, model: Model, batch: int, calibrate: Tensor | None, memory: EngineCache) -> Run:
    """uint8 images (B, 3, h, w) to float32 logits."""
    kind, precision = name.split("-")[0], ENGINES[name]
    if kind == "torch":
        return bf16_engine(model)
    if kind == "compile":
        return compiled_engine(model, batch, precision)
    if kind == "graph":
        return CudaGraphEngine(model, batch, compiled=name == "graph-compiled")
    images = calibrate if precision == "int8" else None
    graph = "model" if images is None else f"int8-{memory.calibration}"
    if kind == "onnxruntime":
        path = memory.file(f"{graph}.onnx", lambda path: write_onnx(model, path, images))
        if precision == "8bit":
            full = path
            path = memory.file("8bit.onnx", lambda path: save_onnx(in_blocks(needs("onnx").load(full)), path))
        run = runtimes.onnx_runtime(path)
    else:
        path = memory.file(f"{graph}.xml", lambda path: write_openvino(model, path, images))
        run = runtimes.openvino(path, "fp32" if precision == "int8" else precision)
    mean, std = model.preprocessing.mean, model.preprocessing.std
    return lambda images: run(normalise(images, mean, std).numpy())


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


def bf16_engine(model: Model) -> Run:
    copy = Bf16Model(model, fuse_dense=True)
    mean, std = model.preprocessing.mean, model.preprocessing.std

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return copy(normalise(images, mean, std))

    return partial(per_core, run, copy)


def compiled_engine(model: Model, batch: int, precision: str) -> Run:
    """torch.compile with frozen weights for one batch size; smaller batches are padded."""
    module = Bf16Model(model) if precision == "bf16" else model
    compiled = torch.compile(module, options={"freezing": True}, dynamic=False)
    mean, std = model.preprocessing.mean, model.preprocessing.std

    @torch.no_grad()  # which freezing requires
    def run(images: Tensor) -> Tensor:
        parts = []
        for part in normalise(images, mean, std).split(batch):
            padded = F.pad(part, (0, 0, 0, 0, 0, 0, 0, batch - len(part)))
            parts.append(compiled(padded)[: len(part)].float())
        return torch.cat(parts)

    return run
