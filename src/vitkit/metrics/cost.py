"""Cost of a model: parameters, FLOPs, exaFLOPs of a training run, and training memory."""

# H, W pixels; h, w of a feature map; P patch, N patches, T tokens, D width, M hidden width, L layers

import itertools
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

Size = tuple[int, int]
TRAINING = 3  # a training step costs three forward passes: the backward pass has two products for each one
TPU_V3_CORE = 61.5e12  # peak bf16 FLOP/s of a core, half a chip (cloud.google.com/tpu/docs/v3)
TPU_V3_SHARE = 0.39  # utilization; see tpu_v3_core_days
ABOVE = (  # parameters above all blocks
    "encoder.norm.", "norm.", "pool", "representation.", "head.", "distillation_head.",
)  # fmt: skip
PEAKS = {  # peak dense bf16 FLOP/s, from the vendors' data sheets
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def flops(model: nn.Module, image_size: Size, channels: int = 3) -> int:
    """FLOPs of a forward pass of one image; a multiply-add counts as two.

    Counted by running the model on its own device, which costs nothing on the meta device. As in the
    literature, all tokens of all layers count, even if the head reads a single token and the last layer skips
    the others.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    image = torch.empty(1, channels, *image_size, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vit: Any = model
        if hasattr(model, "train_outputs"):  # a dense model, whose outputs may take more than products
            vit.train_outputs(image)
        elif hasattr(model, "pooled"):
            vit.forward_head(pooled_tokens(vit, image))
        else:
            model(image)
    model.train(training)
    return counter.get_total_flops()


def pooled_tokens(vit: Any, image: Tensor) -> Tensor:
    """What the head of a ViT reads, from all tokens of its last layer."""
    if vit.config.merge_tokens:
        return vit.pooled(*vit.encode_merged(*vit.patches(image)))
    return vit.pooled(vit.tokens(image))


def forward_flops(config: Any, image_size: Size | None = None, *, padding: bool = True) -> int:
    """FLOPs of a forward pass by formula, from a ViTConfig or ResNetConfig; equal to the result of `flops`.

    ViT: 2 [N P^2 C D + L (T (4 D^2 + 2 D M) + 2 T^2 D) + head], a SwiGLU 3 D M; T has the class token,
    registers and others before the patches; RoPE has no products. A convolution with kernel size k:
    2 k^2 (inputs) (outputs) h w; axial attention: see axial_products. Norms, activations and the
    interpolation of position embeddings are not counted.

    padding=False excludes the products of convolutions with zero padding, as XLA does. This reproduces the
    ResNets of Table 6 within 1 %; with padding they are 3 to 4 % above.
    """
    size = image_size or config.image_size
    if hasattr(config, "vit"):  # with dense outputs: counted, not computed
        with torch.device("meta"):
            return flops(config.build().requires_grad_(False), size, config.channels)
    if hasattr(config, "depth"):
        return 2 * vit_products(config, size, padding)
    products, _, width = resnet_products(config, config.channels, size, padding, same=False)
    return 2 * (products + width * config.classes)


def vit_products(c: Any, size: Size, padding: bool) -> int:
    """Multiply-adds of a ViT with the configuration `c`."""
    total, channels, (h, w) = 0, c.channels, size
    if c.stem:
        stride = c.patch * c.stem.stride
        cropped = h // stride * stride, w // stride * stride  # the stem drops the remaining pixels
        total, (h, w), channels = resnet_products(c.stem, c.channels, cropped, padding, same=True)
    h, w = h // c.patch, w // c.patch
    n, d, mlp = h * w, c.width, (3 if c.mlp == "swiglu" else 2) * c.width * c.hidden
    total += n * c.patch**2 * channels * d

    def layer(tokens: int, keys: int) -> int:
        """A layer in which each token attends to `keys`; relative positions add a product with 2 keys - 1."""
        relative = tokens * (2 * keys - 1) * d if c.positions == "relative" else 0
        return tokens * (4 * d * d + mlp) + 2 * tokens * keys * d + relative

    tokens = n + c.prefix
    if c.attention == "axial":
        total += c.depth * (layer(n, w) + layer(n, h))
    for _ in range(c.depth if c.attention != "axial" else 0):
        total += layer(tokens, tokens)
        if merged := min(c.merge_tokens, (tokens - c.prefix) // 2):  # scores of the pairs; no MLP of these
            total += (tokens + 1) // 2 * (tokens // 2) * (d // c.heads) - merged * mlp
            tokens -= merged
    if c.head == "map":  # query and output projection of one token, keys and values of all patches, MLP
        total += 2 * d * d + n * 2 * d * d + 2 * n * d + mlp
    heads = 2 if c.distilled else 1
    pooled = d if c.distilled else c.pooled_width
    return total + pooled * c.representation + heads * (c.representation or pooled) * c.classes


def resnet_products(c: Any, channels: int, size: Size, padding: bool, *, same: bool) -> tuple[int, Size, int]:
    """(multiply-adds, output size, output width); `same`: SAME padding as in XLA, else symmetric padding."""
    total, axial = 0, getattr(c, "attention", "none") == "axial"

    def convolution(size: Size, inputs: int, outputs: int, kernel: int, stride: int = 1) -> Size:
        nonlocal total
        out, taps = zip(*(convolution_side(pixels, kernel, stride, same) for pixels in size), strict=True)
        positions = taps[0] * taps[1] if not padding else out[0] * out[1] * kernel**2
        total += positions * inputs * outputs
        return out[0], out[1]

    size = halved(convolution(size, channels, c.width, 7, 2))
    inputs = c.width
    for stage, units in enumerate(c.blocks):
        middle = c.width * 2**stage
        for unit in range(units):
            stride = 2 if stage and not unit else 1
            convolution(size, inputs, middle, 1)
            if axial:
                total += axial_products(size, middle)
                after = halved(size) if stride == 2 else size
            else:
                after = convolution(size, middle, middle, 3, stride)
            convolution(after, middle, 4 * middle, 1)
            if not unit:
                convolution(size, inputs, 4 * middle, 1, stride)
            size, inputs = after, 4 * middle
    return total, size, inputs


def axial_products(size: Size, width: int) -> int:
    """Multiply-adds of attention along the rows and columns of a feature map, before any stride.

    Each position is projected to 2 D, half of it queries and keys. Each line of n positions needs three
    products of width D / 2 for the scores, and two of width D for the values and their position embeddings.
    """
    h, w = size
    return h * w * (4 * width**2 + 7 * width * (h + w) // 2)


def convolution_side(pixels: int, kernel: int, stride: int, same: bool) -> tuple[int, int]:
    """Output size of a convolution along one dimension, and the kernel taps that are not on padding."""
    out = -(-pixels // stride)
    before = max(0, (out - 1) * stride + kernel - pixels) // 2 if same else kernel // 2
    starts = range(-before, out * stride - before, stride)
    return out, sum(min(start + kernel, pixels) - max(start, 0) for start in starts)


def halved(size: Size) -> Size:
    return -(-size[0] // 2), -(-size[1] // 2)


@dataclass(frozen=True)
class Ledger:
    """The cost of a training run."""

    parameters: int
    images_seen: int
    forward_FLOPs: int  # for one image at the training resolution
    training_FLOPs: int  # for all images seen, forward and backward
    exaFLOPs: float  # training FLOPs in the unit of Table 6
    device_hours: float
    tpu_v3_core_days: float
    energy_kWh: float | None  # of the devices, if they report it
    price: float | None  # in the currency of the price per hour, if one is given
    MFU: float | None  # model FLOPs utilization, if the peak of the device is known

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ledger(
    *,
    parameters: int,
    images_seen: int,
    forward: int,
    device_seconds: float,
    joules: float | None = None,
    price_per_hour: float | None = None,
    peak: float | None = None,
    passes: float = TRAINING,
) -> Ledger:
    """`forward`: FLOPs per image; `device_seconds`: seconds times devices; `peak`: FLOP/s of one device.

    passes: what a training step costs, in forward passes.
    """
    total, hours = round(passes * forward * images_seen), device_seconds / 3600
    return Ledger(
        parameters=parameters, images_seen=images_seen, forward_FLOPs=forward, training_FLOPs=total,
        exaFLOPs=total / 1e18, device_hours=hours, tpu_v3_core_days=tpu_v3_core_days(total),
        energy_kWh=None if joules is None else joules / 3.6e6,
        price=None if price_per_hour is None else hours * price_per_hour,
        MFU=total / (device_seconds * peak) if peak and device_seconds else None,
    )  # fmt: skip


def tpu_v3_core_days(operations: float) -> float:
    """Days that one TPUv3 core would take at 24 TFLOP/s, which is 39 % of its peak of 61.5.

    Table 2 of the paper reports core-days. This convention gives 0.23k for ViT-L/16 on ImageNet-21k (90
    epochs of 14.2 million images; -1 % from the paper), 0.76k for ViT-L/16 on JFT (14 epochs; paper 0.68k,
    +11 %) and 2.05k for ViT-H/14 on JFT (paper 2.5k, -18 %): the runs used 39, 43 and 32 % of the peak.
    """
    return operations / (TPU_V3_CORE * TPU_V3_SHARE * 86400)


def peak_flops(device: str, precision: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its name; None if unknown or for another precision."""
    if precision != "bf16" or re.search(r"\b(MIG|NVL)\b", device):
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)


