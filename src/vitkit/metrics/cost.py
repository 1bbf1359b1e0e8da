"""What a model costs: parameters, FLOPs, exaFLOPs of a training, and the memory that training takes."""

# H, W pixels; h, w of a feature map; P patch, N patches, T tokens, D width, M hidden width, L layers
# B images, N tokens, D width, M hidden width, K heads, L layers

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

Size = tuple[int, int]
TRAINING = 3  # forward passes that a step costs: the backward pass computes two products for each of its own
TPU_V3_CORE = 61.5e12  # operations a second in bf16 at most: half a chip (cloud.google.com/tpu/docs/v3)
TPU_V3_SHARE = 0.39  # of them that are used; see tpu_v3_core_days
PEAKS = {  # operations a second in bf16 of dense products, by the makers' data sheets
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def flops(model: nn.Module, image_size: Size, channels: int = 3) -> int:
    """Operations of one forward pass of one image: two for each multiply-add of a product.

    Counted by running the model on its own device; on the meta device nothing is computed. All tokens of all
    layers count, as in the literature, also where a head reads one of them and the last layer computes no
    other.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    image = torch.empty(1, channels, *image_size, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        whole: Any = model if hasattr(model, "pooled") else None
        output: Tensor = whole.forward_head(whole.pooled(whole.tokens(image))) if whole else model(image)
    assert len(output) == 1
    model.train(training)
    return counter.get_total_flops()


def forward_flops(config: Any, image_size: Size | None = None, *, padding: bool = True) -> int:
    """The same by formula, of a ViTConfig or a ResNetConfig; equal to the counter's number.

    ViT: 2 [N P^2 C D + L (T (4 D^2 + 2 D M) + 2 T^2 D) + head]; a convolution of kernel k:
    2 k^2 (inputs) (outputs) h w; attention in its place: axial_products. Norms, activations and the resizing
    of positions are not counted.

    padding=False leaves out the products of a convolution with the zeros around its input, as XLA counts. So
    counted, Table 6's ResNets come out within 1 %; with them they are 3 to 4 % above it.
    """
    size = image_size or config.image_size
    if hasattr(config, "depth"):
        return 2 * vit_products(config, size, padding)
    products, _, width = resnet_products(config, config.channels, size, padding, same=False)
    return 2 * (products + width * config.classes)


def vit_products(c: Any, size: Size, padding: bool) -> int:
    total, channels, (h, w) = 0, c.channels, size
    if c.stem:
        stride = c.patch * c.stem.stride
        whole = h // stride * stride, w // stride * stride  # a rest of pixels is dropped before the stem
        total, (h, w), channels = resnet_products(c.stem, c.channels, whole, padding, same=True)
    h, w = h // c.patch, w // c.patch
    n, d, mlp = h * w, c.width, 2 * c.width * c.hidden
    total += n * c.patch**2 * channels * d

    def layer(tokens: int, seen: int) -> int:
        """`tokens`, each of which attends to `seen`; relative positions are a product with 2 seen - 1."""
        relative = tokens * (2 * seen - 1) * d if c.positions == "relative" else 0
        return tokens * (4 * d * d + mlp) + 2 * tokens * seen * d + relative

    tokens = n + bool(c.class_token)
    total += c.depth * (layer(n, w) + layer(n, h) if c.attention == "axial" else layer(tokens, tokens))
    if c.head == "map":  # one query: its own projection, keys and values of all patches, out, MLP
        total += 2 * d * d + n * 2 * d * d + 2 * n * d + mlp
    return total + d * c.representation + (c.representation or d) * c.classes


def resnet_products(c: Any, channels: int, size: Size, padding: bool, *, same: bool) -> tuple[int, Size, int]:
    """(products, size, width) of the feature map that comes out; `same`: padded as XLA does, else evenly."""
    total, axial = 0, getattr(c, "attention", "none") == "axial"

    def convolution(size: Size, inputs: int, outputs: int, kernel: int, stride: int = 1) -> Size:
        nonlocal total
        out, taps = zip(*(along(pixels, kernel, stride, same) for pixels in size), strict=True)
        places = taps[0] * taps[1] if not padding else out[0] * out[1] * kernel**2
        total += places * inputs * outputs
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
    """Attention along rows and along columns of a map, before any stride.

    Each place is projected to 2 D, half of it queries and keys. With n places in a line they meet in three
    products of width D / 2, and values and their positions in two of width D.
    """
    h, w = size
    return h * w * (4 * width**2 + 7 * width * (h + w) // 2)


def along(pixels: int, kernel: int, stride: int, same: bool) -> tuple[int, int]:
    """Of a convolution along one side: the places that come out, and the taps that fall on the image."""
    out = -(-pixels // stride)
    before = max(0, (out - 1) * stride + kernel - pixels) // 2 if same else kernel // 2
    starts = range(-before, out * stride - before, stride)
    return out, sum(min(start + kernel, pixels) - max(start, 0) for start in starts)


def halved(size: Size) -> Size:
    return -(-size[0] // 2), -(-size[1] // 2)


@dataclass(frozen=True)
class Ledger:
    """What a training has cost."""

    parameters: int
    images_seen: int
    forward_FLOPs: int  # of one image at the trained resolution
    training_FLOPs: int  # of all images seen, forward and backward
    exaFLOPs: float  # the same in the unit of Table 6
    device_hours: float
    tpu_v3_core_days: float
    energy_kWh: float | None  # of the devices, where they report it
    price: float | None  # where a rate is given, in its currency
    MFU: float | None  # share of the devices' peak that was used, where that is known

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
) -> Ledger:
    """`forward`: operations of one image; `device_seconds`: seconds times devices; `peak`: of one device."""
    total, hours = TRAINING * forward * images_seen, device_seconds / 3600
    return Ledger(
        parameters=parameters, images_seen=images_seen, forward_FLOPs=forward, training_FLOPs=total,
        exaFLOPs=total / 1e18, device_hours=hours, tpu_v3_core_days=tpu_v3_core_days(total),
        energy_kWh=None if joules is None else joules / 3.6e6,
        price=None if price_per_hour is None else hours * price_per_hour,
        MFU=total / (device_seconds * peak) if peak and device_seconds else None,
    )  # fmt: skip


def tpu_v3_core_days(operations: float) -> float:
    """Days that one core of a TPUv3 would take at 24 TFLOP/s: 39 % of the 61.5 that it has at most.

    Table 2 of the paper gives core-days. By this convention ViT-L/16 on ImageNet-21k (90 epochs of 14.2
    million images) comes to 0.23k as printed (-1 %), ViT-L/16 on JFT (14 epochs) to 0.76k, printed 0.68k
    (+11 %), ViT-H/14 on JFT to 2.05k, printed 2.5k (-18 %): the runs used 39, 43 and 32 % of the peak.
    """
    return operations / (TPU_V3_CORE * TPU_V3_SHARE * 86400)


def peak_flops(device: str, precision: str) -> float | None:
    """Operations a second of a device by its name, in bf16 only; None where it is not known."""
    if precision != "bf16" or re.search(r"\b(MIG|NVL)\b", device):
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int  # of the weights: in half precision, and those of convolutions standardised
    activations: int

    @property
    def total(self) -> int:
        """At the worst moment: gradients come as activations go, so the larger of them counts."""
        return self.parameters + self.optimizer + self.copies + max(self.activations, self.gradients)


def training_memory(
    model: nn.Module,
    images: int,
    *,
    half: bool,
    slots: int,
    recompute: bool = False,
    average: bool = False,
    cut: int = 1,
) -> Memory:
    """For so many images at a time. `slots` are the optimizer's numbers for each parameter (SGD 1, Adam 2).

    `cut` processes share weights, gradients and optimizer (FSDP); of the copies each has two blocks at a
    time. Activations are never shared.
    """
    count = sum(p.numel() for p in model.parameters())
    convolution = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    copies = (2 * count if half else 0) + 4 * convolution
    stacks: list[Any] = [part for part in model.modules() if hasattr(part, "units")]
    blocks = max(1, sum(len(stack.units()) for stack in stacks))
    return Memory(
        parameters=4 * count // cut * (2 if average else 1),
        gradients=4 * count // cut,
        optimizer=4 * slots * count // cut,
        copies=copies if cut == 1 else (copies + 4 * count) * 2 // blocks,
        activations=images * activation_bytes(model, half=half, recompute=recompute),
    )


def activation_bytes(model: Any, *, half: bool, recompute: bool = False) -> int:
    """What one image leaves behind in the forward pass, until the backward pass has used it."""
    c = model.config
    small = 2 if half else 4
    ends = (4 + small) * c.channels * c.image_size[0] * c.image_size[1] + 12 * c.classes
    if not hasattr(c, "depth"):
        return ends + convolution_bytes(model, c, half, recompute)
    layer = c.tokens * (8 * c.width + 6 * small * c.width + 2 * small * c.hidden + 16 + 4 * c.heads)
    if c.dropout:
        layer += c.tokens * (2 * c.width + c.hidden)
    if recompute:
        layers = layer + 4 * c.tokens * c.width * c.depth
    else:
        layers = layer * c.depth + 2 * small * c.tokens * c.hidden  # the backward pass at work
        if c.head == "token" and c.depth:  # the last layer has one token beside its keys and values
            layers -= layer - layer // c.tokens - c.tokens * (4 * c.width + 3 * small * c.width + 8)
    if not half and not c.stem:  # images have no second copy
        ends -= small * c.channels * c.image_size[0] * c.image_size[1]
    return ends + layers + (convolution_bytes(model.stem, c, half, recompute) if c.stem else 0)


def convolution_bytes(part: Any, c: Any, half: bool, recompute: bool) -> int:
    """What autograd keeps of one image, counted on tensors without memory.

    In half precision it is a quarter more, not less: norms stay in float32 and convolutions keep a copy.
    That quarter was measured on convolutions; axial attention in their place is counted alike, unmeasured.
    """
    kept: dict[int, tuple[int, Any]] = {}
    inputs: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    def run(images: int) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            part(torch.empty(images, c.channels, *getattr(c, "covered", c.image_size), device="meta"))
        return sum(size for size, _ in kept.values())

    assert not part.recompute
    hooks = [
        unit.register_forward_pre_hook(lambda _, given: inputs.append(given[0].nbytes))
        for unit in part.units()
    ]
    one = run(1)
    for hook in hooks:
        hook.remove()
    every = (run(2) - one) * (5 if half else 4) // 4  # what does not grow with the images is no activation
    if not recompute:
        return every
    return sum(inputs) + every * max(inputs) // max(1, sum(inputs))
