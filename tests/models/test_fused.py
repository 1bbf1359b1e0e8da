"""Layers in fewer kernels: the numbers of the plain ones, as near as half precision is."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.inference.builders import compiler
from vitkit.inference.graphs import Form, Graph, trace
from vitkit.models.attention import Attention
from vitkit.models.mlp import Mlp
from vitkit.models.norm import LayerNorm
from vitkit.models.variants import configure, fresh
from vitkit.ops.cublaslt import product
from vitkit.ops.fused import can_fuse, mlp

gpu = pytest.mark.gpu
HALF = 2.0**-8  # what bf16 rounds to, as a share


def part(width: int = 64, hidden: int = 256, seed: int = 0, **options) -> Mlp:
    torch.manual_seed(seed)
    return Mlp(width, hidden, **options)


def gradients(of: nn.Module, z: Tensor, half: bool, compiled: bool = False) -> list[Tensor]:
    """What a layer gives, and the gradients of what it was given and of its weights."""
    z, call = z.clone().requires_grad_(), torch.compile(of) if compiled else of
    with torch.autocast(z.device.type, torch.bfloat16, enabled=half):
        result = call(z)
    push = torch.linspace(0.5, 1.5, result.numel(), device=z.device)  # all of one sign: no sum cancels out
    result.backward(push.to(result.dtype).view_as(result))
    return [result.detach(), z.grad, *(p.grad for p in of.parameters())]


def kernels_of(run) -> str:
    """The names of the kernels that it launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return " ".join(one.key for one in seen.key_averages())


def near(result: Tensor, want: Tensor, share: float) -> bool:
    return float((result.double() - want.double()).norm()) <= share * float(want.double().norm())


def test_it_is_left_alone_where_it_does_not_belong():
    z, weight = torch.zeros(2, 8), torch.zeros(16, 8)
    assert not can_fuse(z, weight)
    assert not can_fuse(z.bfloat16(), weight.bfloat16())


def test_without_a_kernel_for_it_a_gelu_is_computed_plainly():
    z, weight, bias = torch.randn(3, 8), torch.randn(16, 8), torch.randn(16)
    before = torch.empty(3, 16)
    after = product(z, weight, bias, before)
    assert torch.equal(before, F.linear(z, weight, bias))
    assert torch.equal(after, F.gelu(before, approximate="tanh"))
    assert torch.equal(product(z, weight, bias), after)


@gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 64), (1, 1, 64), (64, 197, 64)])
@pytest.mark.parametrize("kind", [part, lambda: Attention(64, 4)])
def test_values_and_gradients_are_those_of_float64(kind, shape, compiled):
    torch.compiler.reset()
    torch.manual_seed(1)
    z, ours = torch.randn(shape), kind()
    want = gradients(copy.deepcopy(ours).double(), z.double(), half=False)
    result = gradients(ours.cuda(), z.cuda(), half=True, compiled=compiled)
    assert result[0].dtype == torch.bfloat16
    for one, other in zip(result, want, strict=True):
        assert near(one.cpu(), other, 4 * HALF) or other.norm() < 1e-9  # that of the keys' bias is nothing


def norm_of(width: int) -> LayerNorm:
    layer = LayerNorm(width, eps=1e-6)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.uniform_(-1, 1)
    return layer


@gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7, 64), (1, 1, 192), (33, 5, 768), (2, 197, 1000), (3, 50, 1664)])
def test_a_layer_norm_has_the_values_and_gradients_of_float64(shape, kind):
    torch.manual_seed(0)
    layer, z = norm_of(shape[-1]), (3 * torch.randn(shape) + 2).to(kind)
    want = gradients(copy.deepcopy(layer).double(), z.double(), half=False)
    layer = layer.cuda()
    result = gradients(layer, z.cuda(), half=True)
    assert result[0].dtype == torch.bfloat16
    assert result[1].dtype == kind
    for one, other in zip(result, want, strict=True):
        assert near(one.cpu(), other, 2 * HALF)
    again = gradients(layer.requires_grad_(), z.cuda(), half=True)[:2]
    assert all(torch.equal(one, other) for one, other in zip(result, again, strict=False))


@gpu
def test_a_layer_norm_takes_parts_of_a_tensor():
    layer, z = norm_of(64).cuda(), torch.randn(4, 9, 64, device="cuda", dtype=torch.bfloat16)
    for part_of_z in (z[:, :1], z.transpose(0, 1), z[:, 3:5]):
        assert torch.equal(
            gradients(layer, part_of_z, half=True)[0], gradients(layer, part_of_z.contiguous(), half=True)[0]
        )


@gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_they_are_what_a_model_is_computed_by(compiled):
    """A condition that is never met would pass every other test here."""
    torch.compiler.reset()
    model = fresh(configure("ViT-Ti/16", classes=5, depth=2, image_size=32), seed=0).cuda()
    call, images = torch.compile(model) if compiled else model, torch.rand(4, 3, 32, 32, device="cuda")

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            call(images).sum().backward()

    run()
    seen = kernels_of(run)
    assert "gelu_backward_kernel" in seen
    assert "pack_qkv_kernel" in seen
    assert ("layer_norm_backward_kernel" in seen) != compiled  # the compiler fuses it with its neighbours
    assert "conv" not in seen.lower().replace("convert", "")


@gpu
def test_a_file_for_others_holds_none_of_it():
    model = fresh(configure("ViT-Ti/16", classes=5, depth=2, image_size=32), seed=0).cuda()
    assert "vitkit" not in str(trace(model, Form(precision="bf16")).graph)
    graph, images = Graph(model, Form(precision="bf16")), torch.rand(2, 3, 32, 32, device="cuda")
    with torch.no_grad():  # the control: without the switch
        assert "vitkit" in str(torch.export.export(graph, (images,), strict=True).graph)


@gpu
def test_prediction_gives_what_training_gives():
    ours, z = part().cuda().bfloat16(), torch.randn(4, 9, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        result = mlp(z, ours.up, ours.down)
        plain = F.linear(F.gelu(F.linear(z, ours.up.weight, ours.up.bias), approximate="tanh"),
                         ours.down.weight, ours.down.bias)  # fmt: skip
    assert near(result, mlp(z, ours.up, ours.down).detach(), HALF)
    assert near(result, plain, 2 * HALF)


@gpu
def test_what_it_cannot_do_is_computed_as_before():
    z = torch.randn(2, 3, 64, device="cuda", dtype=torch.bfloat16)
    assert can_fuse(z, part().up.weight)
    assert not can_fuse(z.float(), part().up.weight)
    assert not can_fuse(z, torch.zeros(30, 64))
    exact = part(gelu="erf").cuda().bfloat16()
    want = exact.down(F.gelu(exact.up(z)))
    assert torch.equal(exact(z), want)


@gpu
def test_a_part_of_a_tensor_that_lies_anywhere_is_taken():
    ours = part().cuda().bfloat16()
    held = torch.randn(2 * 3 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    odd = held[1:].view(2, 3, 64)  # two bytes from where kernels like it
    turned = torch.randn(64, 3, 2, device="cuda", dtype=torch.bfloat16).permute(2, 1, 0)
    with torch.no_grad():
        for z in (odd, turned):
            assert near(ours(z), ours(z.clone(memory_format=torch.contiguous_format)), HALF)


COMPILED = """
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from vitkit.ops import fused
from vitkit.ops.custom_op import LIBRARY

def dense_gelu_with_input(z, weight, bias):
    before = F.linear(z, weight, bias)
    return before, F.gelu(before, approximate="tanh")

def gelu_backward(gradient, before):
    return gradient * 1, gradient.sum(0)

def pack_qkv(q, k, v):
    found = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).reshape(-1, 48)
    return found, found.sum(0)

for function in (dense_gelu_with_input, gelu_backward, pack_qkv):
    LIBRARY.impl(function.__name__, function, "CPU")

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, z):
        q, k, v = fused.fused_qkv(z, self.qkv, 2)
        return fused.fused_mlp(z + (q + k + v).transpose(1, 2).flatten(2), self.up, self.down)

layer = Layer()
with torch.autocast("cpu", torch.bfloat16):
    fused.compile_model(layer)(torch.ones(2, 3, 16)).sum().backward()
assert layer.qkv.weight.grad is not None
print(*(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("saved", "hit", "bypass")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
def test_a_second_start_finds_what_the_first_has_compiled(tmp_path):
    """The operations stand for themselves on a CPU here; what a compiler keeps does not depend on them."""
    where = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    messages = [
        subprocess.run(
            [sys.executable, "-c", COMPILED], env=where, check=True, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert [one.stdout.split() for one in messages] == [["1", "0", "0"], ["0", "1", "0"]]
