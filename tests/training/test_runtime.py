"""Device and precision as they are chosen, and what a process is set to."""

import os

import pytest
import torch
from refusals import refused

from vitkit.runtime.runtime import choose_runtime, data_workers, seed_step


@pytest.fixture
def undecided(monkeypatch):
    """Whatever a test switches on is off again behind it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_deterministic_sets_the_whole_process(undecided):
    choose_runtime("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    choose_runtime("cpu", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_a_step_is_seeded_as_torch_seeds():
    seed_step(3, 17)
    mine = torch.rand(4)
    torch.manual_seed(3 * 1_000_003 + 17)
    assert torch.equal(mine, torch.rand(4))
    seed_step(3, 18)
    assert not torch.equal(mine, torch.rand(4))


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        ({"device": "gpu9"}, "request.value", "gpu9"),
        ({"device": "xpu"}, "device.unavailable", "xpu"),
        ({"precision": "fp8"}, "request.value", "fp8"),
        ({"parallel": "tp"}, "request.value", "tp"),
    ],
)
def test_what_is_not_there_is_refused_by_name(options, code, value):
    with refused(code, value):
        choose_runtime(**({"device": "cpu"} | options))


def test_a_negative_number_of_workers_is_refused():
    with refused("request.value", -1):
        data_workers(-1)
