"""Prediction in bf16: a bf16 copy of the model, with fused dense layers on a CPU or CUDA graphs on a GPU."""

# B images

import copy
from functools import cache
from threading import Lock

import torch
from torch import Tensor, nn

from vitkit.data.views import levels
from vitkit.models.mlp import Mlp
from vitkit.models.variants import Model
from vitkit.models.vit import ViT
from vitkit.ops.attention import fastest_attention
from vitkit.ops.cuda_graph import WARMUP_CALLS, CudaGraph

ROWS = 4 * 197  # tokens for which oneDNN chooses the weight layout; other numbers run, too


class Bf16Model(nn.Module):
    """Normalised images to float32 logits; autocast would cast all weights again for every batch."""

    def __init__(self, model: Model, fuse_dense: bool = False):
        """fuse_dense: on a CPU, compute bias and GELU within the matrix product, as torch.compile does."""
        super().__init__()
        # a ResNet standardises its weights first, which needs full precision: it runs under autocast
        self.is_copy = isinstance(model, ViT) and model.stem is None
        self.model: nn.Module = copy.deepcopy(model).bfloat16() if self.is_copy else model
        if self.is_copy and fuse_dense and has_fused_dense(torch.bfloat16):
            fuse_dense_layers(self.model)

    def forward(self, images: Tensor) -> Tensor:
        if self.is_copy:
            return self.model(images.bfloat16()).float()
        with torch.autocast(images.device.type, torch.bfloat16):
            return self.model(images).float()


class FusedDense(nn.Module):
    """A dense layer, its bias and optionally a GELU as one oneDNN operation, for prediction on a CPU.

    It is the operation that torch.compile uses, with the weight in oneDNN's own layout, which would otherwise
    be made again for every batch. Eager PyTorch first copies the bias to every row, and reads and writes all
    rows once more for the GELU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none", algorithm: str = ""):
        super().__init__()
        self.weight, self.bias = weight, bias  # the last block reads parts of both
        self.activation, self.algorithm = activation, algorithm
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, z: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(
            z, self.packed, self.bias, self.activation, [], self.algorithm
        )


def fuse_dense_layers(module: nn.Module) -> None:
    """Replace all dense layers and MLPs in a module."""
    for name, child in module.named_children():
        if type(child) is Mlp and child.approximate != "quick":
            gelu = FusedDense(child.up.weight, child.up.bias, "gelu", child.approximate)
            setattr(module, name, nn.Sequential(gelu, FusedDense(child.down.weight, child.down.bias)))
        elif type(child) is nn.Linear:
            setattr(module, name, FusedDense(child.weight, child.bias))
        else:
            fuse_dense_layers(child)


@cache
def has_fused_dense(dtype: torch.dtype) -> bool:
    """Whether oneDNN has this operation for this processor."""
    square = torch.ones(16, 16, dtype=dtype)
    try:
        FusedDense(square, square[0], "gelu", "tanh")(square)
    except (RuntimeError, AttributeError):  # no kernel for this processor, or no such operation
        return False
    return True


class CudaGraphEngine:
    """uint8 images (B, 3, h, w) to float32 logits on the CPU; one CUDA graph for each power-of-two batch."""

    def __init__(self, model: Model, batch: int, compiled: bool = False):
        self.batch = batch
        self.shape = (model.config.channels, *model.config.image_size)
        self.device = next(model.parameters()).device
        self.model = Bf16Model(model)
        self.call = torch.compile(self.logits) if compiled else self.logits
        normalisation = (model.preprocessing.mean, model.preprocessing.std)
        self.shift, self.scale = (levels(values, self.device) for values in normalisation)
        self.graphs: dict[int, HostToHostGraph] = {}
        self.lock = Lock()

    def __call__(self, images: Tensor) -> Tensor:
        if len(images) <= self.batch:
            return self.run(images)
        return torch.cat([self.run(part) for part in images.split(self.batch)])

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        size = min(self.batch, 1 << (len(images) - 1).bit_length())
        with self.lock:  # a graph has one input buffer
            if size not in self.graphs:
                self.graphs[size] = HostToHostGraph(self, size)
            return self.graphs[size](images)

    def compute(self, images: Tensor) -> Tensor:
        with fastest_attention(self.device):
            return self.call(images)

    def logits(self, images: Tensor) -> Tensor:
        return self.model((images - self.shift) / self.scale)  # as data.views.normalise


class HostToHostGraph:
    """One CUDA graph from images on the host to logits on the host; missing rows keep old values."""

    def __init__(self, engine: CudaGraphEngine, size: int):
        self.device = engine.device
        images = torch.zeros(size, *engine.shape, dtype=torch.uint8, device=engine.device)
        stream = torch.cuda.Stream(engine.device)
        stream.wait_stream(torch.cuda.current_stream(engine.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                logits = engine.compute(images)
        torch.cuda.current_stream(engine.device).wait_stream(stream)
        self.images, self.logits = (
            torch.empty_like(t, device="cpu", pin_memory=True) for t in (images, logits)
        )

        def host_to_host(inputs: dict[str, Tensor]) -> None:
            on_device = images.copy_(self.images, non_blocking=True)
            self.logits.copy_(engine.compute(on_device), non_blocking=True)

        self.graph = CudaGraph(host_to_host, {})

    def __call__(self, images: Tensor) -> Tensor:
        self.images[: len(images)].copy_(images)
        self.graph.replay({})
        torch.cuda.current_stream(self.device).synchronize()
        return self.logits[: len(images)].clone()