@dataclass(frozen=True)
class Memory:
    """Training memory of one device in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int  # weights in half precision, and standardised convolution weights
    activations: int

    @property
    def total(self) -> int:
        """Peak memory; gradients are allocated while activations are freed, so only the larger counts."""
        return self.parameters + self.optimizer + self.copies + max(self.activations, self.gradients)


def training_memory(
    model: nn.Module,
    images: int,
    *,
    half: bool,
    slots: int,
    recompute: bool = False,
    average: bool = False,
    shards: int = 1,
    activations: int | None = None,
) -> Memory:
    """For a micro-batch of `images`. `slots`: optimizer values per parameter (SGD 1, Adam 2).

    Only trainable parameters have gradients, optimizer values and an average. FSDP splits weights, gradients
    and optimizer state into `shards`; of the copies, each process holds two blocks at a time. Activations are
    not sharded; None: those of a classifier, by formula.
    """
    count = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    convolution = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    copies = (2 * count if half else 0) + 4 * convolution
    blocks = max(1, len(blocks_of(model)))
    return Memory(
        parameters=4 * count // shards + (4 * trainable // shards if average else 0),
        gradients=4 * trainable // shards,
        optimizer=4 * slots * trainable // shards,
        copies=copies if shards == 1 else (copies + 4 * count) * 2 // blocks,
        activations=images * activation_bytes(model, half=half, recompute=recompute)
        if activations is None
        else activations,
    )


def activation_bytes(model: Any, *, half: bool, recompute: bool = False) -> int:
    """Bytes of activations that the forward pass of one image saves for the backward pass.

    Nothing is saved below the lowest trainable layer, where only the current layer takes memory.
    """
    c = model.config
    if hasattr(c, "vit"):
        vit = activation_bytes(model.vit, half=half, recompute=recompute)
        return vit + head_bytes(c, half)
    small = 2 if half else 4
    ends = (4 + small) * c.channels * c.image_size[0] * c.image_size[1] + 12 * c.classes
    if not hasattr(c, "depth"):
        return ends + convolution_bytes(model, c, half, recompute)
    hidden = (4 if c.mlp == "swiglu" else 2) * c.hidden  # before and after the activation; gate and product
    rotated = 2 * c.width if c.rope != "none" else 0  # queries and keys, beside those before the rotation
    layer = c.tokens * (8 * c.width + small * (6 * c.width + hidden + rotated) + 16 + 4 * c.heads)
    if c.dropout:
        layer += c.tokens * (2 * c.width + c.hidden)
    depth = min(c.depth, trained_depth(model))
    if depth == 0:
        layers = layer
    elif recompute:
        layers = layer + 4 * c.tokens * c.width * depth
    else:
        layers = layer * depth + small * c.tokens * hidden  # plus temporaries of the backward pass
        if c.head == "token" and c.depth:  # the last layer computes one token, and keys and values of all
            layers -= layer - layer // c.tokens - c.tokens * (4 * c.width + 3 * small * c.width + 8)
    if not half and not c.stem:  # float32 images are not copied
        ends -= small * c.channels * c.image_size[0] * c.image_size[1]
    return ends + layers + (convolution_bytes(model.stem, c, half, recompute) if c.stem else 0)


def head_bytes(c: Any, half: bool) -> int:
    """Bytes that the head of a dense model saves for one image, counted on meta tensors.

    In half precision three quarters of them: norms and losses stay in float32.
    """

    def saved_bytes(images: int) -> int:
        saved: dict[int, tuple[int, Any]] = {}

        def record(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = (storage.nbytes(), storage)
            return tensor

        with torch.device("meta"):
            model, image = c.build(), torch.empty(images, c.channels, *c.image_size)
            model.vit.requires_grad_(False)  # so that nothing but the head saves anything
        with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
            model.train_outputs(image)
        return sum(size for size, _ in saved.values())

    total = saved_bytes(2) - saved_bytes(1)  # the difference excludes weights
    return total * 3 // 4 if half else total


def trained_depth(model: nn.Module) -> int:
    """The number of blocks that the backward pass goes through: from the lowest trainable parameter up."""
    blocks = blocks_of(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    for name, parameter in model.named_parameters():  # of embeddings
        above = name.startswith(ABOVE) or (hasattr(model, "vit") and not name.startswith("vit."))
        if parameter.requires_grad and id(parameter) not in inside and not above:
            return len(blocks)
    frozen = itertools.takewhile(lambda block: not any(p.requires_grad for p in block.parameters()), blocks)
    return len(blocks) - len(list(frozen))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a ViT, the units of a ResNet; both of a hybrid."""
    stacks: list[Any] = [part for part in model.modules() if hasattr(part, "units")]
    return [block for stack in stacks for block in stack.units()]


