"""Shared by all tests: peers made importable, and small models with random numbers in every parameter."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitkit.models.variants import Model, build

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parent / name) for name in ("faults", "gpu")]
import importable_peers  # noqa: F401
from recording import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    small_disk,
    straight,
    switched_off,
    tally,
)

SMALL = {"width": 32, "depth": 2, "heads": 2, "hidden": 48, "patch": 8, "image_size": (32, 32), "classes": 5}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests for a GPU are skipped where there is none; docs/lab/gpu.md records where they ran."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: make gpu")


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def randomise(model: Model, scale: float = 0.05) -> Model:
    """Random numbers in every parameter, so that no array can hide behind its initial zeros or ones."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=scale)
    return model.eval()


@pytest.fixture
def small() -> Callable[..., Model]:
    """A two-layer ViT of 32 pixels; options as for build."""

    def make(name: str = "ViT-Ti/8", **options: Any) -> Model:
        return randomise(build(name, **(SMALL | options)))

    return make


@pytest.fixture
def small_hybrid() -> Callable[..., Model]:
    """A hybrid with a real, if short, ResNet stem, of 64 pixels."""
    from vitkit.models.resnet import StemConfig

    def make(blocks: tuple[int, ...] = (1, 2), patch: int = 1, **options: Any) -> Model:
        sizes = SMALL | {"patch": patch, "image_size": (64, 64), "stem": StemConfig(blocks=blocks)}
        return randomise(build("ViT-Ti/16", **(sizes | options)))

    return make


@pytest.fixture
def small_resnet() -> Callable[..., Model]:
    def make(**options: Any) -> Model:
        sizes = {"blocks": (1, 2, 1, 1), "width": 64, "classes": 5, "image_size": (64, 64)}
        return randomise(build("BiT-R50x1", **(sizes | options)))

    return make
