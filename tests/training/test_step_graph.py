"""Steps played from a recording: the same as computed ones, bit for bit; nothing else may change."""

import copy

import pytest
import torch
from torch import Tensor, nn

from vitkit.models.variants import configure, fresh
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.runtime.runtime import Runtime, seed_step
from vitkit.tasks.classify import ClassificationLoss
from vitkit.tasks.task import Batch
from vitkit.training import step as making_steps
from vitkit.training.loop import train
from vitkit.training.optimizer import OptimizerConfig, set_rate, step_if_finite, supports_found_inf
from vitkit.training.step import Diverged, Stepper, TrainState
from vitkit.training.step_graph import StepGraph
from vitkit.training.trainable import freeze

gpu = pytest.mark.gpu
STEPS = 4 * WARMUP_CALLS
KINDS = {
    "adam": OptimizerConfig(kind="adam", weight_decay=0.1),
    "sgd": OptimizerConfig(kind="sgd"),
    "average": OptimizerConfig(kind="adam", average=0.9),
    "layer decay": OptimizerConfig(kind="adam", layer_decay=0.7),
    "head": OptimizerConfig(kind="adam"),
    "lora": OptimizerConfig(kind="adam"),
}


def model(train: str = "all", **options) -> nn.Module:
    shape = {"width": 64, "depth": 2, "heads": 2, "hidden": 128, "patch": 8, "image_size": (32, 32)}
    net = fresh(configure("ViT-Ti/16", classes=5, **(shape | options)), seed=0)
    freeze(net, train)
    return net


def batches(count: int = STEPS, size: int = 8, device: str = "cuda") -> list[list[Batch]]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        images = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=draw)
        made.append([{"image": images.to(device), "label": (torch.arange(size) % 5).to(device)}])
    return made


def trained(
    config, record, given=None, objective=None, said=None, due=lambda step: False, compile=False, **options
):
    """The losses of a short run, and its state."""
    runtime = Runtime("cuda", "bf16", cuda_graph=record, compile=compile)
    state = TrainState.start(runtime.place(model(**options)), config)
    losses = []
    train(
        state, iter(given or batches()), objective or ClassificationLoss(classes=5),
        until=len(given or batches()), rate=lambda step: 1e-3 * (step + 1), config=config, runtime=runtime,
        before=lambda step: seed_step(3, step), log=(said if said is not None else []).append,
        watch=lambda state, metrics: losses.append(metrics["loss"]), due=due,
    )  # fmt: skip
    return losses, state


