"""What a model costs: parameters, and floating-point operations for one image."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def flops(model: nn.Module, image_size: tuple[int, int], channels: int = 3) -> int:
    """Operations of one forward pass of one image: two for each multiply-add of a product.

    Counted by running the model on its own device; on the meta device nothing is computed.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    image = torch.empty(1, channels, *image_size, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output: Tensor = model(image)
    assert len(output) == 1
    model.train(training)
    return counter.get_total_flops()
