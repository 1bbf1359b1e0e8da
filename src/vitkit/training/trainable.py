"""What a run trains: all parameters, the head, the last blocks, or LoRA adapters; the others are frozen."""

from torch import nn

from vitkit.errors import Error
from vitkit.models.adapt import HEADS
from vitkit.models.dense.dense_model import DenseModel
from vitkit.models.lora import LoRA, add_lora
from vitkit.options import parse_train
from vitkit.training.optimizer import TOP, layer_of


def freeze(model: nn.Module, train: str, lora: LoRA = LoRA(), seed: int = 0) -> None:
    """Make exactly the parameters that `train` names trainable, in place; lora adds its adapters.

    The optimizer takes the trainable ones, so the others have neither gradients nor moments.
    """
    kind, blocks = parse_train(train)
    dense = isinstance(model, DenseModel)
    first = TOP if kind == "lora" else first_layer(model, blocks)
    model.requires_grad_(False)
    if kind == "lora":
        add_lora(model, lora, seed)
    for name, parameter in model.named_parameters():
        in_head = not name.startswith("vit.") if dense else name.startswith(HEADS)
        is_new = in_head or ".lora_" in name
        in_layers = layer_of(name) >= first and kind == "last"
        parameter.requires_grad_(kind == "all" or is_new or in_layers)


def first_layer(model: nn.Module, blocks: int) -> int:
    """The lowest of the last blocks, counted as in `layer_of`; the stages of a ResNet count as its blocks."""
    depth = max((n for name, _ in model.named_parameters() if (n := layer_of(name)) < TOP), default=0)
    if blocks > depth:
        raise Error(
            f"train=last-{blocks}: the model has {depth} blocks; use last-1 to last-{depth}, or all",
            code="recipe.value",
        )
    return depth - blocks + 1


def trainable_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def trainable_text(train: str, lora: LoRA, trainable: int, total: int) -> str:
    """'0.15 of 5.7 million parameters (LoRA, rank 8)'."""
    kind, blocks = parse_train(train)
    names = {
        "all": "all", "head": "head", "lora": f"LoRA, rank {lora.rank}",
        "last": f"last {'block' if blocks == 1 else f'{blocks} blocks'} and head",
    }  # fmt: skip
    count = f"{trainable / 1e6:,.1f}" if trainable >= 1e6 else f"{trainable / 1e6:.2g}"
    return f"{count} of {total / 1e6:,.1f} million parameters ({names[kind]})"
