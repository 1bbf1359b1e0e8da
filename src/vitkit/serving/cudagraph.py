"""A model on a GPU as recorded kernels: one launch a batch instead of hundreds, in bf16."""

# B images

import copy
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor, nn

from vitkit.data.views import levels
from vitkit.models.attention import quick_attention
from vitkit.models.variants import Model
from vitkit.models.vit import ViT

WARM = 3  # runs before one is recorded, in which libraries choose their kernels


@dataclass(frozen=True)
class Recording:
    """Kernels of one batch size, and where they read and write."""

    graph: torch.cuda.CUDAGraph
    given: Tensor
    found: Tensor


class Graphed:
    """uint8 images (B, 3, h, w) to float32 logits on the CPU; a recording for each power of two of images."""

    def __init__(self, model: Model, batch: int):
        self.batch = batch
        self.shape = (model.config.channels, *model.config.image_size)
        self.device = next(model.parameters()).device
        # a ResNet's weights are standardised first, which wants all their digits
        self.plain = isinstance(model, ViT) and model.stem is None
        self.model: nn.Module = copy.deepcopy(model).bfloat16() if self.plain else model
        about = model.preprocessing
        self.shift, self.scale = (levels(values, self.device) for values in (about.mean, about.std))
        self.recordings: dict[int, Recording] = {}
        self.lock = Lock()

    def __call__(self, images: Tensor) -> Tensor:
        return torch.cat([self.run(part) for part in images.split(self.batch)])

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        size = min(self.batch, 1 << (len(images) - 1).bit_length())
        with self.lock:  # a recording has one place for its images
            if size not in self.recordings:
                self.recordings[size] = self.record(size)
            of = self.recordings[size]
            of.given[: len(images)].copy_(images)
            of.graph.replay()
            return of.found[: len(images)].cpu()

    def record(self, size: int) -> Recording:
        given = torch.zeros(size, *self.shape, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self.compute(given)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.compute(given)
        return Recording(graph, given, found)

    def compute(self, images: Tensor) -> Tensor:
        ready = torch.sub(images, self.shift).div_(self.scale)  # normalise: nothing may come from the host
        half = torch.autocast("cuda", torch.bfloat16, enabled=not self.plain)
        with half, quick_attention(self.device):
            return self.model(ready.bfloat16() if self.plain else ready).float()
