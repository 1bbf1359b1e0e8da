"""The memory of a training step: by formula for a classifier, else counted on tensors without values."""

import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.data.target_views import TargetView, empty_stacks
from vitkit.metrics.cost import Memory, activation_bytes, training_memory
from vitkit.models.dense.dense_model import DenseModel
from vitkit.models.variants import Config, Model, skeleton
from vitkit.recipes.recipe import Recipe
from vitkit.runs.batches import training_view
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Batch
from vitkit.training.trainable import freeze

BY_FORMULA = ("classify", "multilabel", "distill", "distill_labels")  # the last two would open a teacher
HALF = 0.75  # of what a dense head and its loss keep in bf16: norms and losses stay in float32
FEW, MORE = 2, 4  # images of the two steps that are counted


def trained_skeleton(recipe: Recipe, config: Config) -> Model:
    """A model without values, with LoRA's adapters if the recipe has them, and frozen as it says."""
    empty = skeleton(config)
    freeze(empty, recipe.train, recipe.lora)
    return empty


def memory_of(
    recipe: Recipe, model: Model, runtime: Runtime, images: int, source: Source | None = None
) -> Memory:
    """The memory of a step; source: of the training images, from whose masks or boxes a task learns."""
    half, empty = runtime.precision == "bf16", trained_skeleton(recipe, model.config)
    module: nn.Module = empty
    activations = None
    task = recipe.task
    if task.name not in BY_FORMULA and (source is not None or not task.targets):
        view: Any = task.target_view(training_view(recipe), source) if source is not None else None
        fixed, each = counted(recipe, model.config, view)
        each = scaled(each, empty, half=half, recompute=runtime.recompute)
        module, activations = task.build(empty), fixed + images * each
    return training_memory(
        module, images, half=half, slots=2 if recipe.optimizer.kind == "adam" else 1,
        recompute=runtime.recompute, average=bool(recipe.optimizer.average),
        shards=runtime.world if runtime.is_sharded else 1, activations=activations,
    )  # fmt: skip


def scaled(each: int, model: Any, *, half: bool, recompute: bool) -> int:
    """Bytes of an image in another precision, or with recomputed layers, from those counted in float32.

    The formula knows how both change an encoder. A dense head is not recomputed.
    """
    whole = activation_bytes(getattr(model, "vit", model), half=False)
    encoder = activation_bytes(getattr(model, "vit", model), half=half, recompute=recompute)
    if isinstance(model, DenseModel):
        return encoder + round((each - whole) * (HALF if half else 1))
    return round(each * encoder / whole)


@lru_cache(maxsize=8)
def counted(recipe: Recipe, config: Config, target_view: Any) -> tuple[int, int]:
    """Bytes of a step's activations in float32: those that do not depend on the images, and of each image."""
    few, more = (
        peak_bytes(recipe, trained_skeleton(recipe, config), images, target_view) for images in (FEW, MORE)
    )
    each = (more - few) // (MORE - FEW)
    parameters = trained_skeleton(recipe, config).parameters()
    gradients = sum(4 * p.numel() for p in parameters if p.requires_grad)
    return max(0, few - FEW * each - gradients), each


def peak_bytes(
    recipe: Recipe, model: Model, images: int, target_view: TargetView | None, device: str = "meta"
) -> int:
    """The most bytes of the tensors that exist at once while the gradients of a batch are computed."""
    task = recipe.task
    module, objective = task.build(model).to(device).train(), task.objective(model)
    task.begin(module, recipe.length.steps or 1)
    batch = empty_batch(recipe, model, images, target_view)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    with FusedAttention(), LiveBytes() as live:
        objective(module, batch)["loss"].backward()
    module.zero_grad()
    return live.most


def empty_batch(recipe: Recipe, model: Model, images: int, target_view: TargetView | None) -> Batch:
    """A training batch of black images, as the loader makes it."""
    view = training_view(recipe)
    size = view.size if target_view is None else target_view.size
    batch = {
        "image": torch.zeros(images, 3, *size, dtype=torch.uint8), "label": torch.zeros(images).long(),
        "place": torch.arange(images), "index": torch.arange(images),
    } | {name: stack.zero_() for name, stack in empty_stacks(target_view, images).items()}  # fmt: skip
    for name, views in recipe.task.more_views(view):
        batch[name] = torch.zeros(images, len(views), 3, *views[0].size, dtype=torch.uint8)
    prepare = recipe.task.prepare(model, Order(images, images))
    return prepare(0, batch) if prepare else batch


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.add(value.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def freed(_: Any) -> None:
            self.now -= size
            del self.storages[key]

        self.now += size
        self.most = max(self.most, self.now)
        self.storages[key] = weakref.ref(storage, freed)


class FusedAttention(TorchFunctionMode):
    """Attention that keeps no scores, as on a GPU, in place of the form that tensors without values take."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            return AttentionShapes.apply(*args[:3])
        return function(*args, **(kwargs or {}))


class AttentionShapes(torch.autograd.Function):
    """What attention returns and keeps, without values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1]))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