def same(one: TrainState, other: TrainState) -> bool:
    kept = [list(state.model.state_dict().values()) + list(state.average.values()) for state in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@gpu
@pytest.mark.parametrize("name", KINDS)
def test_a_played_step_is_a_computed_one(name):
    """With dropout and stochastic depth, whose draws a recording makes anew each time; rates change too."""
    random = {"dropout": 0.1, "stochastic_depth": 0.2, "train": name if name in ("head", "lora") else "all"}
    expected, plain = trained(KINDS[name], record=False, **random)
    for due in (lambda step: True, lambda step: False, lambda step: step % 3 == 0):
        result, played = trained(KINDS[name], record=True, due=due, **random)
        assert result == expected and same(played, plain)


@gpu
def test_a_compiled_step_is_played_as_it_is_computed():
    """A compiler draws random numbers in its own way; they are others in every step here too."""
    random = {"dropout": 0.3, "stochastic_depth": 0.2}
    given = batches(1) * STEPS  # the same images, so that only the draws and the rates differ
    expected, plain = trained(KINDS["adam"], record=False, given=given, compile=True, **random)
    result, played = trained(KINDS["adam"], record=True, given=given, compile=True, **random)
    assert result == expected and same(played, plain)


@gpu
def test_an_odd_batch_is_computed_and_the_rest_played():
    given = batches()
    given[WARMUP_CALLS + 3] = batches(1, size=5)[0]
    said: list[str] = []
    expected, plain = trained(KINDS["adam"], False, given)
    result, played = trained(KINDS["adam"], True, given, said=said)
    assert result == expected and same(played, plain) and not said


@gpu
def test_a_step_that_looks_at_a_number_is_computed():
    """It cannot be recorded; it is told once, and the run is the same as without."""

    class Looks:
        def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            result = ClassificationLoss(classes=5)(model, batch)
            return result | {"seen": torch.tensor(float(result["loss"].detach()), device="cuda")}

    said: list[str] = []
    expected, plain = trained(KINDS["adam"], False, objective=Looks(), dropout=0.1)
    result, played = trained(KINDS["adam"], True, objective=Looks(), said=said, dropout=0.1)
    assert result == expected and same(played, plain)
    assert len(said) == 1 and "without a CUDA graph" in said[0]


@gpu
def test_a_played_step_that_is_no_number_moves_nothing():
    runtime, config = Runtime("cuda", "bf16"), KINDS["adam"]
    state = TrainState.start(runtime.place(model()), config)
    steps = Stepper(state, ClassificationLoss(classes=5), config, state.model, runtime)
    given = [{"image": torch.randn(8, 3, 32, 32, device="cuda"), "label": torch.arange(8, device="cuda") % 5}]
    for _ in range(WARMUP_CALLS + 2):
        steps(given, 1e-3)
    assert steps.graph.graph is not None
    before = copy.deepcopy(state.model.state_dict()), copy.deepcopy(state.optimizer.state_dict()["state"])
    bad = [given[0] | {"image": torch.full_like(given[0]["image"], float("nan"))}]
    with pytest.raises(Diverged):
        steps(bad, 1e-3)
    assert all(
        torch.equal(a, b) for a, b in zip(before[0].values(), state.model.state_dict().values(), strict=True)
    )
    after = state.optimizer.state_dict()["state"]
    assert all(torch.equal(before[1][i][slot], after[i][slot]) for i in after for slot in after[i])


@gpu
def test_a_recording_makes_room_when_memory_is_short():
    runtime, config = Runtime("cuda", "bf16"), KINDS["adam"]
    state = TrainState.start(runtime.place(model()), config)
    failed = []

    def short(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if len(batch["image"]) == 5 and not failed:
            failed.append(steps.graph.graph is not None)
            raise torch.OutOfMemoryError("as if")
        return ClassificationLoss(classes=5)(net, batch)

    steps = Stepper(state, short, config, state.model, runtime)
    for given in [*batches(WARMUP_CALLS + 2), *batches(1, size=5), *batches(2)]:
        steps(given, 1e-3)
    assert failed == [True] and steps.graph.graph is None and steps.backoff.pieces == 1


class Plays(StepGraph):
    """As if steps had been recorded, on a CPU: they are computed, and the next may begin before a look."""

    def can_replay(self, given: list[Batch]) -> bool:
        return True

    def replay(self, step, batch: Batch):
        return step(batch)


def ahead(monkeypatch, due, until: int = 8, batch=None, plays: bool = True):
    """(step, first weight, loss) of each call of watch in a run; the optimizer moves unseen, as on a GPU."""
    if plays:
        monkeypatch.setattr(making_steps, "StepGraph", Plays)
    net = model()
    groups = [{"params": list(net.parameters()), "rate_share": 1.0}]
    state = TrainState(net, torch.optim.AdamW(groups, lr=0.0, fused=True))
    seen = []
    train(
        state, iter(batch or batches(until, device="cpu")), ClassificationLoss(classes=5), until=until,
        rate=lambda step: 1e-3, config=KINDS["adam"], due=due,
        watch=lambda s, result: seen.append((s.step, net.head.bias.tolist(), result["loss"])),
    )  # fmt: skip
    return seen, state


def test_watch_hears_of_every_step_in_order_and_the_model_waits_where_it_is_due(monkeypatch):
    plain, expected = ahead(monkeypatch, lambda step: True, plays=False)
    result, state = ahead(monkeypatch, lambda step: step % 3 == 0)
    assert [step for step, _, _ in result] == [step for step, _, _ in plain] == list(range(1, 9))
    assert [loss for _, _, loss in result] == [loss for _, _, loss in plain] and same(state, expected)
    weights = {step: bias for step, bias, _ in plain}
    assert {step: bias == weights[step] for step, bias, _ in result} == {
        1: False, 2: False, 3: True, 4: False, 5: False, 6: True, 7: False, 8: True
    }  # fmt: skip
    assert all(bias == weights[step + 1] for step, bias, _ in result if step in (1, 2, 4, 5, 7))


def test_a_divergence_that_is_noticed_late_names_its_own_step(monkeypatch):
    given = batches(8, device="cpu")
    given[3] = [given[3][0] | {"image": torch.full((8, 3, 32, 32), float("nan"))}]
    for due in (lambda step: True, lambda step: False):
        with pytest.raises(Diverged, match="step 3: loss nan") as error:
            ahead(monkeypatch, due, batch=given)
        assert error.value.step == 3


def test_nothing_is_recorded_without_a_gpu_or_where_it_was_not_asked_for():
    state = TrainState.start(model(), OptimizerConfig(kind="adam"))
    for runtime in (Runtime(), Runtime("cuda", cuda_graph=False), Runtime("cuda", world=2)):
        recorder = StepGraph(runtime, state.optimizer, print)
        assert not any(recorder.can_replay(given) for given in batches(device="cpu"))


def test_a_move_of_unsound_numbers_moves_nothing():
    """The kernels of a fused optimizer see to it; the same ones are there on a CPU."""
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    adam = torch.optim.AdamW([{"params": weights, "rate_share": 1.0}], lr=0.0, weight_decay=0.1, fused=True)
    assert supports_found_inf(adam) and not supports_found_inf(torch.optim.AdamW(weights))
    set_rate(adam, 0.1)
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))
    step_if_finite(adam, finite=torch.tensor(False))
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    step_if_finite(adam, finite=torch.tensor(True))
    assert all((weight < 1).all() for weight in weights)
