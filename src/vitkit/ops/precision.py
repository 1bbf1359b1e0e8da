"""The widest floating-point type that a device computes in."""

import torch


def widest_float(device: torch.device | None) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64
