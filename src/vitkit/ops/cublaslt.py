"""A matrix product with bias and GELU as one kernel, by calling cuBLASLt directly.

A separate GELU reads and writes again all that the product has just written. PyTorch does not expose
cuBLASLt's epilogue that also keeps the GELU's input for the backward pass. (The epilogue for the backward
pass itself is slower than two kernels: docs/speed.md.)
"""

# M tokens of all images, D width, H hidden; cuBLASLt is column-major, so it sees our matrices transposed

import ctypes
from functools import cache
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.custom_op import custom_op

WORKSPACE = 32 << 20  # bytes
ALIGNMENT = 16  # bytes
BF16, FP32, COMPUTE_FP32 = 14, 0, 68  # CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_ROW = 3, 7, 8, 11, 12  # CUBLASLT_MATMUL_DESC_...
GELU, GELU_AUX = 36, 164  # CUBLASLT_EPILOGUE_GELU_BIAS, ..._GELU_AUX_BIAS
LOCK = Lock()  # a plan holds one set of pointers


def empty_hidden(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return z.new_empty(len(z), len(weight))


def empty_hidden_twice(z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return empty_hidden(z, weight, bias), empty_hidden(z, weight, bias)


@custom_op(empty_hidden)
def dense_gelu(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (by tanh) of (M, D) by a weight (H, D) -> (M, H)."""
    return product(z, weight, bias)


@custom_op(empty_hidden_twice)
def dense_gelu_with_input(z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The GELU's input and output."""
    before = empty_hidden(z, weight, bias)
    return before, product(z, weight, bias, before)


def product(z: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None = None) -> Tensor:
    """The GELU's output; its input is written to `before` if that is given."""
    epilogue = GELU if before is None else GELU_AUX
    with LOCK:
        plan = plan_for(z.device, len(z), len(weight), z.shape[1], epilogue)
        if plan is not None:
            return plan(aligned(z), aligned(weight), aligned(bias), before)
    output = F.linear(z, weight, bias)
    if before is not None:
        before.copy_(output)
    return F.gelu(output, approximate="tanh")


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied unless it is contiguous and aligned."""
    fits = tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


@cache
def plan_for(device: torch.device, m: int, h: int, d: int, epilogue: int) -> "Plan | None":
    """The plan for these sizes; None where cuBLASLt has no kernel for it."""
    try:
        return Plan(device, m, h, d, epilogue)
    except RuntimeError:
        return None


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; the algorithm comes first."""

    _fields_ = (("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4))  # fmt: skip


class Plan:
    """How cuBLASLt computes products of one shape."""

    def __init__(self, device: torch.device, m: int, h: int, d: int, epilogue: int, choice: int = 0):
        self.handle = handle(device)
        self.descriptor = create("MatmulDescCreate", ctypes.c_int(COMPUTE_FP32), ctypes.c_int(FP32))
        self.left, self.right, self.result = matrix(d, h), matrix(d, m), matrix(h, m)
        self.set(TRANSPOSE_A, ctypes.c_int(1))
        self.set(EPILOGUE, ctypes.c_int(epilogue))
        if epilogue != GELU:
            self.set(AUX_ROW, ctypes.c_int64(h))
        preference = create("MatmulPreferenceCreate")
        workspace = (1, ctypes.c_size_t(WORKSPACE))
        alignments = [(i, ctypes.c_uint32(ALIGNMENT)) for i in range(5, 9)]
        for number, value in (workspace, *alignments):  # CUBLASLT_MATMUL_PREF_...
            call("MatmulPreferenceSetAttribute", preference, number, ctypes.byref(value), size(value))
        results, count = (HeuristicResult * (choice + 1))(), ctypes.c_int()
        call(
            "MatmulAlgoGetHeuristic", self.handle, self.descriptor, self.left, self.right, self.result,
            self.result, preference, choice + 1, results, ctypes.byref(count),
        )  # fmt: skip
        call("MatmulPreferenceDestroy", preference)
        if count.value <= choice:
            raise RuntimeError(f"cuBLASLt has no kernel for a GELU of {m} x {d} by {d} x {h}")
        self.algorithm = results[choice]

    def __call__(self, z: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None) -> Tensor:
        out, workspace = z.new_empty(len(z), len(weight)), z.new_empty(WORKSPACE, dtype=torch.uint8)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        self.set(BIAS, pointer(bias))
        if before is not None:
            self.set(AUX, pointer(before))
        with torch.cuda.device(z.device):
            call(
                "Matmul", self.handle, self.descriptor, ctypes.byref(one),
                pointer(weight), self.left, pointer(z), self.right,
                ctypes.byref(zero), pointer(out), self.result, pointer(out), self.result,
                ctypes.byref(self.algorithm), pointer(workspace), ctypes.c_size_t(WORKSPACE),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip
        return out

    def set(self, number: int, value: Any) -> None:
        call("MatmulDescSetAttribute", self.descriptor, number, ctypes.byref(value), size(value))


def size(value: Any) -> ctypes.c_size_t:
    return ctypes.c_size_t(ctypes.sizeof(value))


def matrix(rows: int, columns: int) -> ctypes.c_void_p:
    return create(
        "MatrixLayoutCreate", ctypes.c_int(BF16), ctypes.c_uint64(rows), ctypes.c_uint64(columns),
        ctypes.c_int64(rows),
    )  # fmt: skip


def create(name: str, *args: Any) -> ctypes.c_void_p:
    """The address of a new object of cuBLASLt's."""
    address = ctypes.c_void_p()
    call(name, ctypes.byref(address), *args)
    return address


@cache
def handle(device: torch.device) -> ctypes.c_void_p:
    if device.type != "cuda":
        raise RuntimeError("cuBLASLt needs an NVIDIA GPU")
    with torch.cuda.device(device):
        return create("Create")


def call(name: str, *args: Any) -> None:
    loaded = library()
    if loaded is None:
        raise RuntimeError("cuBLASLt is not installed")
    status = getattr(loaded, f"cublasLt{name}")(*args)
    if status:
        raise RuntimeError(f"cuBLASLt's {name} failed with status {status}")


@cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt as PyTorch has loaded it; None where PyTorch has none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
