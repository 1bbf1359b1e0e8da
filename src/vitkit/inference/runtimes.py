"""ONNX Runtime and OpenVINO behind one interface: NumPy arrays in, a float32 tensor out."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.inference.graphs import needs

Run = Callable[[np.ndarray], Tensor]
HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def onnx_session(source: str | Path | bytes) -> Any:
    """Open a file, or its bytes, on the CPU with as many threads as torch."""
    onnxruntime = needs("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    model = source if isinstance(source, bytes) else str(source)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def onnx_runtime(source: Any) -> Run:
    """A function that runs a file, its bytes or an open session."""
    session = onnx_session(source) if isinstance(source, str | Path | bytes) else source
    name = session.get_inputs()[0].name

    def run(images: np.ndarray) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images})[0])

    return run


def openvino(source: Any, precision: str | None = "fp32") -> Run:
    """A function that runs a file or an openvino.Model on the CPU; None: OpenVINO's default precision."""
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    if precision is not None:
        settings["INFERENCE_PRECISION_HINT"] = HINTS[precision]
    compiled = core().compile_model(str(source) if isinstance(source, Path) else source, "CPU", settings)
    request, lock = compiled.create_infer_request(), threading.Lock()

    def run(images: np.ndarray) -> Tensor:
        with lock:  # a request has one set of output buffers
            return torch.from_numpy(request.infer([images])[0].copy()).float()

    return run


@functools.cache
def core() -> Any:
    return needs("openvino").Core()


def openvino_precisions() -> set[str]:
    """The floating-point precisions that OpenVINO runs fast on this CPU."""
    capabilities = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {name.lower() for name in capabilities} & set(HINTS)
