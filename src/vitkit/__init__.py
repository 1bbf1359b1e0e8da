"""vitkit: the Vision Transformer system. Importing it is light; torch comes with the first name used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitkit.telemetry import turn_off

if TYPE_CHECKING:
    from vitkit.api import embed, evaluate, export, finetune, pretrain
    from vitkit.errors import Error
    from vitkit.evaluation.fewshot import fewshot
    from vitkit.layouts.layout import WeightsError
    from vitkit.models.adapt import adapt
    from vitkit.models.positions import resize_positions
    from vitkit.models.variants import build
    from vitkit.serving.predict import predict
    from vitkit.tasks.export import Exported
    from vitkit.tasks.look import inspect
    from vitkit.tasks.plan import Plan
    from vitkit.tasks.results import Metrics, Run
    from vitkit.weights.archive import UntrustedCheckpoint
    from vitkit.weights.load import load
    from vitkit.weights.save import save

turn_off()  # before any library that reports is imported

__version__ = "0.1.0"
__all__ = [
    "Error",
    "Exported",
    "Metrics",
    "Plan",
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
    "load",
    "predict",
    "pretrain",
    "resize_positions",
    "save",
]

HOMES = {
    "Error": "vitkit.errors",
    "Exported": "vitkit.tasks.export",
    "Metrics": "vitkit.tasks.results",
    "Plan": "vitkit.tasks.plan",
    "Run": "vitkit.tasks.results",
    "WeightsError": "vitkit.layouts.layout",
    "UntrustedCheckpoint": "vitkit.weights.archive",
    "adapt": "vitkit.models.adapt",
    "build": "vitkit.models.variants",
    "embed": "vitkit.api",
    "evaluate": "vitkit.api",
    "export": "vitkit.api",
    "fewshot": "vitkit.evaluation.fewshot",
    "finetune": "vitkit.api",
    "inspect": "vitkit.tasks.look",
    "load": "vitkit.weights.load",
    "predict": "vitkit.serving.predict",
    "pretrain": "vitkit.api",
    "resize_positions": "vitkit.models.positions",
    "save": "vitkit.weights.save",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'vitkit' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
