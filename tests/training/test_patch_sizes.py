"""Training with random patch sizes (FlexiViT): the draw, the resized embedding, gradients, and resuming."""

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from sigterm import sigterm_at
from together import go, losses, together

import vitkit
from vitkit.data.order import Order
from vitkit.models.adapt import adapt
from vitkit.models.variants import build, configure
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.runs import run as running
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import Classify
from vitkit.tasks.multilabel import Multilabel
from vitkit.training.checkpoint import latest

SHAPE = {"width": 32, "depth": 2, "heads": 2, "hidden": 48, "image_size": 24, "classes": 5}
QUIET = RunOptions(workers=0, quiet=True, report=False)


def made(name: str = "ViT-Ti/4", **options):
    torch.manual_seed(3)
    model = build(name, **(SHAPE | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"class_position": False, "position_resize": "flexivit"}, {"positions": "2d"},
     {"positions": "sincos2d"}, {"head": "gap", "positions": "none", "rope": "dinov3"}],
    ids=["1d", "flexivit", "2d", "sincos2d", "rope"],
)  # fmt: skip
@pytest.mark.parametrize("patch", [2, 3, 4, 5, 6, 8, 12, 24])
def test_another_patch_size_equals_adapt(options, patch):
    model, images = made(**options), torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = adapt(model, patch=patch)(images)
        torch.testing.assert_close(model(images, patch=patch), expected, atol=2e-5, rtol=1e-4)
        assert torch.equal(model(images, patch=4), model(images))  # its own size, bit for bit


def test_gradients_reach_the_embedding_through_the_resize():
    model = made(depth=1).double()
    images = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    for patch in (3, 6):
        model.zero_grad()
        model(images, patch=patch).square().sum().backward()
        gradient, (channel, row) = model.project.weight.grad, (7, 2)
        step, values = 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                model.project.weight[channel, 1, row, 0] += sign * step
                values.append(float(model(images, patch=patch).square().sum()))
                model.project.weight[channel, 1, row, 0] -= sign * step
        slope = (values[0] - values[1]) / (2 * step)
        assert float(gradient[channel, 1, row, 0]) == pytest.approx(slope, rel=1e-4, abs=1e-6)
        assert model.positions.table.grad.abs().sum() > 0


@pytest.mark.parametrize("task", [Classify, Multilabel])
def test_the_draw_depends_on_seed_and_step_alone(task):
    sizes = (3, 4, 6, 8)
    batch = {"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}

    def drawn(seed: int, length: int = 50) -> list[int]:
        prepare = task(patch_sizes=sizes).prepare(None, Order(length, 2, seed))
        return [prepare(step, batch)["patch"].shape[1] for step in range(400)]

    assert drawn(0) == drawn(0, length=7) != drawn(1)
    counts = [drawn(0).count(size) for size in sizes]
    assert min(counts) > 70 and sum(counts) == 400  # uniform
    assert task().prepare(None, Order(50, 2)) is None


def small(*changes: str) -> Recipe:
    fixed = [
        "data=digits", "model=ViT-Ti/4", "model_options=width=32,depth=2,heads=2,hidden=48",
        "image_size=12", "batch=16", "length.steps=6", "length.epochs=none", "schedule.warmup=1",
        "schedule.rate=0.01",
        "evaluations=2", "keep=last", "auto=", "patience=0", "dropout=0.1", "mixup=0.2",
    ]  # fmt: skip
    return override(recipe("scratch"), fixed + list(changes))


def trained(out, r: Recipe) -> dict[str, torch.Tensor]:
    running.run(r, out, Runtime(), QUIET)
    return load_file(latest(out / "checkpoints")[0] / "state-00000.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_starts_without_merged_tokens(tmp_path):
    vitkit.save(adapt(made(), merge_tokens=3), tmp_path / "m.safetensors")
    trained(tmp_path / "run", small("model=", "model_options=", f"weights={tmp_path / 'm.safetensors'}"))
    assert vitkit.load(tmp_path / "run").config.merge_tokens == 0


def test_one_patch_size_is_ordinary_training_bit_for_bit(tmp_path):
    ordinary = trained(tmp_path / "a", small())
    assert same(ordinary, trained(tmp_path / "b", small("patch_sizes=4")))
    assert not same(ordinary, trained(tmp_path / "c", small("patch_sizes=3,4,6")))


def test_a_resumed_run_draws_the_same_patch_sizes(tmp_path):
    r = small("data.patch_sizes=2,3,4,6", "micro_batch=5")
    whole = trained(tmp_path / "whole", r)
    with sigterm_at(4), pytest.raises(Interrupted):
        trained(tmp_path / "parts", r)
    assert latest(tmp_path / "parts" / "checkpoints")[0].name == "step-00000004"
    assert same(whole, trained(tmp_path / "parts", r))
    assert vitkit.load(tmp_path / "parts").config.patch == 4


def test_a_micro_batch_has_the_patch_size_of_its_step(tmp_path):
    """Gradients are accumulated over one patch size, so smaller micro-batches change nothing but rounding."""
    a = trained(tmp_path / "a", small("patch_sizes=2,6", "dropout=0"))
    b = trained(tmp_path / "b", small("patch_sizes=2,6", "dropout=0", "micro_batch=6"))
    for name in ("model.project.weight", "model.positions.table"):
        torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_processes_draw_the_same_patch_sizes(tmp_path, parallel):
    r = small("patch_sizes=2,3,6", "dropout=0")
    together(1, go, r, tmp_path / "one", {})
    together(2, go, r, tmp_path / "two", {"stop": 3}, parallel=parallel)
    together(2, go, r, tmp_path / "two", {}, parallel=parallel)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=0, abs=1e-5)


def test_the_flexi_recipe_is_the_published_one():
    r = recipe("flexi")
    assert r.patch_sizes == (48, 40, 30, 24, 20, 16, 15, 12, 10, 8) and r.image_size == (240, 240)
    assert (r.model, r.batch, r.schedule.rate, r.schedule.warmup) == ("FlexiViT-B/16", 4096, 1e-3, 10_000)
    assert (r.loss, r.head_bias, r.randaugment, r.mixup) == ("sigmoid", -10.0, (2, 10), 0.2)
    assert all(240 % patch == 0 for patch in r.patch_sizes)


def test_what_cannot_have_other_patch_sizes_is_refused(tmp_path):
    with refused("recipe.value", "patch_sizes", "4,16", "12"):
        small("patch_sizes=4,16")
    with refused("recipe.value", "patch_sizes"):
        small("patch_sizes=0,4")
    with refused("recipe.value", "patch_sizes"):
        override(small(), ["objective=masked", "patch_sizes=4", "mixup=0"])
    relative = {"positions": "relative"}
    for name, options in (("BiT-R50x1", {}), ("R+ViT-Ti/16", {}), ("ViT-Ti/16", relative)):
        for task in (Classify, Multilabel):
            with refused("model.unsupported", "patch_sizes"):
                task(patch_sizes=(8, 16)).configure(configure(name, **options))
    with refused("model.unsupported", "patch_sizes"):
        running.run(small("patch_sizes=4,6", "model.positions=relative"), tmp_path / "r", Runtime(), QUIET)
    with refused("request.conflict", "patch_sizes"):
        running.run(small("patch_sizes=4,6"), tmp_path / "compiled", Runtime(compile=True), QUIET)
    with refused("model.unsupported", "8"):
        made("R+ViT-Ti/16", image_size=64, patch=1)(torch.zeros(1, 3, 64, 64), patch=8)
