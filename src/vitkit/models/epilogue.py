"""A product and the GELU after it as one kernel: cuBLASLt, asked directly.

A GELU by itself reads and writes all that the product has just written. PyTorch has no way to ask for the
product that takes it along and keeps what the gradient needs. (cuBLASLt could do the same on the way back;
there it is slower than two kernels: docs/speed.md.)
"""

# M tokens of all images, D width, H hidden; cuBLASLt counts by columns, so its matrices are ours turned over

import ctypes
from functools import cache
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.models.operations import operation

SPACE = 32 << 20  # bytes that a kernel may use beside its operands
ALIGNED = 16  # bytes to which they are
HALF, SINGLE, IN_SINGLE = 14, 0, 68  # CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_ROW = 3, 7, 8, 11, 12  # CUBLASLT_MATMUL_DESC_...
GELU, GELU_KEPT = 36, 164  # CUBLASLT_EPILOGUE_GELU_BIAS, ..._GELU_AUX_BIAS
LOCK = Lock()  # a plan has one place for its pointers


def hidden(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return z.new_empty(len(z), len(weight))


def hidden_twice(z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return hidden(z, weight, bias), hidden(z, weight, bias)


@operation(hidden)
def dense_gelu(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (by tanh) of (M, D) by a weight (H, D) -> (M, H)."""
    return product(z, weight, bias)


@operation(hidden_twice)
def dense_gelu_kept(z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Before the GELU, and after it."""
    before = hidden(z, weight, bias)
    return before, product(z, weight, bias, before)


def product(z: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None = None) -> Tensor:
    """What comes after the GELU; what came before it is written to `before`, if that is given."""
    epilogue = GELU if before is None else GELU_KEPT
    with LOCK:
        plan = planned(z.device, len(z), len(weight), z.shape[1], epilogue)
        if plan is not None:
            return plan(ready(z), ready(weight), ready(bias), before)
    found = F.linear(z, weight, bias)
    if before is not None:
        before.copy_(found)
    return F.gelu(found, approximate="tanh")


def ready(tensor: Tensor) -> Tensor:
    """The same where a kernel may read it."""
    lies = tensor.is_contiguous() and not tensor.data_ptr() % ALIGNED
    return tensor if lies else tensor.clone(memory_format=torch.contiguous_format)


@cache
def planned(device: torch.device, m: int, h: int, d: int, epilogue: int) -> "Plan | None":
    """None where cuBLASLt has no kernel for it."""
    try:
        return Plan(device, m, h, d, epilogue)
    except RuntimeError:
        return None


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; the algorithm comes first."""

    _fields_ = (("algorithm", ctypes.c_uint64 * 8), ("space", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4))  # fmt: skip


class Plan:
    """How cuBLASLt is to compute a product of one shape."""

    def __init__(self, device: torch.device, m: int, h: int, d: int, epilogue: int, choice: int = 0):
        self.handle = handle(device)
        self.how = made("MatmulDescCreate", ctypes.c_int(IN_SINGLE), ctypes.c_int(SINGLE))
        self.left, self.right, self.result = matrix(d, h), matrix(d, m), matrix(h, m)
        self.set(TRANSPOSE_A, ctypes.c_int(1))
        self.set(EPILOGUE, ctypes.c_int(epilogue))
        if epilogue != GELU:
            self.set(AUX_ROW, ctypes.c_int64(h))
        limits = made("MatmulPreferenceCreate")
        room, aligned = (1, ctypes.c_size_t(SPACE)), [(i, ctypes.c_uint32(ALIGNED)) for i in range(5, 9)]
        for number, value in (room, *aligned):  # CUBLASLT_MATMUL_PREF_...
            ask("MatmulPreferenceSetAttribute", limits, number, ctypes.byref(value), size(value))
        several, count = (Found * (choice + 1))(), ctypes.c_int()
        ask(
            "MatmulAlgoGetHeuristic", self.handle, self.how, self.left, self.right, self.result, self.result,
            limits, choice + 1, several, ctypes.byref(count),
        )  # fmt: skip
        ask("MatmulPreferenceDestroy", limits)
        if count.value <= choice:
            raise RuntimeError(f"cuBLASLt has no kernel for a GELU of {m} x {d} by {d} x {h}")
        self.found = several[choice]

    def __call__(self, z: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None) -> Tensor:
        out, space = z.new_empty(len(z), len(weight)), z.new_empty(SPACE, dtype=torch.uint8)
        one, nothing = ctypes.c_float(1), ctypes.c_float(0)
        self.set(BIAS, pointer(bias))
        if before is not None:
            self.set(AUX, pointer(before))
        with torch.cuda.device(z.device):
            ask(
                "Matmul", self.handle, self.how, ctypes.byref(one),
                pointer(weight), self.left, pointer(z), self.right,
                ctypes.byref(nothing), pointer(out), self.result, pointer(out), self.result,
                ctypes.byref(self.found), pointer(space), ctypes.c_size_t(SPACE),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip
        return out

    def set(self, number: int, value: Any) -> None:
        ask("MatmulDescSetAttribute", self.how, number, ctypes.byref(value), size(value))


def size(value: Any) -> ctypes.c_size_t:
    return ctypes.c_size_t(ctypes.sizeof(value))


def matrix(rows: int, columns: int) -> ctypes.c_void_p:
    return made(
        "MatrixLayoutCreate", ctypes.c_int(HALF), ctypes.c_uint64(rows), ctypes.c_uint64(columns),
        ctypes.c_int64(rows),
    )  # fmt: skip


def made(name: str, *given: Any) -> ctypes.c_void_p:
    """A thing of cuBLASLt's, by its address."""
    found = ctypes.c_void_p()
    ask(name, ctypes.byref(found), *given)
    return found


@cache
def handle(device: torch.device) -> ctypes.c_void_p:
    if device.type != "cuda":
        raise RuntimeError("cuBLASLt computes on NVIDIA GPUs")
    with torch.cuda.device(device):
        return made("Create")


def ask(name: str, *given: Any) -> None:
    loaded = library()
    if loaded is None:
        raise RuntimeError("there is no cuBLASLt here")
    status = getattr(loaded, f"cublasLt{name}")(*given)
    if status:
        raise RuntimeError(f"cuBLASLt's {name} failed with status {status}")


@cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt as PyTorch has loaded it, where PyTorch has it."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
