"""Initialisation of fresh models, as published."""

import hashlib
import math

import torch
from torch import Tensor, nn

from vitkit.models.attention import Attention, AttentionPool
from vitkit.models.axial_resnet import AxialAttention
from vitkit.models.encoder import Block
from vitkit.models.mlp import Mlp, SwiGlu
from vitkit.models.positions import Positions
from vitkit.models.rope import Rope
from vitkit.models.text_tower import TextTower

Generator = torch.Generator | None
TRUNCATED_STD = 0.87962566103423978  # of a unit normal truncated at two sigma


def initialize_vit(model: nn.Module, generator: Generator = None) -> None:
    """Initialise every parameter of a ViT as the official code does; head and class token are zero."""
    if is_meta(model):
        return
    for module in model.modules():
        if isinstance(module, Attention):
            for kernel in module.qkv.weight.chunk(3):  # Xavier on each (D, D), not on (3D, D)
                xavier(kernel, generator)
            dense_zero_bias(module.out, generator)
            if module.qkv.bias is not None:
                nn.init.zeros_(module.qkv.bias)
            if module.relative is not None:
                nn.init.normal_(module.relative, std=0.02, generator=generator)
        elif isinstance(module, AttentionPool):
            xavier(module.probe, generator)
            for kernel in (module.query.weight, *module.key_value.weight.chunk(2)):
                xavier(kernel, generator)
            dense_zero_bias(module.out, generator)
            nn.init.zeros_(module.query.bias)
            nn.init.zeros_(module.key_value.bias)
        elif isinstance(module, Mlp):
            for dense in (module.up, module.down):
                xavier(dense.weight, generator)
                nn.init.normal_(dense.bias, std=1e-6, generator=generator)
        elif isinstance(module, SwiGlu):
            for kernel in (*module.up.weight.chunk(2), module.down.weight):
                xavier(kernel, generator)
            nn.init.zeros_(module.up.bias)
            nn.init.zeros_(module.down.bias)
        elif isinstance(module, Rope):
            module.reset_parameters()
        elif isinstance(module, TextTower):
            initialize_text(module, generator)
        elif isinstance(module, Positions):
            for table in module.parameters():
                nn.init.normal_(table, std=0.02, generator=generator)
        elif isinstance(module, Block) and module.scale1 is not None:
            nn.init.constant_(module.scale1, 1e-5)
            nn.init.constant_(module.scale2, 1e-5)  # type: ignore[arg-type]
    initialize_ends(model, generator)
    initialize_norms(model)


def initialize_resnet(model: nn.Module, generator: Generator = None) -> None:
    """LeCun normal convolutions, relative positions with variance 1 / head width, a zero head."""
    if is_meta(model):
        return
    initialize_ends(model, generator)
    for module in model.modules():
        if isinstance(module, AxialAttention):
            nn.init.normal_(module.relative, std=module.parts[-1] ** -0.5, generator=generator)
    initialize_norms(model)


def is_meta(model: nn.Module) -> bool:
    """Whether a model is on the meta device, where initialising imports torch's compiler, for seconds."""
    return next(model.parameters()).is_meta


def initialize_ends(model: nn.Module, generator: Generator) -> None:
    """Initialise what is outside the encoder: convolutions, tokens, representation layer and head."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            lecun(module.weight, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name in ("class_token", "mask_token"):
        token = getattr(model, name, None)
        if token is not None:
            nn.init.zeros_(token)
    for name in ("distillation_token", "registers"):  # equal registers would stay equal
        tokens = getattr(model, name, None)
        if tokens is not None:
            nn.init.normal_(tokens, std=0.02, generator=generator)
    representation = getattr(model, "representation", None)
    if representation is not None:
        lecun(representation.weight, generator)
        if representation.bias is not None:
            nn.init.zeros_(representation.bias)
    for head in (model.head, getattr(model, "distillation_head", None)):
        if isinstance(head, nn.Linear):  # Sec. 3.2
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)


def initialize_text(text: TextTower, generator: Generator) -> None:
    """What is outside the blocks of a text tower, as in CLIP and SigLIP."""
    nn.init.normal_(text.tokens.weight, std=0.02, generator=generator)
    nn.init.normal_(text.positions, std=0.01, generator=generator)
    nn.init.normal_(text.project.weight, std=text.config.width**-0.5, generator=generator)
    if text.project.bias is not None:
        nn.init.zeros_(text.project.bias)
    nn.init.constant_(text.logit_scale, math.log(10.0 if text.config.sigmoid else 1 / 0.07))
    if text.logit_bias is not None:
        nn.init.constant_(text.logit_bias, -10.0)


def initialize_norms(model: nn.Module) -> None:
    """Scale 1 and bias 0; the last norm of a residual unit in a stem starts with scale 0."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            nn.init.constant_(module.weight, 0.0 if name.endswith(".closing_norm") else 1.0)
            nn.init.zeros_(module.bias)


def dense_zero_bias(dense: nn.Linear, generator: Generator) -> None:
    xavier(dense.weight, generator)
    nn.init.zeros_(dense.bias)


def generator_of(weight: Tensor) -> torch.Generator:
    """Random numbers for layers around a model with this weight: alike in every process, as the model is."""
    if weight.is_meta:
        return torch.Generator()
    content = weight.detach().float().cpu().contiguous().numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(seed)


def xavier(kernel: Tensor, generator: Generator) -> None:
    with torch.no_grad():
        nn.init.xavier_uniform_(kernel, generator=generator)


def lecun(kernel: Tensor, generator: Generator) -> None:
    """LeCun normal: truncated at two sigma, with variance 1 / fan_in after truncation."""
    fan_in = kernel[0].numel()
    std = math.sqrt(1 / fan_in) / TRUNCATED_STD
    nn.init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std, generator=generator)
