"""Exported .onnx and .xml files as models: prediction with the card and the runtime of the file."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.data.views import normalise
from vitkit.errors import Error, WeightsError, similar_path
from vitkit.inference import runtimes
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.variants import Config
from vitkit.tasks.task import task_of
from vitkit.weights.card import Card, from_json
from vitkit.weights.limits import check_model
from vitkit.weights.untrusted import one_line

CARD, FACTS = "vitkit", "vitkit_export"  # metadata keys
Run = Callable[[np.ndarray], Tensor]
Shape = tuple[int | None, ...]  # None: any length


@dataclass(frozen=True)
class ExportedModel:
    """The metadata of an exported file and its graph, loaded on the CPU."""

    path: Path
    config: Config
    labels: tuple[str, ...]
    task: str
    preprocessing: Preprocessing
    origin: Origin
    precision: str
    pixels: bool  # the graph takes uint8 (B, H, W, 3) and returns probabilities
    run: Run
    reject_below: float = 0.0

    def logits(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, h, w) to logits, whatever the inputs and outputs of the graph are."""
        if not self.pixels:
            return self.run(normalise(images, self.preprocessing.mean, self.preprocessing.std).numpy())
        probabilities = self.run(images.permute(0, 2, 3, 1).contiguous().numpy())
        return task_of(self).invert(probabilities)

    @property
    def multilabel(self) -> bool:
        return self.task == "multilabel"

    def __repr__(self) -> str:
        height, width = self.config.image_size
        return (
            f"ExportedModel({str(self.path)!r}, {self.precision}, {height}x{width} pixels, "
            f"{self.config.classes} classes)"
        )


def open_exported(place: str | os.PathLike[str]) -> ExportedModel:
    """Load and check an exported file; WeightsError says what is wrong and what to do."""
    path = Path(place)
    if path.suffix.lower() == ".pt2":
        raise WeightsError(
            f"{path}: prediction takes .onnx and .xml files; load this one with torch.export.load, or "
            "predict with the original model"
        )
    if not path.is_file():
        raise WeightsError(f"{path}: no such file;{similar_path(path)}".rstrip(";"), code="weights.not-found")
    if path.suffix.lower() == ".xml" and not path.with_suffix(".bin").is_file():
        raise WeightsError(
            f"{path}: its weights, {path.with_suffix('.bin').name}, are not in the same folder",
            code="weights.not-found",
        )
    try:
        metadata, shapes, run = (open_onnx if path.suffix.lower() == ".onnx" else open_openvino)(path)
    except Error:  # a library is not installed
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise WeightsError(cannot_run(path, error), code="engine.failed") from None
    if CARD not in metadata or FACTS not in metadata:
        raise WeightsError(
            f"{path}: has no labels, preprocessing and image size in its metadata; another program or an old "
            f"vitkit wrote it; {remedy(path)}"
        )
    card, facts = read_card(path, metadata[CARD], metadata[FACTS])
    pixels = facts.get("input") == "pixels"
    size, channels = card.config.image_size, card.config.channels
    if not (
        fits(shapes[0], (None, *size, 3) if pixels else (None, channels, *size))
        and fits(shapes[1], task_of(card).output_shape(card.config))
    ):
        raise WeightsError(
            f"{path}: its graph has input shape {shapes[0]} and output shape {shapes[1]}, but its metadata "
            f"says {size[0]}x{size[1]} pixels and {card.config.classes} classes; {remedy(path)}"
        )
    return ExportedModel(
        path, card.config, card.labels, card.task, card.preprocessing, card.origin,
        str(facts.get("precision", "")), pixels, guarded(path, run), card.reject_below,
    )  # fmt: skip


def guarded(path: Path, run: Run) -> Run:
    """The graph; an error of its runtime becomes a WeightsError that names the file."""

    def call(images: np.ndarray) -> Tensor:
        try:
            return run(images)
        except Exception as error:  # a graph may load and still fail on images
            raise WeightsError(cannot_run(path, error), code="engine.failed") from None

    return call


def cannot_run(path: Path, error: Exception) -> str:
    return f"{path}: cannot run ({one_line(error)}); {remedy(path)}"


def remedy(path: Path) -> str:
    return f"export it again: vitkit export MODEL {path} --overwrite"


def read_card(path: Path, card_text: str, facts_text: str) -> tuple[Card, dict[str, Any]]:
    """Parse and validate the card and the facts, which are untrusted input."""
    try:
        card, facts = from_json(card_text), json.loads(facts_text)
        check_model(card.config, card.preprocessing, card.labels)
        if not isinstance(facts, dict):
            raise WeightsError("its metadata is not a JSON object")
        if card.labels and len(card.labels) != card.config.classes:
            raise WeightsError(f"there are {len(card.labels)} labels for {card.config.classes} classes")
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: {' '.join(str(error).split())[:200]}; {remedy(path)}") from None
    return card, facts


def fits(shape: Shape, expected: Shape) -> bool:
    """Whether a shape of a graph matches the expected one; None matches any length."""
    return len(shape) == len(expected) and all(
        a == b or None in (a, b) for a, b in zip(shape, expected, strict=True)
    )


def open_onnx(path: Path) -> tuple[dict[str, str], tuple[Shape, Shape], Run]:
    """The metadata, the shapes of input and output, and the function that runs the graph."""
    session = runtimes.onnx_session(path)
    tensors = (session.get_inputs()[0], session.get_outputs()[0])
    first, last = (tuple(n if isinstance(n, int) else None for n in tensor.shape) for tensor in tensors)
    return session.get_modelmeta().custom_metadata_map, (first, last), runtimes.onnx_runtime(session)


def open_openvino(path: Path) -> tuple[dict[str, str], tuple[Shape, Shape], Run]:
    """The same for OpenVINO. fp32 and int8 files run in fp32 on every CPU, as in the export's comparison."""
    model = runtimes.core().read_model(path)
    metadata = {
        key: model.get_rt_info([key]).astype(str) for key in (CARD, FACTS) if model.has_rt_info([key])
    }
    shapes = (model.inputs[0].partial_shape, model.outputs[0].partial_shape)
    first, last = (tuple(n.get_length() if n.is_static else None for n in shape) for shape in shapes)
    exact = any(f'"precision": "{kind}"' in metadata.get(FACTS, "") for kind in ("fp32", "int8"))
    return metadata, (first, last), runtimes.openvino(model, "fp32" if exact else None)
