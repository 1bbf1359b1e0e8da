"""A head that reads the class token alone spares the last layer's other tokens, and nothing else changes."""

import pytest
import torch

OPTIONS = [
    {}, {"positions": "relative"}, {"layer_scale": True}, {"qkv_bias": False}, {"depth": 1},
    {"representation": 12}, {"positions": "1d", "injection": "every"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_logits_and_gradients_are_those_of_computing_every_token(small, options, recompute):
    model = small(**options).double().train()
    model.encoder.recompute = recompute
    images = torch.randn(3, 3, *model.config.image_size, dtype=torch.float64)
    quick = model(images)
    weights = torch.randn_like(quick)
    spared = torch.autograd.grad((quick * weights).sum(), [*model.parameters()])
    whole = model.forward_head(model.pooled(model.tokens(images)))
    full = torch.autograd.grad((whole * weights).sum(), [*model.parameters()])
    torch.testing.assert_close(quick, whole, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(spared, full, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_heads_that_read_patches_see_all_of_them(small):
    model = small(head="gap")
    images = torch.randn(2, 3, *model.config.image_size)
    read = model.pooled(model.tokens(images))
    assert torch.equal(model.features(images), read)


def test_tokens_are_all_of_them_for_any_head(small):
    model = small()
    images = torch.randn(2, 3, *model.config.image_size)
    assert model.tokens(images).shape[1] == model.config.tokens


def test_the_last_layer_is_cheaper_than_the_others(small):
    """The counter of operations tells that something was spared at all."""
    from torch.utils.flop_counter import FlopCounterMode

    from vitkit.metrics.cost import forward_flops

    model = small().eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, *model.config.image_size))
    assert counter.get_total_flops() < 0.7 * forward_flops(model.config)  # of its two layers


def test_in_half_precision_what_layers_add_up_is_half_too(small):
    model = small(layer_scale=True).eval()
    seen = []
    for block in model.encoder.blocks:
        block.register_forward_hook(lambda block, given, out: seen.append(out.dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(1, 3, *model.config.image_size))
    assert seen == [torch.bfloat16] * 2
