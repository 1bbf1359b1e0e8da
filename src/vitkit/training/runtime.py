"""Device, precision, seeds and compilation: the only place that knows them."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Runtime:
    """Where and how precisely a model is run."""

    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, products run in the chosen precision."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "bf16"):
            yield

    def place(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def callable(self, model: nn.Module) -> nn.Module:
        """The model as it is to be called; what is saved stays the bare one."""
        return torch.compile(model) if self.compile else model  # type: ignore[return-value]

    def facts(self) -> dict[str, Any]:
        """What a reader of a run must know of the machine."""
        cuda = self.device.startswith("cuda")
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else platform.machine(),
            "precision": self.precision,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }


def choose(device: str = "auto", precision: str = "auto", compile: bool = False) -> Runtime:
    """The best device there is unless one is named; bf16 where it is fast, else fp32."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used here: {' '.join(str(error).split())[:120]}"
        ) from None
    if precision == "auto":
        precision = "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be auto, {' or '.join(PRECISIONS)}, not {precision!r}")
    return Runtime(device, precision, compile)


def seed_step(seed: int, step: int) -> None:
    """Dropout of a step depends on the seed and the step alone, so a run resumes exactly."""
    torch.manual_seed((seed * 1_000_003 + step) % 2**63)


def data_workers(workers: int | None) -> int:
    """Processes that prepare data: those asked for, or as many as there are cores, at most 16."""
    return workers if workers is not None else min(16, os.cpu_count() or 1)
