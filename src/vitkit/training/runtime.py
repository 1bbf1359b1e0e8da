"""Device, precision, processes, seeds and compilation: the only place that knows them."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitkit.models.attention import quick_attention
from vitkit.models.fused import compiled
from vitkit.options import check_device
from vitkit.training.halves import Halved

PRECISIONS = ("fp32", "bf16")
SPREADS = ("ddp", "fsdp")  # every process has the whole model, or its part of each tensor
PATIENCE = timedelta(minutes=10)  # for the slowest process: a large checkpoint, a cold file system


@dataclass(frozen=True)
class Runtime:
    """Where, how precisely and by how many processes a model is trained; none of it is part of a recipe."""

    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False
    recompute: bool = False  # activations of each block again in the backward pass: less memory, more time
    spread: str = "ddp"
    rank: int = 0
    world: int = 1
    record: bool = True  # on a GPU, a step is recorded once and then played, where no other way is asked for

    @property
    def main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    @property
    def cut(self) -> bool:
        """Whether tensors are cut over the processes."""
        return self.spread == "fsdp" and self.world > 1

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Inside, the processes that torchrun has started know each other."""
        if self.world == 1 or dist.is_initialized():
            yield
            return
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE,
            store=meet(self.rank, self.world), rank=self.rank, world_size=self.world,
        )  # fmt: skip
        try:
            yield
        finally:
            dist.destroy_process_group()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, products run in the chosen precision, and attention by the quickest kernel there is."""
        half = torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.precision == "bf16")
        with half, quick_attention(self.device):
            yield

    def place(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.startswith("cuda"):  # from pinned memory, a copy waits for nothing
            return {k: t.pin_memory().to(self.device, non_blocking=True) for k, t in batch.items()}
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def free(self) -> None:
        """Give back memory that nothing uses any more."""
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def settle(self, model: nn.Module) -> nn.Module:
        """The bare model on its device; with fsdp its tensors are cut over the processes; names stay."""
        stacks: list[Any] = [part for part in model.modules() if hasattr(part, "recompute")]
        for stack in stacks:
            stack.recompute = self.recompute
        if not self.cut:
            return model.to(self.device)
        from torch.distributed.fsdp import fully_shard  # a second to import

        for stack in stacks:
            for block in stack.units():
                fully_shard(block)  # moved to the device and cut one by one: the whole may not fit
        fully_shard(model)
        for stack in stacks:
            for block, after in pairwise(stack.units()):
                block.set_modules_to_forward_prefetch([after])  # fetched while the one before computes
        return model

    def callable(self, model: nn.Module) -> nn.Module:
        """The model as it is to be called; what is saved stays the bare one."""
        if self.world > 1 and not self.cut:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif self.world == 1 and self.precision == "bf16" and not self.recompute:
            model = Halved(model)
        return compiled(model) if self.compile else model

    @contextmanager
    def accumulating(self, call: nn.Module, more: bool) -> Iterator[None]:
        """Inside, gradients stay in their process while there are more micro-batches to come."""
        bare: Any = getattr(call, "_orig_mod", call)
        if self.cut:
            bare.set_requires_gradient_sync(not more)
        if more and isinstance(bare, DistributedDataParallel):
            with bare.no_sync():
                yield
        else:
            yield

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def gathered(self, value: Tensor) -> Tensor:
        """The rows of all processes, one after the other; each may have another number of them."""
        return torch.cat(self.everyones(value.cpu())) if self.world > 1 else value

    def everyones(self, value: Any) -> list[Any]:
        """What each process has, in their order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agreed(self, value: Any) -> Any:
        """What the main process has, for all."""
        return self.everyones(value)[0]

    def first(self, act: Callable[[], Any], patience: timedelta | None = None) -> Any:
        """What the main process makes of `act`, for all; an error that it tells a user is told by all.

        patience: of the others, where it may take longer than a step or a checkpoint.
        """
        if self.world == 1:
            return act()
        group = dist.new_group(backend="gloo", timeout=patience) if patience else None
        box: list[Any] = [None, None]
        failure: Exception | None = None
        if self.main:
            try:
                box[0] = act()
            except (ValueError, OSError) as error:
                failure, box[1] = error, (OSError if isinstance(error, OSError) else ValueError, str(error))
        dist.broadcast_object_list(box, src=0, group=group)
        if box[1]:
            self.wait()  # nobody is gone before all have heard it
            kind, text = box[1]
            raise failure or kind(text)
        return box[0]

    def most(self, *numbers: float) -> list[float]:
        """The largest that any process has, of each."""
        if self.world == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def wait(self) -> None:
        """Until every process has come here."""
        self.most(0)

    def share(self, batch: int) -> range:
        """This process's places of a global batch."""
        if batch % self.world:
            raise ValueError(
                f"a batch of {batch} images cannot be shared by {self.world} processes; "
                f"give --batch {self.world * max(1, round(batch / self.world))}"
            )
        each = batch // self.world
        return range(self.rank * each, (self.rank + 1) * each)

    def facts(self) -> dict[str, Any]:
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


