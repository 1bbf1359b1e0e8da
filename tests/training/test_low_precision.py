"""Weights that are rounded all together: nothing but time may depend on it."""

import pytest
import torch
from torch import nn

from vitkit.models.variants import configure, fresh
from vitkit.ops.low_precision import LowPrecisionCopy
from vitkit.runtime.runtime import Runtime, seed_step
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import Stepper, TrainState
from vitkit.training.trainable import freeze

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")
ADAM = OptimizerConfig(kind="adam")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model(train: str = "all", **options) -> nn.Module:
    shape = {"width": 32, "depth": 2, "heads": 2, "hidden": 64, "patch": 8, "image_size": (16, 16)}
    net = fresh(configure("ViT-Ti/16", classes=5, **(shape | options)), seed=0)
    freeze(net, train)
    return net


def batch(device: str, size: int = 4) -> dict[str, torch.Tensor]:
    images = torch.arange(size * 3 * 256).reshape(size, 3, 16, 16) * 7 % 256
    return {"image": images.to(torch.uint8).to(device), "label": torch.arange(size).to(device) % 5}


def trained(together: bool, device: str, pieces: int = 1, config=ADAM, steps: int = 3, **options):
    runtime = Runtime(device, "bf16")
    state = TrainState.start(runtime.place(model(**options)), config)
    call = runtime.wrap(state.model)
    assert isinstance(call, LowPrecisionCopy)
    step = Stepper(state, ClassificationLoss(classes=5), config, call if together else state.model, runtime)
    output = []
    for number in range(steps):
        seed_step(0, number)
        output.append(step([batch(device)] * pieces, 1e-2))
    return output, state.model.state_dict()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [
    {}, {"pieces": 2}, {"config": OptimizerConfig(kind="sgd")}, {"dropout": 0.1}, {"head": "map"},
    {"train": "head"}, {"train": "lora"}, {"positions": "relative"},
], ids=str)  # fmt: skip
def test_a_model_learns_the_same_bit_for_bit(given, device):
    (output, ours), (want, theirs) = trained(True, device, **given), trained(False, device, **given)
    assert output == want
    assert output[0] != output[-1]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_gradient_of_every_weight_arrives():
    net = model()
    call = LowPrecisionCopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        nn.functional.cross_entropy(call(torch.rand(2, 3, 16, 16)).float(), torch.tensor([1, 2])).backward()
    call.accumulate_grads()
    assert all(p.grad is not None for p in net.parameters())
    assert all(half.grad is None for half in call.copies)


def test_only_those_that_would_be_rounded_are(tmp_path):
    names = LowPrecisionCopy(model()).names
    assert "encoder.blocks.0.attention.qkv.weight" in names
    assert "project.bias" in names
    assert not any("norm" in name or "token" in name for name in names)
    full = Runtime("cpu", "fp32")
    assert full.wrap(net := model()) is net


@pytest.mark.slow
def test_compiled_it_is_one_graph_and_learns():
    torch.compiler.reset()
    net = model()
    call = LowPrecisionCopy(net)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    images, labels = torch.rand(4, 3, 16, 16), torch.arange(4)
    for way in (call, compiled):
        call.refresh()
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(way(images).float(), labels)
        loss.backward()
        call.accumulate_grads()
        result = [p.grad.clone() for p in net.parameters()]
        if way is call:
            want = result
    for one, other in zip(result, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=1e-3)
