"""The MLP in prediction on a CPU: the numbers of the plain layers, and only where nothing needs these."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from vitkit.models.mlp import Mlp
from vitkit.ops import cpu_mlp, fused

pytestmark = pytest.mark.skipif(
    not (cpu_mlp.X86 and cpu_mlp.has_operation()), reason="needs oneDNN on an x86 CPU"
)


@pytest.fixture
def layer() -> Mlp:
    torch.manual_seed(0)
    return Mlp(24, 96).eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(3, 17, 24, generator=torch.Generator().manual_seed(1))


def fuses(monkeypatch, call) -> bool:
    """Whether a call uses oneDNN's operation."""
    used = []

    def watched(z, layer, before=cpu_mlp.can_fuse):
        used.append(before(z, layer))
        return used[-1]

    with monkeypatch.context() as patch:
        patch.setattr(cpu_mlp, "can_fuse", watched)
        call()
    return any(used)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_predictions_are_those_of_the_separate_layers(layer, tokens, mode, monkeypatch):
    plain = layer(tokens).detach()  # with gradients, which oneDNN's operation has not
    with mode():
        assert fuses(monkeypatch, lambda: layer(tokens))
        torch.testing.assert_close(layer(tokens), plain, rtol=1e-5, atol=1e-6)
        assert layer(tokens[:0]).shape == (0, 17, 24)


def test_large_and_small_values_have_the_gelu_of_float64(layer):
    z = torch.linspace(-60, 60, 24 * 50).view(50, 24)
    with torch.no_grad():
        exact = layer.double()(z.double())
        torch.testing.assert_close(layer.float()(z), exact.float(), rtol=1e-5, atol=1e-5)


def test_training_exports_and_counters_use_the_separate_layers(layer, tokens, monkeypatch):
    assert not fuses(monkeypatch, lambda: layer(tokens))
    with torch.no_grad():
        with fused.exporting():
            assert not fuses(monkeypatch, lambda: layer(tokens))
        with torch.autocast("cpu", torch.bfloat16):
            assert not fuses(monkeypatch, lambda: layer(tokens))
        with FlopCounterMode(display=False) as counter:
            assert not fuses(monkeypatch, lambda: layer(tokens))
        assert counter.get_total_flops() == 2 * 2 * 3 * 17 * 24 * 96
        assert not fuses(monkeypatch, lambda: layer.double()(tokens.double()))
    assert not fuses(monkeypatch, lambda: Mlp(24, 96, gelu="erf").requires_grad_(False)(tokens))


def test_derivatives_vectorisation_and_tracing_use_the_separate_layers(layer, tokens, monkeypatch):
    layer.requires_grad_(False)
    with torch.no_grad():
        expected, slope = torch.autograd.functional.jvp(layer, tokens, torch.ones_like(tokens))
        torch.testing.assert_close(torch.vmap(layer)(tokens), expected)
        torch.testing.assert_close(torch.func.jvp(layer, (tokens,), (torch.ones_like(tokens),))[1], slope)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tokens, torch.ones_like(tokens))
            torch.testing.assert_close(forward_ad.unpack_dual(layer(dual)).tangent, slope)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tracer, which is deprecated
            traced = torch.jit.trace(layer, tokens)
        torch.testing.assert_close(traced(tokens), expected)


def test_a_model_predicts_what_it_computes_with_gradients():
    model = vitkit.build("ViT-Ti/16", classes=7, image_size=32, seed=0).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        predicted = model(images)
    torch.testing.assert_close(predicted, model(images).detach(), rtol=1e-4, atol=1e-4)