def choose(
    device: str = "auto",
    precision: str = "auto",
    compile: bool = False,
    recompute: bool = False,
    spread: str = "ddp",
    deterministic: bool = False,
    record: bool = True,
) -> Runtime:
    """The best device unless one is named; bf16 where it is fast, else fp32; the processes of torchrun."""
    if deterministic:  # of this process, before it has asked a GPU for anything
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    rank, local, world = (int(os.environ.get(k, d)) for k, d in
                          (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and world > 1:
        device = f"cuda:{local}"
    check_device(device)
    try:
        torch.ones(1, device=device).add(1).item()  # some devices only have shapes
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise ValueError(
            f"device {device!r} cannot be used here: {' '.join(str(error).split())[:120]}"
        ) from None
    if precision == "auto":
        precision = "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be auto, {' or '.join(PRECISIONS)}, not {precision!r}")
    if spread not in SPREADS:
        raise ValueError(f"spread must be {' or '.join(SPREADS)}, not {spread!r}")
    return Runtime(device, precision, compile, recompute, spread, rank, world, record)


def meet(rank: int, world: int) -> dist.Store:
    """A store for the processes of this start alone.

    torchrun has one for all its restarts, with the addresses of the dead still in it (pytorch issue 135712).
    So each process says hello by a name that was never used, and the main one answers it with where to meet.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
    store.set_timeout(PATIENCE)
    name, begun, missing = uuid4().hex, time.monotonic(), set(range(1, world))
    if rank:
        store.set(f"hello/{rank}", name)
        place = store.get(f"place/{name}").decode()  # waits for it
        store.set(f"here/{place}/{rank}", "")
        return dist.PrefixStore(place, store)
    while missing:
        for other in sorted(missing):
            if store.check([f"here/{name}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"place/{store.get(f'hello/{other}').decode()}", name)
        if time.monotonic() - begun > PATIENCE.total_seconds():
            raise TimeoutError(f"processes {sorted(missing)} did not come within {PATIENCE}")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def alone(runtime: Runtime) -> Runtime:
    """The same machine, one process: for work that each process does for itself."""
    return replace(runtime, rank=0, world=1)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in place; of one that is not spread, all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every process must ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Dropout of a step depends on the seed, the step and the process alone, so a run resumes exactly."""
    value = (seed * 1_000_003 + step + rank * 0x9E3779B97F4A7C15) % 2**63
    torch.default_generator.manual_seed(value)  # torch.manual_seed takes milliseconds for the same
    for generator in torch.cuda.default_generators if torch.cuda.is_initialized() else ():
        generator.manual_seed(value)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def data_workers(workers: int | None) -> int:
    """Processes that prepare data: those asked for, or a share of the cores, at most 16."""
    if workers is not None and workers < 0:
        raise ValueError(f"workers must be 0 (none but the process itself) or more, not {workers}")
    if workers is not None:
        return workers
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(16, cores() // here - (cores() > 4 * here)))  # one core of many for the loop itself
