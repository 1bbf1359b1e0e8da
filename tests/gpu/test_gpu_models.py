"""The choices of later ViTs on a GPU: the same answers as on a CPU, and the same training steps."""

import pytest
import torch

from vitkit.inference.agreement import sample_images
from vitkit.inference.engines import choose_engine
from vitkit.models.variants import configure, fresh
from vitkit.runtime.runtime import Runtime, seed_step
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.loop import train
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import TrainState

pytestmark = pytest.mark.gpu
CHOICES = {
    "DINOv2": {"registers": 4, "layer_scale": True, "mlp": "swiglu", "head": "token+gap"},
    "DINOv3": {"registers": 4, "layer_scale": True, "rope": "dinov3", "positions": "none", "key_bias": False},
    "CLIP": {"input_norm": True, "gelu": "quick", "project_bias": False, "normalize": True},
    "SigLIP": {"head": "map", "final_norm": "tokens"},
    "EVA-02": {"rope": "eva02", "mlp": "swiglu", "mlp_norm": True, "head": "gap", "final_norm": "pooled"},
    "DeiT": {"distilled": True, "qk_norm": True},
    "merged tokens": {"merge_tokens": 2},
}
STEPS = 12


def model(name: str) -> torch.nn.Module:
    shape = {"width": 64, "depth": 2, "heads": 2, "hidden": 128, "patch": 8, "image_size": (32, 32)}
    net = fresh(configure("ViT-Ti/16", classes=5, **(shape | CHOICES[name])), seed=0)
    torch.manual_seed(1)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return net.eval()


def losses(name: str, *, precision: str, device: str = "cuda", **options) -> list[float]:
    """The losses of a short training run with AdamW."""
    config, result = OptimizerConfig(kind="adam", weight_decay=0.1), list[float]()
    runtime = Runtime(device, precision, **options)
    state = TrainState.start(runtime.place(model(name).train()), config)
    images = torch.randint(
        0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    batch = [{"image": images.to(device), "label": (torch.arange(8) % 5).to(device)}]
    train(
        state, iter([batch] * STEPS), ClassificationLoss(classes=5), until=STEPS, rate=lambda step: 1e-3,
        config=config, runtime=runtime, before=lambda step: seed_step(3, step), log=lambda text: None,
        watch=lambda state, metrics: result.append(metrics["loss"]), due=lambda step: True,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("name", CHOICES)
def test_the_answers_of_a_gpu_are_those_of_a_cpu(name):
    net, images = model(name), torch.randn(6, 3, 32, 32)
    with torch.inference_mode():
        expected = net(images)
        torch.testing.assert_close(net.cuda()(images.cuda()).cpu(), expected, rtol=1e-4, atol=1e-4)
        scale = expected.abs().max()
        with torch.autocast("cuda", torch.bfloat16):
            assert (net(images.cuda()).float().cpu() - expected).abs().max() < 0.05 * scale


@pytest.mark.parametrize("engine", ["graph", "graph-compiled"])
@pytest.mark.parametrize("name", CHOICES)
def test_engines_of_a_gpu_run_them(name, engine, tmp_path):
    net = model(name).cuda()
    images = sample_images(net, 6)
    expected = choose_engine(net, "torch", batch=4, folder=tmp_path)(images)
    result = choose_engine(net, engine, batch=4, folder=tmp_path)(images)
    torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", sorted(set(CHOICES) - {"merged tokens"}))
def test_training_on_a_gpu_is_that_of_a_cpu_and_graphs_change_nothing(name):
    expected = losses(name, precision="fp32", device="cpu")
    assert losses(name, precision="fp32", cuda_graph=False) == pytest.approx(expected, rel=1e-3)
    computed = losses(name, precision="bf16", cuda_graph=False)
    assert computed == pytest.approx(expected, rel=0.1)
    assert losses(name, precision="bf16", cuda_graph=True) == computed
    assert losses(name, precision="bf16", cuda_graph=True, compile=True) == pytest.approx(expected, rel=0.1)
