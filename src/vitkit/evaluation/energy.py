"""The energy that a GPU reports to have used: NVML's counter, which every driver brings along."""

import ctypes
from collections.abc import Callable

import torch

Reader = Callable[[], float | None]


class Meter:
    """Joules between one look and the next; None where the device does not report them.

    The counter is the device's own and counts whatever runs on it, idle time too. It is there from Volta on.
    """

    def __init__(self, device: str):
        self.read = reader(device)
        self.last = self.read()

    def lap(self) -> float | None:
        """Since the last look."""
        before, self.last = self.last, self.read()
        return None if before is None or self.last is None else self.last - before


def reader(device: str) -> Reader:
    """A function that tells the joules since the driver was loaded."""
    if not device.startswith("cuda"):
        return nothing
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        number = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(number, ctypes.byref(handle)):
            return nothing
    except (OSError, AttributeError):  # no such library, or one without these functions
        return nothing

    def joules() -> float | None:
        millijoules = ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1000

    return joules


def nothing() -> float | None:
    return None
