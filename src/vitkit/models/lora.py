"""LoRA (Hu et al., 2021): frozen weights of a ViT's linear layers plus trained updates alpha / rank * B A."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitkit.errors import Error
from vitkit.models.adapt import HEADS
from vitkit.models.dense.dense_model import DenseModel
from vitkit.ops.precision import add_product
from vitkit.options import Range, check_within

TARGETS = ("qv", "qkv", "qkv+mlp", "all-linear")
RANGES = {"rank": Range(1, 4096), "alpha": Range(0, 1e6, above=True)}
PARAMETRIZATION = ".parametrizations.weight"  # in the names of a layer's parameters


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Which linear layers of the blocks get an adapter, and its size."""

    rank: int = 8  # of the update of each weight matrix
    alpha: float = 16.0  # updates are scaled by alpha / rank
    targets: str = "qv"  # query and value; or qkv, qkv+mlp, all-linear (the output projection too)

    def __post_init__(self) -> None:
        check_within(self, RANGES, "lora.")
        if self.targets not in TARGETS:
            known = f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}"
            raise Error(f"lora.targets must be {known}, not {self.targets!r}", code="recipe.value")


class LowRank(nn.Module):
    """A parametrization of a weight: W + alpha / rank * B A, with one pair of A and B for each adapted part.

    A fused qkv weight has three parts, so its adapters equal those of three separate layers.
    """

    def __init__(self, weight: Tensor, config: LoRA, parts: dict[str, int], of: int):
        """`parts`: names of the adapted parts, and which of the `of` equal parts of the rows each is."""
        super().__init__()
        outputs, inputs = weight.shape[0] // of, weight.shape[1]
        self.parts, self.of, self.scale = parts, of, config.alpha / config.rank
        self.lora_A = nn.ParameterDict({name: weight.new_empty(config.rank, inputs) for name in parts})
        self.lora_B = nn.ParameterDict({name: weight.new_zeros(outputs, config.rank) for name in parts})

    def forward(self, weight: Tensor) -> Tensor:
        rows = list(weight.chunk(self.of))
        for name, part in self.parts.items():  # in float32, as they are merged at the end
            rows[part] = add_product(rows[part], self.lora_B[name], self.lora_A[name], self.scale)
        return torch.cat(rows)


def add_lora(model: nn.Module, config: LoRA, seed: int = 0) -> None:
    """Give the layers that the configuration names their adapters, in place; their outputs do not change yet.

    As in peft, A is Kaiming-uniform, U(-1, 1) / sqrt(inputs), and B zero. A layer of a block is adapted as a
    parametrization of its weight, so all code that reads `layer.weight` computes with the adapted one.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    adapted = {name: parts for name, _ in layers if (parts := adapted_parts(name, config.targets))}
    if not adapted:
        raise Error(
            "LoRA adapts the linear layers of Transformer blocks, which this model does not have; use "
            "train=all, train=last-N or train=head",
            code="model.unsupported",
        )
    for name, layer in layers:
        if name in adapted:
            of = 3 if name.endswith(".qkv") else 1
            update = LowRank(layer.weight, config, adapted[name], of)
            for factor in update.lora_A.values():
                nn.init.kaiming_uniform_(factor, a=math.sqrt(5), generator=generator)
            parametrize.register_parametrization(layer, "weight", update, unsafe=True)  # same shape and dtype


def adapted_parts(name: str, targets: str) -> dict[str, int]:
    """The adapted parts of a linear layer: name -> which part of the rows; none of layers outside blocks."""
    if not name.removeprefix("vit.").startswith("encoder.blocks."):  # vit: of a dense model
        return {}
    last = name.rpartition(".")[2]
    if last == "qkv":
        return {part: "qkv".index(part) for part in ("qv" if targets == "qv" else "qkv")}
    whole = targets == "all-linear" or (targets == "qkv+mlp" and ".mlp." in name)
    return {last: 0} if whole else {}


def updates(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """The adapters of a model, each with the name of its layer."""
    for name, part in model.named_modules():
        if isinstance(part, LowRank):
            yield name.rpartition(PARAMETRIZATION)[0], part


def has_lora(model: nn.Module) -> bool:
    return any(True for _ in updates(model))


def merge_lora(model: nn.Module) -> None:
    """Merge the adapters into the weights, in place: an ordinary model with the same outputs remains."""
    for layer, _ in list(updates(model)):
        parametrize.remove_parametrizations(model.get_submodule(layer), "weight")


def merged_state(model: nn.Module, full: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The state dict with the adapters, if any, merged into the weights: that of an ordinary model.

    full: makes a tensor of the module whole and copies it to where it is needed.
    """
    state = {name: full(tensor.detach()) for name, tensor in model.state_dict().items()}
    for layer, update in updates(model):
        prefix = f"{layer}{PARAMETRIZATION}"
        factors = {name: state.pop(f"{prefix}.0.{name}") for name, _ in update.named_parameters()}
        weight = state.pop(f"{prefix}.original")
        with torch.no_grad():
            state[f"{layer}.weight"] = torch.func.functional_call(update, factors, (weight,))
    return state


def adapter_state(model: nn.Module, full: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What LoRA has trained: the factors, by the names that peft gives them, and the head.

    encoder.blocks.0.attention.qkv.q.lora_A.weight is A of the queries in the first block.
    """
    dense = isinstance(model, DenseModel)
    state = {
        name: full(tensor.detach())
        for name, tensor in model.state_dict().items()
        if (not name.startswith("vit.") if dense else name.startswith(HEADS))
    }
    for layer, update in updates(model):
        for factor in ("lora_A", "lora_B"):
            for part, tensor in getattr(update, factor).items():
                state[f"{layer}.{part}.{factor}.weight"] = full(tensor.detach())
    return state
