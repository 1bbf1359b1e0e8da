"""Pictures of a run without labels: patch features as colours at each evaluation, and those of its task."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.views import normalise
from vitkit.inspection.embeddings import feature_colours
from vitkit.io.files import replace_file
from vitkit.models.vit import ViT, in_patches
from vitkit.report.overlay import in_blocks
from vitkit.runs.context import RunContext
from vitkit.runs.kept_weights import kept_model
from vitkit.runs.page import PICTURES, read
from vitkit.runs.samples import evenly, jpeg, resized, viewed

IMAGES = 4
MOMENTS = 10  # evaluations whose colours are kept
SHOWN = 16  # pictures of the task
SIDE = 96  # pixels of a picture of colours, about


class FeaturePictures:
    """The same few test images at each evaluation; nothing here may end a run."""

    def __init__(self, run: RunContext, say: Callable[[str], None]):
        self.run, self.say, self.images = run, say, torch.empty(0)
        self.wanted = not run.task.predicts and run.options.report

    def load(self) -> Tensor:
        """uint8 (B, 3, H, W): the images as the model gets them."""
        source = self.run.splits[self.run.recipe.report_on]
        model = self.run.model
        assert isinstance(model, ViT)
        views = viewed(source, evenly(range(len(source)), IMAGES), model)
        return in_patches(torch.stack([*views.values()]), model.config.stride) if views else torch.empty(0)

    def keep(self, step: int, *, last: bool = False) -> None:
        """Store the colours of the current features, with `last` also the task's pictures; collective."""
        if not self.wanted or not isinstance(self.run.model, ViT):
            return
        try:
            self.write(step, last=last)
        except Exception as error:  # an odd file, a full disk, out of memory
            why = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
            self.say(f"{PICTURES} could not be written: {why}")

    def write(self, step: int, *, last: bool) -> None:
        run, module = self.run, self.run.state.model
        self.images = self.images if len(self.images) else self.load()
        if not len(self.images):
            return
        module.eval()
        of_task = self.of_task() if last else []
        sharded = run.runtime.is_sharded
        model = kept_model(run.task, module).to(run.runtime.device) if sharded else run.model
        if not run.runtime.is_main or not isinstance(model, ViT):
            return
        colours = colour_pictures(model, self.images.to(run.runtime.device))
        path = run.out / PICTURES
        stored = read(path) or {} if step else {}
        moments = [entry for entry in stored.get("moments", ()) if entry["step"] < step]
        content = {
            "images": [shown(image) for image in self.images],
            "moments": thinned([*moments, {"step": step, "colours": colours}]),
            "pictures": [{"caption": caption, "image": shown(image)} for caption, image in of_task],
        }
        replace_file(path, lambda beside: beside.write_text(json.dumps(content), encoding="utf-8"))

    @torch.no_grad()
    def of_task(self) -> list[tuple[str, Tensor]]:
        run = self.run
        images = run.runtime.to_device({"image": self.images})["image"]
        return run.task.pictures(run.state.model, images)[:SHOWN]


def colour_pictures(model: ViT, images: Tensor) -> list[str]:
    """The first three principal components of the patch features as JPEGs, one for each uint8 image."""
    p = model.preprocessing
    colours = feature_colours(model, normalise(images, p.mean, p.std))
    zoom = max(1, SIDE // max(colours.shape[1:3]))
    return [jpeg(in_blocks(tile, (tile.shape[0] * zoom, tile.shape[1] * zoom))) for tile in colours]


def shown(image: Tensor) -> str:
    """A uint8 image (3, H, W) as a JPEG."""
    return jpeg(resized(np.ascontiguousarray(image.cpu().permute(1, 2, 0).numpy())))


def thinned(moments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOMENTS entries, evenly spread as more are added: without the one nearest to both sides."""
    entries = list(moments)
    while len(entries) > MOMENTS:
        gaps = [entries[i + 1]["step"] - entries[i - 1]["step"] for i in range(1, len(entries) - 1)]
        del entries[1 + gaps.index(min(gaps))]
    return entries
