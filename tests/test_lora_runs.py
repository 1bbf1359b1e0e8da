"""Runs that train adapters, a head or the last blocks: what changes, what is saved, and how they resume."""

import json

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from sigterm import sigterm_at
from test_cli import run as exit_code
from together import go, losses, together

import vitkit
from vitkit.models.variants import build
from vitkit.recipes import recipe
from vitkit.recipes.recipe import Recipe, from_json, override, to_json
from vitkit.runs import run as running
from vitkit.runs.folder import Interrupted, RunOptions
from vitkit.runtime.runtime import Runtime
from vitkit.training.checkpoint import latest

SHAPE = {"width": 32, "depth": 2, "heads": 2, "hidden": 48, "image_size": (8, 8), "classes": 3}
HEAD = {"head.weight", "head.bias"}
QUIET = RunOptions(workers=0, quiet=True, report=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A weights file to start from; its values are random."""
    path = tmp_path_factory.mktemp("weights") / "base.safetensors"
    torch.manual_seed(5)
    model = build("ViT-Ti/4", **SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    vitkit.save(model, path)
    return path


def settings(base, train: str, *changes: str, name: str = "lora") -> Recipe:
    fixed = [
        "data=digits", f"weights={base}", f"train={train}", "image_size=8", "batch=16", "length.steps=6",
        "schedule.warmup=1", "schedule.rate=0.01", "evaluations=2", "keep=last", "auto=",
    ]  # fmt: skip
    return override(recipe(name), fixed + list(changes))


def trained(out, r: Recipe):
    return running.run(r, out, Runtime(), QUIET)


def checkpoint(out) -> dict[str, torch.Tensor]:
    return load_file(latest(out / "checkpoints")[0] / "state-00000.safetensors")


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("targets", ["qv", "all-linear"])
def test_lora_changes_nothing_but_the_adapted_weights_and_the_head(base, tmp_path, targets, keep):
    """Also with an average, which holds the trained parameters only, and with the best weights on val."""
    r = settings(base, "lora", f"lora.targets={targets}", "optimizer.average=0.5", f"keep={keep}")
    result = trained(tmp_path, r)
    before, after = vitkit.load(base).state_dict(), vitkit.load(tmp_path).state_dict()
    state = checkpoint(tmp_path)
    layers = {"qv": ["attention.qkv"], "all-linear": ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]}
    adapted = {f"encoder.blocks.{i}.{layer}.weight" for i in range(2) for layer in layers[targets]}
    for name in before.keys() - HEAD:
        original = name.replace(".weight", ".parametrizations.weight.original") if name in adapted else name
        assert torch.equal(state[f"model.{original}"], before[name]), f"{name} was frozen"
        assert torch.equal(after[name], before[name]) != (name in adapted), name
    average = {name for name in state if name.startswith("average.")}
    assert all(".lora_" in name or ".head." in name for name in average)
    assert len(average) == 2 + 2 * 2 * {"qv": 2, "all-linear": 6}[targets]
    moments = {name for name in state if name.endswith(".exp_avg")}
    assert len(moments) == len(average), "the optimizer knows nothing of frozen weights"
    assert not torch.equal(after["head.weight"], torch.zeros_like(after["head.weight"]))
    assert result.test["images"] == 179


def test_the_model_file_is_what_was_tested_and_the_adapter_gives_it_back(base, tmp_path, capsys):
    result = trained(tmp_path, settings(base, "lora", "length.steps=12", "lora.rank=4"))
    model = vitkit.load(tmp_path)
    again = vitkit.merge_adapter(vitkit.load(base), tmp_path / "adapter.safetensors")
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
    assert again.labels == model.labels and again.preprocessing == model.preprocessing
    factors = load_file(tmp_path / "adapter.safetensors")
    assert factors["encoder.blocks.0.attention.qkv.q.lora_A.weight"].shape == (4, 32)
    assert factors["encoder.blocks.1.attention.qkv.v.lora_B.weight"].shape == (32, 4) and len(factors) == 10
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("adapter", "model")]
    assert sizes[0] < sizes[1] / 2
    assert exit_code("evaluate", tmp_path, "digits", "--split", "test", "--json") == 0
    assert json.loads(capsys.readouterr().out)["top1"] == result.test["top1"]


@pytest.mark.parametrize("train", ["head", "last-1"])
def test_the_head_and_the_last_blocks(base, tmp_path, train):
    trained(tmp_path, settings(base, train, name="finetune"))
    before, after = vitkit.load(base).state_dict(), vitkit.load(tmp_path).state_dict()
    changed = {name for name in before.keys() - HEAD if not torch.equal(before[name], after[name])}
    block = {name for name in before if name.startswith(("encoder.blocks.1.", "encoder.norm."))}
    assert changed == (set() if train == "head" else block)
    assert not (tmp_path / "adapter.safetensors").exists()
    assert after["head.weight"].abs().max() > 0


def test_a_run_that_was_stopped_resumes_bit_for_bit(base, tmp_path):
    r = settings(base, "lora", "optimizer.average=0.9", "keep=best")
    trained(tmp_path / "straight", r)
    with sigterm_at(4), pytest.raises(Interrupted):
        trained(tmp_path / "stopped", r)
    assert latest(tmp_path / "stopped" / "checkpoints")[0].name == "step-00000004"
    trained(tmp_path / "stopped", r)
    for read in (checkpoint, lambda out: load_file(out / "model.safetensors")):
        one, other = read(tmp_path / "straight"), read(tmp_path / "stopped")
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert losses(tmp_path / "straight") == losses(tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "head", "last-1"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_processes_train_the_same(base, tmp_path, parallel, train):
    r = settings(base, train, "optimizer.average=0.9", "keep=best")
    together(1, go, r, tmp_path / "one", {})
    together(2, go, r, tmp_path / "two", {"stop": 4}, parallel=parallel)
    together(2, go, r, tmp_path / "two", {}, parallel=parallel)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=0, abs=1e-5)
    images = torch.randn(4, 3, 8, 8)
    one, two = (vitkit.load(tmp_path / name)(images) for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-4)


def test_the_flag_chooses_the_recipe_and_says_what_is_trained(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ("finetune", "digits", "--weights", base, "--image-size", 8, "--steps", 2, "--batch", 8,
               "--workers", 0)  # fmt: skip
    assert exit_code(*command, "--train", "lora", "--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"] == "lora" and plan["learning_rate"] == 1e-3 and plan["optimizer"] == "Adam"
    assert plan["trainable_parameters"] == 2 * 2 * 8 * 64 + 330
    assert plan["checkpoint_GB"] == pytest.approx(4e-9 * (plan["parameters"] + 2048 + 2 * 2378))
    assert exit_code(*command, "--set", "train=lora", "lora.rank=2", "--plan") == 0
    assert "LoRA, rank 2" in capsys.readouterr().out
    assert exit_code(*command, "--train", "last-1") == 0
    assert "last block and head" in capsys.readouterr().err
    assert json.loads((tmp_path / "runs/digits/recipe.json").read_text())["train"] == "last-1"


REFUSED = {
    "a number of blocks that no model has": (["--train", "last-7"], "recipe.value"),
    "an unknown name": (["--train", "adapter"], "request.value"),
    "an unknown name in a recipe": (["--set", "train=adapter"], "recipe.value"),
    "rank 0": (["--train", "lora", "--set", "lora.rank=0"], "recipe.value"),
    "unknown targets": (["--train", "lora", "--set", "lora.targets=values"], "recipe.value"),
    "settings of LoRA without LoRA": (["--train", "head", "--set", "lora.rank=4"], "recipe.value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_before_training(base, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    words, code = REFUSED[name]
    fixed = ("finetune", "digits", "--weights", base, "--image-size", 8, "--workers", 0, "--json")
    assert exit_code(*fixed, *words) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code
    assert not (tmp_path / "runs").exists()


def test_nothing_is_frozen_without_pretrained_weights(tmp_path):
    for train in ("lora", "head", "last-1"):
        r = override(settings("", train), ["weights=", "model=ViT-Ti/4", "model.depth=2"])
        with refused("request.conflict", f"train={train}", "--weights"):
            trained(tmp_path / train, r)


def test_a_resnet_has_no_queries_and_masked_prediction_trains_all(tmp_path):
    resnet = build("BiT-R50x1", blocks=(1, 1, 1, 1), classes=2, image_size=(32, 32))
    vitkit.save(resnet, tmp_path / "r.safetensors")
    with refused("model.unsupported", "train=head"):
        trained(tmp_path / "run", settings(tmp_path / "r.safetensors", "lora", "image_size=32"))
    with refused("recipe.value", "train"):
        Recipe(name="x", objective="masked", train="head")


def test_recipes_of_earlier_versions_are_read():
    """Until now optimizer.frozen=backbone was what train=head is."""
    for frozen, train in (("nothing", "all"), ("backbone", "head")):
        table = json.loads(to_json(recipe("finetune")))
        del table["train"], table["lora"]
        table["optimizer"]["frozen"] = frozen
        assert from_json(json.dumps(table)) == override(recipe("finetune"), [f"train={train}"])
    table["optimizer"]["frozen"] = "everything"
    with refused("recipe.unknown-field", "optimizer.frozen"):
        from_json(json.dumps(table))
