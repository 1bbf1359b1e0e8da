"""finetune as a verb: what it chooses by itself, subsets, the paper's protocol, and what stops it."""

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from test_cli import run
from test_experiment import go, rows, same, tiny
from test_tasks import TINY

import vitkit
from vitkit.commands.finetune import make_recipe, pretraining
from vitkit.metrics.cost import activation_bytes, training_memory
from vitkit.models.variants import skeleton, variant
from vitkit.options import Training, part_of
from vitkit.planning import automatic, finetune_rules
from vitkit.planning.automatic import Choices
from vitkit.planning.memory import memory_of
from vitkit.planning.plan import Machine, compared, plan
from vitkit.recipes import recipe
from vitkit.recipes.finetune import hyperrule
from vitkit.recipes.recipe import to_json
from vitkit.runs.build import SplitCache, open_splits
from vitkit.runs.folder import RunOptions
from vitkit.runs.run import run as run_recipe
from vitkit.runtime.runtime import Runtime
from vitkit.training.step import Diverged


@pytest.fixture
def photos(tmp_path):
    """Forty pictures of two kinds, large enough for any resolution."""
    rng = np.random.default_rng(0)
    for i in range(40):
        folder = tmp_path / "photos" / ("dark" if i % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 120, (400, 330, 3), dtype=np.uint8) + (0 if i % 2 else 120)
        Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return tmp_path / "photos"


def published(monkeypatch, tmp_path):
    """A published name that is on this machine already, so that nothing is fetched."""
    model = vitkit.build("ViT-Ti/16", classes=3, image_size=32, depth=1, width=32, heads=2, hidden=32)
    vitkit.save(model, tmp_path / "small.npz")
    monkeypatch.setattr(automatic, "default_weights", lambda gpu: str(tmp_path / "small.npz"))


def test_without_options_it_chooses_and_says_why(photos, tmp_path, monkeypatch, capsys):
    published(monkeypatch, tmp_path)
    monkeypatch.setattr(automatic, "CPU_IMAGES", 80)
    out = tmp_path / "run"
    assert run("finetune", photos, "--out", out, "--workers", "0", "--device", "cpu", "--json") == 0
    recipe = json.loads((out / "recipe.json").read_text())
    assert recipe["image_size"] == [224, 224] and recipe["batch"] == 8 and recipe["length"]["steps"] == 20
    assert (recipe["keep"], recipe["patience"]) == ("auto", 0) and recipe["optimizer"]["kind"] == "adam"
    before = (out / "recipe.json").read_bytes()
    capsys.readouterr()
    # the same command again goes on with the choices of the first time, whatever the rule is now
    monkeypatch.setattr(automatic, "CPU_IMAGES", 8000)
    assert run("finetune", photos, "--out", out, "--workers", "0", "--device", "cpu") == 0
    assert (out / "recipe.json").read_bytes() == before
    assert "vitkit predict" in capsys.readouterr().out


def test_choices_follow_machine_and_data(photos):
    splits = open_splits(replace(recipe("finetune"), data=str(photos)))
    messages: list[automatic.Choice] = []
    base, rules = replace(recipe("table4"), weights="given"), automatic.RECIPE_RULES
    known = automatic.circumstances(Training(), splits, Runtime("cuda", "bf16"))
    on_gpu = automatic.decide(base, rules, known, messages.append)
    assert on_gpu.image_size == (384, 384) and "images are large enough" in messages[0].reason
    assert [choice.what for choice in messages] == ["resolution 384", "batch 8", "500 steps"]
    fixed = Training(image_size="64", batch=24, steps=7)
    known = automatic.circumstances(fixed, splits, Runtime())
    by_hand = automatic.decide(replace(base, batch=24), rules, known, messages.append)
    assert by_hand == replace(base, batch=24) and len(messages) == 3


def test_a_rule_is_a_pure_function_from_recipe_to_recipe(photos):
    """The same recipe and circumstances give the same choice, and the recipe that came in is not touched."""
    splits = open_splits(replace(recipe("finetune"), data=str(photos)))
    base = recipe("finetune")
    before = to_json(base)
    known = automatic.circumstances(Training(), splits, Runtime())
    rules = (*automatic.RECIPE_RULES, *finetune_rules.RULES, automatic.choose_stopping, automatic.fit_warmup)
    for rule in rules:
        assert rule(base, known) == rule(base, known) and to_json(base) == before


