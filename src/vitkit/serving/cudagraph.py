"""A model on a GPU as recorded kernels: one launch a batch instead of hundreds, in bf16."""

# B images

from threading import Lock

import torch
from torch import Tensor

from vitkit.data.views import levels
from vitkit.models.attention import quick_attention
from vitkit.models.recorded import WARM, Recorded
from vitkit.models.variants import Model
from vitkit.serving.half import Half


class Graphed:
    """uint8 images (B, 3, h, w) to float32 logits on the CPU; a recording for each power of two of images."""

    def __init__(self, model: Model, batch: int, compiled: bool = False):
        self.batch = batch
        self.shape = (model.config.channels, *model.config.image_size)
        self.device = next(model.parameters()).device
        self.half = Half(model)
        self.call = torch.compile(self.judge) if compiled else self.judge
        shown = model.preprocessing
        self.shift, self.scale = (levels(values, self.device) for values in (shown.mean, shown.std))
        self.recordings: dict[int, Whole] = {}
        self.lock = Lock()

    def __call__(self, images: Tensor) -> Tensor:
        if len(images) <= self.batch:
            return self.run(images)
        return torch.cat([self.run(part) for part in images.split(self.batch)])

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        size = min(self.batch, 1 << (len(images) - 1).bit_length())
        with self.lock:  # a recording has one place for its images
            if size not in self.recordings:
                self.recordings[size] = Whole(self, size)
            return self.recordings[size](images)

    def compute(self, images: Tensor) -> Tensor:
        with quick_attention(self.device):
            return self.call(images)

    def judge(self, images: Tensor) -> Tensor:
        return self.half((images - self.shift) / self.scale)  # as data.views.normalise


class Whole:
    """From images on the host to logits on the host, all of it recorded; rows that are not given stay old."""

    def __init__(self, of: Graphed, size: int):
        self.device = of.device
        images = torch.zeros(size, *of.shape, dtype=torch.uint8, device=of.device)
        stream = torch.cuda.Stream(of.device)
        stream.wait_stream(torch.cuda.current_stream(of.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                logits = of.compute(images)
        torch.cuda.current_stream(of.device).wait_stream(stream)
        self.images, self.logits = (
            torch.empty_like(t, device="cpu", pin_memory=True) for t in (images, logits)
        )

        def whole(given: dict[str, Tensor]) -> None:
            there = images.copy_(self.images, non_blocking=True)
            self.logits.copy_(of.compute(there), non_blocking=True)

        self.recorded = Recorded(whole, {})

    def __call__(self, images: Tensor) -> Tensor:
        self.images[: len(images)].copy_(images)
        self.recorded({})
        torch.cuda.current_stream(self.device).synchronize()
        return self.logits[: len(images)].clone()
