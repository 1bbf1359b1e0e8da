"""What a model costs: parameters, operations by a formula and by a counter, and the ledger of a training."""

# H, W pixels; h, w of a feature map; P patch, N patches, T tokens, D width, M hidden width, L layers

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
        output: Tensor = whole.judged(whole.pooled(whole.tokens(image))) if whole else model(image)
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