def training_passes(model: nn.Module) -> float:
    """What a training step costs, in forward passes: 3, and less where parameters are frozen.

    The backward pass has a product for the gradient of the inputs, in all blocks from the lowest trainable
    parameter up, and one for that of the weights, in blocks that are trained as a whole. LoRA's own products
    are not counted.
    """
    if all(p.requires_grad for p in model.parameters()):
        return TRAINING
    blocks = blocks_of(model)
    whole = sum(all(p.requires_grad for p in block.parameters()) for block in blocks)
    return 1 + (trained_depth(model) + whole) / max(1, len(blocks))


def convolution_bytes(part: Any, c: Any, half: bool, recompute: bool) -> int:
    """Bytes that autograd saves per image, counted on meta tensors.

    Half precision needs a quarter more, not less: norms stay in float32 and convolutions save a copy. The
    quarter was measured on convolutions and is assumed for axial attention too.
    """
    saved: dict[int, tuple[int, Any]] = {}
    inputs: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    def saved_bytes(images: int) -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
            part(torch.empty(images, c.channels, *getattr(c, "covered", c.image_size), device="meta"))
        return sum(size for size, _ in saved.values())

    assert not part.recompute
    hooks = [
        unit.register_forward_pre_hook(lambda _, args: inputs.append(args[0].nbytes)) for unit in part.units()
    ]
    first = saved_bytes(1)
    for hook in hooks:
        hook.remove()
    activations = (saved_bytes(2) - first) * (5 if half else 4) // 4  # the difference excludes weights
    if not recompute:
        return activations
    return sum(inputs) + activations * max(inputs) // max(1, sum(inputs))
