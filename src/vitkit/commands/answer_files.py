"""Files of `vitkit predict` for boxes and masks: class masks, drawn pictures, and COCO's list of results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.data.decode import decode, read
from vitkit.data.names import folded
from vitkit.errors import Error
from vitkit.inference.predict import Classifier, Prediction
from vitkit.io.files import naming, replace_file
from vitkit.report.target_overlay import class_colour, draw_boxes, draw_mask
from vitkit.tasks.task import Answer

TASK_OF = {
    "--masks": ("segment",), "--draw": ("segment", "detect", "instances"), "--coco": ("detect", "instances"),
}  # fmt: skip


@dataclass
class AnswerFiles:
    """What is written beside the printed answers."""

    labels: tuple[str, ...]
    masks: Path | None = None  # folder of class masks
    draw: Path | None = None  # folder of pictures with boxes or masks
    coco: Path | None = None  # file of all boxes, or of all masks of objects
    lowest: float | None = None  # score of a box in the COCO file; None: all of them
    images: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, prediction: Prediction) -> None:
        """Write the files of one image; one that could not be read keeps its number, and has none."""
        self.images += 1
        if (answer := prediction.answer) is None:
            return
        name = self.file_name(prediction.image)
        if self.masks:
            with naming(self.masks / name):
                mask_picture(answer.value, len(self.labels)).save(self.masks / name)
        if self.draw:
            with naming(self.draw / name):
                Image.fromarray(self.drawn(prediction.image, answer)).save(self.draw / name)
        if self.coco:
            self.results += self.boxes(answer, prediction.image)

    def file_name(self, image: str) -> str:
        """The name of an image as PNG; images of the same name from several folders are numbered."""
        stem = Path(image).stem
        names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        name = next(name for name in names if folded(name) not in self.names)
        self.names.add(folded(name))
        return f"{name}.png"

    def drawn(self, image: str, answer: Answer) -> np.ndarray:
        """The image with the answer over it."""
        pixels, value = decode(read(image)), answer.value
        if isinstance(value, np.ndarray):
            return draw_mask(pixels, value, self.labels)
        numbers = np.array([self.labels.index(one["label"]) for one in value], np.int64)
        boxes = np.array([one["box"] for one in value], np.float64).reshape(-1, 4)
        masks = np.array([one["mask"] for one in value]) if value and "mask" in value[0] else None
        scores = np.array([one["score"] for one in value])
        return draw_boxes(pixels, boxes, numbers, self.labels, scores, masks)

    def boxes(self, answer: Any, image: str) -> list[dict[str, Any]]:
        categories = {label: number for number, label in enumerate(self.labels, 1)}
        entries = answer.reject(self.lowest or 0.0).coco(self.images, categories)
        return [entry | {"file_name": Path(image).name} for entry in entries]

    def finish(self) -> list[str]:
        """Write what waits for all images; returns a line for each place."""
        if self.coco:
            with naming(self.coco):
                replace_file(self.coco, lambda path: path.write_text(json.dumps(self.results), "utf-8"))
        places = {"masks": self.masks, "pictures": self.draw}
        lines = [f"{len(self.names)} {kind} in {place}" for kind, place in places.items() if place]
        return lines + ([f"{len(self.results)} objects in {self.coco}"] if self.coco else [])


def mask_picture(mask: np.ndarray, classes: int) -> Image.Image:
    """A class mask as a picture of class numbers, whose palette are the colours of the classes."""
    picture = Image.fromarray(mask)
    picture.putpalette([part for number in range(classes) for part in class_colour(number)])
    return picture


def answer_files(
    model: Classifier, images: Sequence[str], lowest: float | None, masks: Path | None = None,
    draw: Path | None = None, coco: Path | None = None,
) -> AnswerFiles:  # fmt: skip
    """The files to write; refuses what the model's task has not, and folders of the images themselves."""
    for flag, place in {"--masks": masks, "--draw": draw, "--coco": coco}.items():
        if place and model.task not in TASK_OF[flag]:
            raise Error(
                f"{flag} {place} needs a model for {' or '.join(TASK_OF[flag])}, not {model.task}; omit it",
                code="request.conflict",
            )
    sources = {Path(image).resolve().parent for image in images}
    for folder in filter(None, (masks, draw)):
        if folder.resolve() in sources or (masks and draw and masks.resolve() == draw.resolve()):
            raise Error(
                f"{folder}: files would replace images of the same name; give another folder",
                code="request.conflict",
            )
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
    if coco and not coco.resolve().parent.is_dir():
        raise Error(f"--coco {coco}: there is no folder {coco.parent}", code="file.not-found")
    labels = tuple(model.labels) or tuple(map(str, range(model.config.classes)))
    return AnswerFiles(labels=labels, masks=masks, draw=draw, coco=coco, lowest=lowest)