def test_offline_it_says_how_to_get_weights(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def fails(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", fails)
    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert run("finetune", photos, "--out", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert "no route to host" in message and "--weights FILE" in message and "--model ViT-Ti/16" in message
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_plan_tells_memory_and_time_and_does_nothing(tmp_path, capsys):
    assert run("finetune", "digits", "--out", tmp_path / "run", *TINY, "--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 6 and plan["memory_GB"] > 0 and plan["seconds"] > 0
    assert plan["largest_batch_at_once"] > 16 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("words, warmup", [
    (("--steps", 30), 3), (("--steps", 30, "--set", "schedule.warmup=25"), 25), (("--steps", 20_001), 10_000),
])  # fmt: skip
def test_a_shortened_run_warms_up_for_a_tenth_of_it(tmp_path, words, warmup):
    options = Training(model="ViT-Ti/4", recipe="masked", image_size="16", batch=8, steps=words[1],
                       set=tuple(words[3:]), out=tmp_path / "run", device="cpu", plan=True)  # fmt: skip
    made = plan(pretraining("digits", options), Machine(Runtime(), SplitCache(), print))
    assert made.recipe.schedule.warmup == made.to_json()["warmup"] == warmup
    assert any("steps of warm-up" in choice.what for choice in made.choices) == (warmup == 3)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-L/16", "BiT-R50x1"])
@pytest.mark.parametrize("gigabytes", [2, 24, 140])
@pytest.mark.slow
def test_the_largest_batch_fits_and_one_image_more_does_not(name, gigabytes, monkeypatch):
    monkeypatch.setattr(automatic, "device_memory", lambda device: int(gigabytes * 1e9))
    r, runtime = recipe("finetune"), Runtime(device="cuda", precision="bf16")
    model = skeleton(variant(name))
    most = automatic.largest_batch(r, model, runtime)
    limit = automatic.USABLE * gigabytes * 1e9
    assert memory_of(r, model, runtime, most + 1).total > limit
    assert most == 0 or memory_of(r, model, runtime, most).total <= limit
    assert most or gigabytes == 2


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R26+ViT-S/32", "BiT-R50x1"])
def test_the_memory_formula_equals_what_autograd_keeps(name):
    """Counted on the CPU, in full precision, for one image more."""
    small = {"depth": 2} if "ViT" in name else {"blocks": (1, 1, 1, 1)}
    model = vitkit.build(name, classes=10, image_size=64, **small).train()
    kept: dict[int, tuple[int, object]] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    def count(images):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(torch.zeros(images, 3, 64, 64))
        return sum(size for size, _ in kept.values())

    real, estimated = count(3) - count(2), activation_bytes(skeleton(model.config), half=False)
    if "ViT" in name:
        estimated -= 8 * model.config.tokens * model.config.hidden  # the backward pass at work
    assert estimated == pytest.approx(real, rel=0.06)


def test_memory_shrinks_by_recomputing_and_cutting():
    model = skeleton(variant("ViT-L/16"))
    whole = training_memory(model, 64, half=True, slots=2)
    assert training_memory(model, 64, half=True, slots=2, recompute=True).activations < whole.activations / 4
    assert training_memory(model, 64, half=True, slots=2, shards=8).total < whole.total
    count = sum(p.numel() for p in model.parameters())
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4 * count, 4 * count, 8 * count)
    assert whole.copies == 2 * count + 4 * 1024 * 16 * 16 * 3, "in bf16, and the patch convolution"
    assert training_memory(model, 64, half=True, slots=2, average=True).parameters == 8 * count


@pytest.mark.parametrize("text", ["1000", "10%", "25/class", "2.5%", "imbalanced=50"])
def test_subsets_are_read(text):
    assert len(part_of(text)) == 1


@pytest.mark.parametrize("text", ["many", "10 %%", "-3", "2.5", "3/classes", "0", "101%", "imbalanced=1"])
def test_other_subsets_are_refused(text):
    with refused("recipe.value", text, "25/class"):
        replace(recipe("finetune"), subset=text)


def test_smaller_subsets_lie_within_larger_ones():
    parts = {}
    for text in ("20%", "50%", "3/class"):
        parts[text] = set(open_splits(tiny(subset=text))["train"].keys)
    assert parts["20%"] < parts["50%"] and len(parts["3/class"]) == 30


def test_the_protocol_tunes_on_held_out_data_and_tests_all_seeds(tmp_path, capsys):
    arguments = ["finetune", "digits", "--out", tmp_path / "p", *TINY, "rates=0.0001,0.01", "--protocol"]
    assert run(*arguments, "--seeds", "2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["rates"]) == {"0.0001", "0.01"} and result["rate"] == 0.01 and len(result["seeds"]) == 2
    assert result["mean"] == pytest.approx(sum(result["seeds"]) / 2) and result["images"] == 179
    grid = json.loads((tmp_path / "p" / "rate-0.01" / "result.json").read_text())
    final = json.loads((tmp_path / "p" / "seed-1" / "result.json").read_text())
    assert grid["test"]["split"] == "val" and final["test"]["split"] == "test"
    sizes = {name: len(open_splits(tiny(train_on=name))["train"]) for name in ("train", "train+val")}
    assert sizes["train+val"] == sizes["train"] + grid["test"]["images"]
    before = (tmp_path / "p" / "seed-1" / "result.json").stat().st_mtime_ns
    assert run(*arguments, "--seeds", "2") == 0  # finished runs are only read
    assert (tmp_path / "p" / "seed-1" / "result.json").stat().st_mtime_ns == before
    assert "mean of 2 seeds at learning rate 0.01" in capsys.readouterr().out
    assert run("evaluate", tmp_path / "p", "digits", "--json") == 0


def test_convolutions_try_the_rate_of_the_paper():
    options = Training(model="BiT-R50x1", recipe="imagenet", image_size="32", steps=3, batch=16)
    r = make_recipe("digits", options, "finetune")

    known = automatic.circumstances(options, open_splits(r), Runtime())

    def tried(config):
        return compared(r, config, known, Machine(Runtime(), SplitCache(), print), Choices(None))

    rates = ["rate-0.003", "rate-0.01", "rate-0.03"]
    assert list(tried(variant("ViT-B/16"))) == rates
    assert list(tried(variant("R50+ViT-B/16"))) == [*rates, "rate-0.06"]
    assert list(tried(variant("BiT-R50x1"))) == [*rates, "rate-0.06", "bit"]
    made = tried(variant("BiT-R50x1"))
    assert [made[name].schedule.rate for name in made] == [0.003, 0.01, 0.03, 0.06, 0.003]
    assert made["bit"].length.steps == 3 and made["bit"].image_size == (32, 32) and made["bit"].batch == 16


def test_a_resnet_is_tuned_by_the_better_of_the_grid_and_bits_rule(tmp_path, capsys):
    words = ["--model", "BiT-R50x1", "--image-size", "16", "--steps", "12", "--batch", "16", "--workers", "0",
             "--set", "model_options=blocks=1", "evaluations=0", "test=0.05", "val=0.05"]  # fmt: skip
    out = tmp_path / "p"  # a rate at which nothing is learned
    arguments = ["finetune", "digits", "--out", out, *words, "rates=1e-9", "--protocol", "--seeds", "1"]
    assert run(*arguments) == 0
    assert "HyperRule" in capsys.readouterr().out and "HyperRule" in (out / "report.html").read_text()
    protocol = json.loads((out / "protocol.json").read_text())
    assert (
        set(protocol["tried"]) == {"rate-1e-09", "bit"}
        and protocol["chosen"] == "bit"
        and protocol["rate"] == 0.003
    )
    for folder, split in (("rate-1e-09", "val"), ("bit", "val"), ("seed-0", "test")):
        assert json.loads((out / folder / "result.json").read_text())["test"]["split"] == split
    rule, final = (json.loads((out / name / "recipe.json").read_text()) for name in ("bit", "seed-0"))
    assert (rule["schedule"]["decay"], rule["schedule"]["rate"], rule["resize"]) == ("stairs", 0.003, 20)
    assert (final["name"], final["train_on"], final["length"]["steps"]) == ("bit", "train+val", 12)


def test_the_hyperrule_follows_the_data():
    small = hyperrule(recipe("bit"), 1_000, 300 * 300)
    assert small.length.steps == 500 and small.mixup == 0 and small.schedule.warmup == 100
    assert [round(s * 500) for s in small.schedule.stairs] == [200, 300, 400]
    middle, large = (hyperrule(recipe("bit"), n, 32 * 32) for n in (50_000, 1_000_000))
    assert middle.length.steps == 10_000 and large.length.steps == 20_000 and middle.mixup == 0.1
    assert middle.image_size == (128, 128) and middle.resize == 160


def test_recomputed_activations_change_no_bit(tmp_path):
    for name, runtime in (("kept", Runtime()), ("again", Runtime(recompute=True))):
        run_recipe(tiny(), tmp_path / name, runtime, RunOptions(workers=0, quiet=True))
    assert same(tmp_path / "kept", tmp_path / "again") and rows(tmp_path / "kept") == rows(tmp_path / "again")


def test_a_checkpoint_written_aside_is_the_same(tmp_path):
    from vitkit.runs import checkpointer

    saved, checkpointer.SAVE_SECONDS = checkpointer.SAVE_SECONDS, 0.0
    try:
        go(tmp_path / "aside", tiny(), save_aside=True)
    finally:
        checkpointer.SAVE_SECONDS = saved
    go(tmp_path / "at-once", tiny())
    assert same(tmp_path / "aside", tmp_path / "at-once")
    newest = [sorted((tmp_path / n / "checkpoints").iterdir())[-1] for n in ("aside", "at-once")]
    state = [(path / "state-00000.safetensors").read_bytes() for path in newest]
    assert state[0] == state[1]


def test_a_loss_that_is_no_number_names_its_batch(tmp_path):
    r = tiny(mixup=0.0)
    r = replace(
        r, schedule=replace(r.schedule, rate=1000.0, warmup=0), optimizer=replace(r.optimizer, clip=0.0)
    )
    with pytest.raises(Diverged, match=r"step .*loss.*its batch: '.*' .* lower learning rate"):
        go(tmp_path, r)
    named = next(tmp_path.glob("batch-*.txt")).read_text().split()
    assert len(named) == 16 and set(named) <= set(open_splits(r)["train"].keys)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_model_learns_the_same(tmp_path):
    """In processes of their own, as a user's."""
    for name, extra in (("plain", []), ("compiled", ["--compile"])):
        command = [
            sys.executable,
            "-m",
            "vitkit",
            "finetune",
            "digits",
            "--out",
            tmp_path / name,
            *TINY,
            *extra,
        ]
        subprocess.run(
            [*map(str, command), "--device", "cpu", "--json"], check=True, stdout=subprocess.DEVNULL
        )
    losses = [
        [row["loss"] for row in rows(tmp_path / name) if "loss" in row] for name in ("plain", "compiled")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0][-1] != losses[0][0]
    plain, compiled = (vitkit.load(tmp_path / n / "model.safetensors") for n in ("plain", "compiled"))
    assert list(plain.state_dict()) == list(compiled.state_dict())  # no wrapper's name reaches a file


@pytest.mark.parametrize("verb", ["finetune", "pretrain"])
@pytest.mark.parametrize(
    "words",
    [
        ["--weights", "b16.npz", "--model", "ViT-Ti/16"],
        ["--weights", "b16.npz", "--set", "model=ViT-Ti/16"],
        ["--weights", "b16.npz", "--set", "model_options=depth=2"],
    ],
)
def test_weights_and_a_model_are_not_taken_together(verb, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b16.npz").write_bytes(b"")
    assert run(verb, "digits", *words, "--out", tmp_path / "run", "--device", "cpu") == 2
    messages = capsys.readouterr().err
    assert "--weights b16.npz and model" in messages
    assert messages.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_recipe_that_names_a_model_still_starts_from_weights(tmp_path, small, capsys):
    vitkit.save(small(), tmp_path / "m.safetensors")
    words = ["--recipe", "scratch", "--weights", tmp_path / "m.safetensors", "--image-size", 32, "--steps", 2]
    assert (
        run("finetune", "digits", *words, "--plan", "--json", "--device", "cpu", "--out", tmp_path / "r") == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["start"] == str(tmp_path / "m.safetensors") and plan["parameters"] < 10**5
