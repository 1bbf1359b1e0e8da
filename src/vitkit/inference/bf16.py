"""A model in bf16: a rounded copy of it where that may be, else the model itself under autocast."""

# B images

import copy
from functools import cache
from threading import Lock

import torch
from torch import Tensor, nn

from vitkit.data.views import levels
from vitkit.models.encoder import Mlp
from vitkit.models.variants import Model
from vitkit.models.vit import ViT
from vitkit.ops.attention import fastest_attention
from vitkit.ops.cuda_graph import WARMUP_CALLS, CudaGraph

ROWS = 4 * 197  # tokens, by which oneDNN chooses an order for weights; others are computed as well


class Half(nn.Module):
    """Normalised images to float32 logits. Autocast rounds all weights for every batch, a copy once."""

    def __init__(self, model: Model, in_one: bool = False):
        """in_one: on a CPU, what surrounds a product is computed with it, as a compiler would have it."""
        super().__init__()
        # a ResNet's weights are standardised first, which wants all their digits
        self.plain = isinstance(model, ViT) and model.stem is None
        self.model: nn.Module = copy.deepcopy(model).bfloat16() if self.plain else model
        if self.plain and in_one and have_dense(torch.bfloat16):
            put_in_one(self.model)

    def forward(self, images: Tensor) -> Tensor:
        if self.plain:
            return self.model(images.bfloat16()).float()
        with torch.autocast(images.device.type, torch.bfloat16):
            return self.model(images).float()


class Dense(nn.Module):
    """A dense layer, its bias and perhaps a GELU as one product of oneDNN, for prediction on a CPU.

    The operation is the one that PyTorch's compiler takes, with the weight in the order that the product
    reads it in; as it lies in a model, it would be put into that order for every batch. Eagerly, PyTorch
    copies the bias to every row first, and reads and writes all of them again for the GELU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, after: str = "none", how: str = ""):
        super().__init__()
        self.weight, self.bias, self.after, self.how = weight, bias, after, how  # a last layer takes parts
        self.ordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, z: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(z, self.ordered, self.bias, self.after, [], self.how)


def put_in_one(part: nn.Module) -> None:
    """Let all dense layers below a part be such."""
    for name, child in part.named_children():
        if type(child) is Mlp:
            gelu = Dense(child.up.weight, child.up.bias, "gelu", child.approximate)
            setattr(part, name, nn.Sequential(gelu, Dense(child.down.weight, child.down.bias)))
        elif type(child) is nn.Linear:
            setattr(part, name, Dense(child.weight, child.bias))
        else:
            put_in_one(child)


@cache
def have_dense(kind: torch.dtype) -> bool:
    """Whether oneDNN computes such a layer on this processor."""
    square = torch.ones(16, 16, dtype=kind)
    try:
        Dense(square, square[0], "gelu", "tanh")(square)
    except (RuntimeError, AttributeError):  # no kernel for this processor, or no such operation
        return False
    return True


class CudaGraphEngine:
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
        with fastest_attention(self.device):
            return self.call(images)

    def judge(self, images: Tensor) -> Tensor:
        return self.half((images - self.shift) / self.scale)  # as data.views.normalise


class Whole:
    """From images on the host to logits on the host, all of it recorded; rows that are not given stay old."""

    def __init__(self, of: CudaGraphEngine, size: int):
        self.device = of.device
        images = torch.zeros(size, *of.shape, dtype=torch.uint8, device=of.device)
        stream = torch.cuda.Stream(of.device)
        stream.wait_stream(torch.cuda.current_stream(of.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                logits = of.compute(images)
        torch.cuda.current_stream(of.device).wait_stream(stream)
        self.images, self.logits = (
            torch.empty_like(t, device="cpu", pin_memory=True) for t in (images, logits)
        )

        def whole(given: dict[str, Tensor]) -> None:
            there = images.copy_(self.images, non_blocking=True)
            self.logits.copy_(of.compute(there), non_blocking=True)

        self.graph = CudaGraph(whole, {})

    def __call__(self, images: Tensor) -> Tensor:
        self.images[: len(images)].copy_(images)
        self.graph.replay({})
        torch.cuda.current_stream(self.device).synchronize()
        return self.logits[: len(images)].clone()
