"""A training step copies nothing from the host and reads nothing back, so a CUDA graph can hold it.

The steps run on the meta device, which needs no GPU and raises where a number is read. Copies from the host
are seen in the arguments of PyTorch's functions.
"""

import numpy as np
import pytest
import torch
from test_memory_plan import NAMES, planned
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from vitkit.data import views
from vitkit.planning.memory import empty_batch, trained_skeleton
from vitkit.runs.batches import training_view

MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor)


class HostTensors(TorchFunctionMode):
    """Lists the functions that copy numbers from the host: of lists, of arrays, or of tensors of the CPU.

    A tensor without axes is a number that a kernel gets as an argument.
    """

    def __init__(self):
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = function in MAKERS
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            made = any(isinstance(part, list | np.ndarray) for part in index)
        tensors = [value for value in tree_iter((args, kwargs or {})) if isinstance(value, Tensor)]
        here = any(each.device.type == "cpu" and each.dim() for each in tensors)
        there = any(isinstance(each, Tensor) and each.is_meta for each in (result, *tensors))
        if there and (made or here):
            self.functions.append(function.__name__)
        return result


def host_tensors(act) -> list[str]:
    with HostTensors() as mode:
        act()
    return mode.functions


def step_of(r, config, source):
    """A function that computes the losses and gradients of two images on the meta device."""
    view = r.task.target_view(training_view(r), source) if r.task.targets else None
    model = trained_skeleton(r, config)
    module, objective = r.task.build(model).to("meta").train(), r.task.objective(model)
    r.task.begin(module, r.length.steps or 1)
    batch = {name: each.to("meta") for name, each in empty_batch(r, model, 2, view).items()}
    return lambda: objective(module, batch)["loss"].backward()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_a_task_can_be_captured(name, monkeypatch):
    # as on a GPU, where the mean and the deviation of pixels are copied once
    monkeypatch.setattr(views, "levels", lambda values, device: views.cached_levels(tuple(values), device))
    r, model, source = planned(name)
    step = step_of(r, model.config, source)
    step()  # as before a capture
    assert host_tensors(step) == []


@pytest.mark.parametrize(
    "act",
    [
        lambda z: z[[0, 1]],
        lambda z: z + torch.tensor([1.0, 2.0], device="meta"),
        lambda z: z.new_tensor([1.0, 2.0]),
        lambda z: z[torch.arange(2)],
        lambda z: z[np.arange(2)],
        lambda z: z.copy_(torch.arange(2)),
        lambda z: torch.arange(2).to(z.device),
    ],
)
def test_copies_from_the_host_are_seen(act):
    assert host_tensors(lambda: act(torch.empty(2, device="meta")))
    assert not host_tensors(lambda: torch.empty(2, device="meta") * torch.arange(2, device="meta"))


@pytest.mark.parametrize(
    "act", [torch.Tensor.item, torch.Tensor.tolist, lambda z: z[z > 0], bool, lambda z: z.cpu()]
)
def test_numbers_that_are_read_back_raise(act):
    with pytest.raises((RuntimeError, NotImplementedError)):
        act(torch.empty(1, device="meta"))
