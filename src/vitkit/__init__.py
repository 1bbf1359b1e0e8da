"""vitkit: train, evaluate and serve Vision Transformers. Imports are lazy: torch loads on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitkit.telemetry import turn_off

if TYPE_CHECKING:
    from vitkit.api import embed, evaluate, export, finetune, inspect_model, pretrain, push
    from vitkit.commands.export import Exported
    from vitkit.commands.inspect import Inspection
    from vitkit.commands.look import inspect
    from vitkit.commands.push import Pushed
    from vitkit.commands.results import Metrics, Run
    from vitkit.errors import Error, WeightsError
    from vitkit.inference.predict import predict
    from vitkit.inference.zero_shot import zero_shot
    from vitkit.metrics.frozen_features import fewshot
    from vitkit.models.adapt import adapt
    from vitkit.models.positions import resize_positions
    from vitkit.models.variants import build
    from vitkit.planning.plan import Plan
    from vitkit.weights.adapter import merge_adapter
    from vitkit.weights.load import load
    from vitkit.weights.save import save
    from vitkit.weights.untrusted import UntrustedCheckpoint

turn_off()  # before any library with telemetry is imported

__version__ = "0.1.0"
__all__ = [
    "Error",
    "Exported",
    "Inspection",
    "Metrics",
    "Plan",
    "Pushed",
    "Run",
    "UntrustedCheckpoint",
    "WeightsError",
    "adapt",
    "build",
    "embed",
    "evaluate",
    "export",
    "fewshot",
    "finetune",
    "inspect",
    "inspect_model",
    "load",
    "merge_adapter",
    "predict",
    "pretrain",
    "push",
    "resize_positions",
    "save",
    "zero_shot",
]

MODULES = {
    "Error": "vitkit.errors",
    "Exported": "vitkit.commands.export",
    "Inspection": "vitkit.commands.inspect",
    "Metrics": "vitkit.commands.results",
    "Plan": "vitkit.planning.plan",
    "Pushed": "vitkit.commands.push",
    "Run": "vitkit.commands.results",
    "WeightsError": "vitkit.weights.formats.layout",
    "UntrustedCheckpoint": "vitkit.weights.untrusted",
    "adapt": "vitkit.models.adapt",
    "build": "vitkit.models.variants",
    "embed": "vitkit.api",
    "evaluate": "vitkit.api",
    "export": "vitkit.api",
    "fewshot": "vitkit.metrics.frozen_features",
    "finetune": "vitkit.api",
    "inspect": "vitkit.commands.look",
    "inspect_model": "vitkit.api",
    "load": "vitkit.weights.load",
    "merge_adapter": "vitkit.weights.adapter",
    "predict": "vitkit.inference.predict",
    "pretrain": "vitkit.api",
    "push": "vitkit.api",
    "resize_positions": "vitkit.models.positions",
    "save": "vitkit.weights.save",
    "zero_shot": "vitkit.inference.zero_shot",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'vitkit' has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
