"""An .onnx or .xml file that vitkit wrote, as a model that predicts: its own card, its own runtime."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.data.views import normalise
from vitkit.errors import Error, WeightsError
from vitkit.inference import runtimes
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.variants import Config
from vitkit.tasks.task import task_of
from vitkit.weights.card import Card, from_json
from vitkit.weights.limits import check_model
from vitkit.weights.untrusted import one_line

CARD, FACTS = "vitkit", "vitkit_export"  # keys of a file's metadata
Run = Callable[[np.ndarray], Tensor]
Shape = tuple[int | None, ...]  # None: any length


@dataclass(frozen=True)
class ExportedModel:
    """What an exported file says of itself, and its graph, ready to run on the CPU."""

    path: Path
    config: Config
    labels: tuple[str, ...]
    task: str
    preprocessing: Preprocessing
    origin: Origin
    precision: str
    pixels: bool  # the graph takes uint8 (B, H, W, 3) and gives probabilities
    run: Run

    def logits(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, h, w) to logits, whatever the graph takes and gives."""
        if not self.pixels:
            return self.run(normalise(images, self.preprocessing.mean, self.preprocessing.std).numpy())
        chances = self.run(images.permute(0, 2, 3, 1).contiguous().numpy())
        return task_of(self).invert(chances)

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
    """Read and check a file that vitkit exported; WeightsError says what is wrong and what to do."""
    path = Path(place)
    if path.suffix.lower() == ".pt2":
        raise WeightsError(
            f"{path}: prediction takes .onnx and .xml files; use this one by torch.export.load, or predict "
            "with the model it was made of"
        )
    if not path.is_file():
        raise WeightsError(f"{path}: there is no such file", code="weights.not-found")
    if path.suffix.lower() == ".xml" and not path.with_suffix(".bin").is_file():
        raise WeightsError(
            f"{path}: {path.with_suffix('.bin').name} which holds its weights, is not beside it",
            code="weights.not-found",
        )
    try:
        metadata, shapes, run = (open_onnx if path.suffix.lower() == ".onnx" else open_openvino)(path)
    except Error:  # a library that is not installed
        raise
    except Exception as error:  # ONNX Runtime's have no class in common: damage, weights not beside the file
        raise WeightsError(cannot_run(path, error), code="engine.failed") from None
    if CARD not in metadata or FACTS not in metadata:
        raise WeightsError(
            f"{path}: it does not hold the labels, preprocessing and size that vitkit export writes into its "
            f"files (another program or an old vitkit wrote it); {remedy(path)}"
        )
    card, facts = read_card(path, metadata[CARD], metadata[FACTS])
    pixels = facts.get("input") == "pixels"
    size, channels = card.config.image_size, card.config.channels
    if not (
        fits(shapes[0], (None, *size, 3) if pixels else (None, channels, *size))
        and fits(shapes[1], (None, card.config.classes or None))
    ):
        raise WeightsError(
            f"{path}: its graph takes {shapes[0]} and gives {shapes[1]}, which is not what its description "
            f"says: {size[0]}x{size[1]} pixels, {card.config.classes} classes; {remedy(path)}"
        )
    return ExportedModel(
        path, card.config, card.labels, card.task, card.preprocessing, card.origin,
        str(facts.get("precision", "")), pixels, guarded(path, run),
    )  # fmt: skip


def guarded(path: Path, run: Run) -> Run:
    """The graph, with its file named where a runtime fails on it."""

    def call(images: np.ndarray) -> Tensor:
        try:
            return run(images)
        except Exception as error:  # a graph may load and fail only on images
            raise WeightsError(cannot_run(path, error), code="engine.failed") from None

    return call


def cannot_run(path: Path, error: Exception) -> str:
    return f"{path}: cannot be run ({one_line(error)}); {remedy(path)}"


def remedy(path: Path) -> str:
    return f"write it again: vitkit export MODEL {path} --overwrite"


def read_card(path: Path, card: str, facts: str) -> tuple[Card, dict[str, Any]]:
    """The card and the facts, each value of which anyone may have written."""
    try:
        found, told = from_json(card), json.loads(facts)
        check_model(found.config, found.preprocessing, found.labels)
        if not isinstance(told, dict):
            raise WeightsError("its description is no table")
        if found.labels and len(found.labels) != found.config.classes:
            raise WeightsError(f"there are {len(found.labels)} labels for {found.config.classes} classes")
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: {' '.join(str(error).split())[:200]}; {remedy(path)}") from None
    return found, told


def fits(shape: Shape, expected: Shape) -> bool:
    """Whether a graph with this shape takes or gives the expected one; None is any length."""
    return len(shape) == len(expected) and all(
        have == want or None in (have, want) for have, want in zip(shape, expected, strict=True)
    )


def open_onnx(path: Path) -> tuple[dict[str, str], tuple[Shape, Shape], Run]:
    """Metadata, the shapes of input and output, and what runs the file."""
    session = runtimes.onnx_session(path)
    ends = (session.get_inputs()[0], session.get_outputs()[0])
    first, last = (tuple(n if isinstance(n, int) else None for n in end.shape) for end in ends)
    return session.get_modelmeta().custom_metadata_map, (first, last), runtimes.onnx_runtime(session)


def open_openvino(path: Path) -> tuple[dict[str, str], tuple[Shape, Shape], Run]:
    """The same of OpenVINO's two files. In fp32 what was compared is computed, on every processor."""
    model = runtimes.core().read_model(path)
    metadata = {
        key: model.get_rt_info([key]).astype(str) for key in (CARD, FACTS) if model.has_rt_info([key])
    }
    ends = (model.inputs[0].partial_shape, model.outputs[0].partial_shape)
    first, last = (tuple(n.get_length() if n.is_static else None for n in end) for end in ends)
    exact = any(f'"precision": "{kind}"' in metadata.get(FACTS, "") for kind in ("fp32", "int8"))
    return metadata, (first, last), runtimes.openvino(model, "fp32" if exact else None)
