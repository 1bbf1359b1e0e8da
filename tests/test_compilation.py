"""--compile auto: whether a model is compiled, by the length of the run and the kind of device."""

import json
from dataclasses import replace

import pytest
import torch
from test_cli import run

from vitkit.cli.verbs import with_values
from vitkit.errors import Error
from vitkit.inference import builders
from vitkit.models.variants import configure, skeleton
from vitkit.planning import compilation
from vitkit.planning.compilation import CPU, GPU, choose_compilation, seconds_of_steps
from vitkit.recipes import RECIPES
from vitkit.runtime.runtime import Runtime

DEFAULT = RECIPES["finetune"]()
ON_CPU = Runtime("cpu", "fp32")


def model_of(name: str):
    return skeleton(configure(name, classes=10, image_size=224))


@pytest.fixture(autouse=True)
def has_compiler(monkeypatch):
    monkeypatch.setattr(builders, "compiler", lambda: "/usr/bin/g++")


def test_a_long_run_is_compiled_and_a_short_one_is_not():
    model = model_of("ViT-Ti/16")
    a_step = seconds_of_steps(DEFAULT, model, ON_CPU, 1, CPU)
    enough = CPU.seconds / CPU.share / a_step
    for steps, compiled in ((round(0.9 * enough), False), (round(1.1 * enough), True)):
        runtime, choice = choose_compilation("auto", DEFAULT, model, ON_CPU, steps)
        assert runtime == replace(ON_CPU, compile=compiled)
        assert choice.what == ("compiled" if compiled else "not compiled")


def test_the_time_follows_from_operations_alone():
    model, recipe = model_of("ViT-B/16"), replace(DEFAULT, batch=256)
    operations = 3 * 35.1e9 * 256  # ViT-B/16 at 224 pixels: 35.1 GFLOP for an image
    on_cpu = operations / (CPU.flops * torch.get_num_threads())
    assert seconds_of_steps(recipe, model, ON_CPU, 10, CPU) == pytest.approx(10 * on_cpu, rel=0.01)
    h200 = OnH200("cuda", "bf16")
    a_step = seconds_of_steps(recipe, model, h200, 1, GPU)
    assert a_step == pytest.approx(256 / 4143, rel=0.15)  # the measured images/s without compilation
    assert seconds_of_steps(recipe, model, OnOther("cuda", "bf16"), 1, GPU) is None
    assert choose_compilation("auto", recipe, model, OnOther("cuda", "bf16"), 10**9)[0].compile is False
    assert choose_compilation("auto", recipe, model, h200, 20_000)[0].compile
    assert not choose_compilation("auto", recipe, model, h200, 500)[0].compile


class OnH200(Runtime):
    def describe(self):
        return {"device": "NVIDIA H200", "threads": 1}


class OnOther(Runtime):
    def describe(self):
        return {"device": "NVIDIA GeForce RTX 9999", "threads": 1}


@pytest.mark.parametrize(
    ("recipe", "name", "runtime"),
    [
        (replace(DEFAULT, patch_sizes=(14, 16)), "ViT-Ti/16", ON_CPU),
        (replace(DEFAULT, train="head"), "ViT-Ti/16", ON_CPU),
        (RECIPES["mae"](), "ViT-Ti/16", ON_CPU),
        (DEFAULT, "BiT-R50x1", ON_CPU),
        (DEFAULT, "ViT-Ti/16", replace(ON_CPU, world=2)),
        (DEFAULT, "ViT-Ti/16", replace(ON_CPU, recompute=True)),
        (DEFAULT, "ViT-Ti/16", replace(ON_CPU, device="mps")),
    ],
    ids=["patch sizes", "frozen", "task", "resnet", "processes", "recompute", "device"],
)
def test_what_was_not_measured_is_not_compiled(recipe, name, runtime):
    chosen, choice = choose_compilation("auto", recipe, model_of(name), runtime, 10**7)
    assert not chosen.compile and choice.what == "not compiled"
    assert choose_compilation("auto", DEFAULT, model_of("ViT-Ti/16"), ON_CPU, 10**7)[0].compile  # a control


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(builders, "compiler", lambda: None)
    model = model_of("ViT-Ti/16")
    assert choose_compilation("auto", DEFAULT, model, ON_CPU, 10**7)[0].compile is False
    assert choose_compilation("no", DEFAULT, model, ON_CPU, 10**7) == (ON_CPU, None)
    with pytest.raises(Error) as caught:
        choose_compilation("yes", DEFAULT, model, ON_CPU, 10**7)
    assert compilation.without_compiler(ON_CPU)
    monkeypatch.setattr(compilation.shutil, "which", lambda name: name == "gcc")
    assert not compilation.without_compiler(replace(ON_CPU, device="cuda"))  # Triton needs C only
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    assert compilation.without_compiler(replace(ON_CPU, device="cuda"))
    assert caught.value.code == "device.unavailable"


def test_the_value_of_the_flag_may_be_left_out():
    words = ["finetune", "digits", "--compile", "--batch", "4", "--compile", "auto"]
    assert list(with_values(words)) == ["finetune", "digits", "--compile=yes", *words[3:]]
    assert list(with_values(["study", "run", "--compile"])) == ["study", "run", "--compile"]


def test_a_plan_says_why(tmp_path, capsys):
    words = ("digits", "--model", "ViT-Ti/4", "--image-size", 8, "--steps", 20, "--out", tmp_path / "run")
    assert run("finetune", *words, "--compile", "auto", "--plan", "--json") == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert choices[-1].startswith("not compiled: ")
