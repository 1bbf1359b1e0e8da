"""A model on a GPU as recorded kernels: one launch a batch instead of hundreds, in bf16."""

# B images

import copy
from threading import Lock

import torch
from torch import Tensor, nn

from vitkit.data.views import normalise
from vitkit.models.attention import quick_attention
from vitkit.models.recorded import WARM, Recorded
from vitkit.models.variants import Model
from vitkit.models.vit import ViT


class Graphed:
    """uint8 images (B, 3, h, w) to float32 logits on the CPU; a recording for each power of two of images."""

    def __init__(self, model: Model, batch: int):
        self.batch = batch
        self.shape = (model.config.channels, *model.config.image_size)
        self.device = next(model.parameters()).device
        # a ResNet's weights are standardised first, which wants all their digits
        self.plain = isinstance(model, ViT) and model.stem is None
        self.model: nn.Module = copy.deepcopy(model).bfloat16() if self.plain else model
        self.mean, self.std = model.preprocessing.mean, model.preprocessing.std
        self.recordings: dict[int, Recorded] = {}
        self.lock = Lock()

    def __call__(self, images: Tensor) -> Tensor:
        return torch.cat([self.run(part) for part in images.split(self.batch)])

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        size = min(self.batch, 1 << (len(images) - 1).bit_length())
        with self.lock:  # a recording has one place for its images
            if size not in self.recordings:
                self.recordings[size] = self.record(size)
            return self.recordings[size]({"image": images})[: len(images)].cpu()

    def record(self, size: int) -> Recorded:
        given = torch.zeros(size, *self.shape, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self.compute(given)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return Recorded(lambda given: self.compute(given["image"]), {"image": given})

    def compute(self, images: Tensor) -> Tensor:
        ready = normalise(images, self.mean, self.std)
        half = torch.autocast("cuda", torch.bfloat16, enabled=not self.plain)
        with half, quick_attention(self.device):
            return self.model(ready.bfloat16() if self.plain else ready).float()
