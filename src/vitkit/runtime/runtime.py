"""Device, precision, compilation and processes: the only place that knows them."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitkit.errors import Error
from vitkit.ops.attention import fastest_attention
from vitkit.ops.fused import compile_model
from vitkit.ops.low_precision import LowPrecisionCopy
from vitkit.options import check_device
from vitkit.runtime.processes import TIMEOUT, Collectives, rendezvous

PRECISIONS = ("fp32", "bf16")
PARALLEL = ("ddp", "fsdp")  # every process has the whole model, or its shard of each tensor


@dataclass(frozen=True)
class Runtime(Collectives):
    """Where, how precisely and by how many processes a model is trained; none of it is part of a recipe."""

    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False
    recompute: bool = False  # activation checkpointing: less memory, more time
    parallel: str = "ddp"
    rank: int = 0
    world: int = 1
    cuda_graph: bool = True  # on a GPU, capture a training step once and replay it where possible

    @property
    def is_sharded(self) -> bool:
        """Whether tensors are sharded over the processes."""
        return self.parallel == "fsdp" and self.world > 1

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """Inside, the processes that torchrun has started can communicate."""
        if self.world == 1 or dist.is_initialized():
            yield
            return
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT,
            store=rendezvous(self.rank, self.world), rank=self.rank, world_size=self.world,
        )  # fmt: skip
        try:
            yield
        finally:
            dist.destroy_process_group()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Inside, matrix products run in the chosen precision, and attention by the fastest kernel."""
        cast = torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.precision == "bf16")
        with cast, fastest_attention(self.device):
            yield

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.startswith("cuda"):  # a copy from pinned memory blocks nothing
            return {k: t.pin_memory().to(self.device, non_blocking=True) for k, t in batch.items()}
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def empty_cache(self) -> None:
        """Return unused memory of the allocator to the device."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def place(self, model: nn.Module) -> nn.Module:
        """The model on its device, sharded over the processes with fsdp; parameter names stay."""
        stacks: list[Any] = [part for part in model.modules() if hasattr(part, "recompute")]
        for stack in stacks:
            stack.recompute = self.recompute
        if not self.is_sharded:
            return model.to(self.device)
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        for stack in stacks:
            for block in stack.units():
                fully_shard(block)  # moved and sharded one by one: the whole model may not fit
        fully_shard(model)
        for stack in stacks:
            for block, after in pairwise(stack.units()):
                block.set_modules_to_forward_prefetch([after])  # gathered while the block before computes
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it: wrapped and compiled. Files hold the model itself."""
        if self.world > 1 and not self.is_sharded:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif self.world == 1 and self.precision == "bf16" and not self.recompute:
            model = LowPrecisionCopy(model)
        return compile_model(model) if self.compile else model

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, enabled: bool) -> Iterator[None]:
        """Inside, gradients are averaged over the processes only if enabled: at the last micro-batch."""
        inner: Any = getattr(wrapped, "_orig_mod", wrapped)
        if self.is_sharded:
            inner.set_requires_gradient_sync(enabled)
        if not enabled and isinstance(inner, DistributedDataParallel):
            with inner.no_sync():
                yield
        else:
            yield

    def describe(self) -> dict[str, Any]:
        """What a reader of a run must know of the machine."""
        cuda = self.device.startswith("cuda")
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else platform.machine(),
            "processes": self.world,
            "precision": self.precision,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def choose_runtime(
    device: str = "auto",
    precision: str = "auto",
    compile: bool = False,
    recompute: bool = False,
    parallel: str = "ddp",
    deterministic: bool = False,
    cuda_graph: bool = True,
) -> Runtime:
    """The best device unless one is named; bf16 where it is fast, else fp32; the processes of torchrun."""
    if deterministic:  # must be set before the first use of the GPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    rank, local_rank, world = (int(os.environ.get(k, d)) for k, d in
                               (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and world > 1:
        device = f"cuda:{local_rank}"
    check_device(device)
    try:
        torch.ones(1, device=device).add(1).item()  # the meta device has shapes only
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise Error(
            f"device {device!r} cannot be used here: {' '.join(str(error).split())[:120]}",
            code="device.unavailable",
        ) from None
    if precision == "auto":
        precision = "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"
    if precision not in PRECISIONS:
        raise Error(
            f"precision must be auto, {' or '.join(PRECISIONS)}, not {precision!r}", code="request.value"
        )
    if parallel not in PARALLEL:
        raise Error(f"parallel must be {' or '.join(PARALLEL)}, not {parallel!r}", code="request.value")
    return Runtime(device, precision, compile, recompute, parallel, rank, world, cuda_graph)


def single_process(runtime: Runtime) -> Runtime:
    """The same machine with one process: for work that each process does on its own."""
    return replace(runtime, rank=0, world=1)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, in place; all of a tensor that is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor; every process must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Make the dropout of a step depend on seed, step and process alone, so that a run resumes exactly."""
    value = (seed * 1_000_003 + step + rank * 0x9E3779B97F4A7C15) % 2**63
    torch.default_generator.manual_seed(value)  # torch.manual_seed takes milliseconds for the same
    for generator in torch.cuda.default_generators if torch.cuda.is_initialized() else ():
        generator.manual_seed(value)


def cpu_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def data_workers(workers: int | None) -> int:
    """Processes that prepare data: as many as asked for, or a share of the cores, at most 16."""
    if workers is not None and workers < 0:
        raise Error(f"workers must be 0 (load in this process) or more, not {workers}", code="request.value")
    if workers is not None:
        return workers
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = cpu_cores()
    return max(1, min(16, cores // local_world - (cores > 4 * local_world)))  # one core is for the loop
