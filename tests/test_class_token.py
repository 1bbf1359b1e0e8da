"""A head that reads no class token: a recipe's model has none, and runs of before keep the one they had."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refused
from test_cli import run as vitkit_command
from test_experiment import go, tiny
from test_runs_of_0_1 import FILES

import vitkit
from vitkit.models.variants import configure, skeleton, with_options
from vitkit.recipes import recipe
from vitkit.recipes.recipe import VERSION, as_meant, from_json, override, read_recipe, to_json, to_table
from vitkit.recipes.values import ModelOptions
from vitkit.runs import build
from vitkit.runs.folder import changed_flags, claim
from vitkit.runs.protocol import Protocol
from vitkit.runs.run import RunOptions
from vitkit.runtime.runtime import Runtime
from vitkit.studies.scale import STUDIES
from vitkit.studies.setting import Setting
from vitkit.studies.study import Plan
from vitkit.studies.study import from_json as plan_from_json
from vitkit.studies.study import to_json as plan_to_json
from vitkit.tasks import task

AUGREG = tuple(f"augreg-i21k.ViT-{size}" for size in ("Ti/16", "S/32", "S/16", "B/32", "B/16", "L/16"))
POOLED = ("width=32", "depth=2", "heads=2", "hidden=32", "head=gap")
WORDS = [
    "--model", "ViT-Ti/4", "--image-size", "8", "--batch", "16", "--workers", "0", "--lr", "0.003",
    "--set", "subset=100", "evaluations=0", "schedule.warmup=1",
    "model_options=width=32,depth=1,heads=2,hidden=32,head=gap",
]  # fmt: skip


def aged(folder: Path, version: int = 2) -> None:
    """A run folder as version 2 wrote it for a command that names head=gap alone."""
    table = to_table(read_recipe(folder / "recipe.json"), version)
    table["model_options"] = dict(table["model_options"])
    assert table["model_options"].pop("class_token")
    (folder / "recipe.json").write_text(json.dumps(table))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return vitkit.load(folder / "model.safetensors").state_dict()


@pytest.mark.parametrize("name", ["plain", *AUGREG])
def test_a_fresh_model_of_a_recipe_is_the_one_that_build_makes(name, monkeypatch):
    monkeypatch.setattr(task, "fresh", lambda config, seed: skeleton(config))  # large ones take no memory
    r = replace(recipe(name), data="digits")
    model = build.build_model(r, build.open_splits(r)["train"])
    more = {"positions": "sincos2d", "representation": 384} if name == "plain" else {}
    assert model.config == configure(r.model, classes=10, image_size=r.image_size, head="gap", **more)
    assert model.class_token is None and not model.config.class_token


def test_a_run_of_a_pooled_recipe_has_no_class_token(tmp_path):
    r = tiny(model_options=POOLED, dropout=0.0)
    go(tmp_path, r)
    result = vitkit.load(tmp_path)
    sizes = {"width": 32, "depth": 2, "heads": 2, "hidden": 32}
    made = vitkit.build("ViT-Ti/4", classes=10, image_size=8, head="gap", **sizes)
    assert result.config == made.config and result.class_token is None
    assert json.loads((tmp_path / "recipe.json").read_text())["version"] == VERSION == 3
    assert read_recipe(tmp_path / "recipe.json") == r and "class_token" not in r.model_options


def test_the_arms_of_the_study_of_heads_have_a_class_token_only_where_it_is_read():
    for scale in ("mini", "paper"):
        s = Setting(data=("digits",), downstream="digits", seeds=1, images=1000, scale=scale)
        for one in STUDIES["heads"].make(s):
            r, options = one.recipe, dict(one.recipe.model_options)
            made = with_options(configure(r.model, image_size=r.image_size), r.model_options)
            assert made == configure(r.model, image_size=r.image_size, **options)
            assert made.class_token == (one.factors["head"] == "token")


def test_what_is_said_of_the_class_token_is_what_is_built():
    config = configure("ViT-Ti/4")
    for options, has in (
        ({"head": "gap"}, False), ({"head": "map"}, False), ({"head": "token"}, True), ({}, True),
        ({"head": "gap", "class_token": True}, True), ({"head": "gap", "class_token": None}, False),
    ):  # fmt: skip
        assert with_options(config, options).class_token is has, options


@pytest.mark.parametrize(
    ("model", "options", "read"),
    [
        ("ViT-S/16", {"head": "gap"}, {"head": "gap", "class_token": True}),
        ("ViT-S/16", {"head": "map"}, {"head": "map", "class_token": True}),
        ("R50+ViT-B/16", {"head": "gap"}, {"head": "gap", "class_token": True}),
        ("ViT-S/16", {"head": "token"}, {"head": "token"}),
        ("ViT-S/16", {"depth": 2}, {"depth": 2}),
        ("ViT-S/16", {"head": "gap", "class_token": False}, {"head": "gap", "class_token": False}),
        ("ViT-S/16", {"head": "gap", "class_token": None}, {"head": "gap", "class_token": None}),
        ("Axial-ViT-B/32", {"head": "map"}, {"head": "map"}),
    ],
)
def test_files_of_earlier_versions_mean_what_they_meant(model, options, read):
    today = replace(recipe("scratch"), model=model, model_options=ModelOptions(options))
    assert from_json(to_json(today)) == today
    second = {**to_table(today), "version": 2}
    first = {name: one for name, one in second.items() if name not in ("version", "auto")}
    first["model_options"] = [f"{name}={one}" for name, one in options.items()]
    for table in (first, second):
        old = from_json(json.dumps(table))
        assert old.model_options == read and from_json(to_json(old)) == old
        built = with_options(configure(model), old.model_options)
        assert built == replace(configure(model), **options), "as those versions built it"


@pytest.fixture
def kept(tmp_path, monkeypatch, capsys):
    """A finished run with a class token that nobody reads, as if version 2 had left it."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "digits"
    words = [*WORDS[:-1], f"{WORDS[-1]},class_token=true"]
    assert vitkit_command("finetune", "digits", "--steps", 4, *words) == 0
    aged(out)
    capsys.readouterr()
    return out


def test_the_same_command_finds_the_run_of_before_and_trains_it_on(kept, capsys):
    before = (kept / "recipe.json").read_text()
    assert vitkit_command("finetune", "digits", "--steps", 4, *WORDS) == 0
    assert (kept / "recipe.json").read_text() == before and not kept.with_name("digits-2").exists()
    assert vitkit_command("finetune", "digits", "--more-steps", 2, *WORDS) == 0
    assert "class_token" in weights(kept) and json.loads((kept / "result.json").read_text())["steps"] == 6
    assert vitkit_command("finetune", "digits", "--steps", 4, *WORDS) == 0
    assert json.loads((kept / "recipe.json").read_text())["version"] == 2, "though it was written again"
    assert not kept.with_name("digits-2").exists()


def test_a_class_token_that_the_command_denies_is_another_run(kept, capsys):
    words = [*WORDS[:-1], f"{WORDS[-1]},class_token=false"]
    assert vitkit_command("finetune", "digits", "--steps", 4, *words, "--out", kept) == 2
    assert "class_token=true" in capsys.readouterr().err
    assert vitkit_command("finetune", "digits", "--steps", 4, *words) == 0
    assert "class_token" not in weights(kept.with_name("digits-2"))


def test_a_class_token_that_was_asked_for_today_is_another_run(kept):
    """The control: what a file of today says is not excused by age."""
    path = kept / "recipe.json"
    path.write_text(to_json(read_recipe(path)))
    assert vitkit_command("finetune", "digits", "--steps", 4, *WORDS) == 0
    assert "class_token" in weights(kept) and "class_token" not in weights(kept.with_name("digits-2"))


def test_a_start_of_before_that_came_to_nothing_binds_nobody(tmp_path):
    old = override(tiny(model_options=POOLED), ["model.class_token=true"])
    (tmp_path / "recipe.json").write_text(to_json(old))
    aged(tmp_path)
    new = tiny(model_options=POOLED)
    assert claim(tmp_path, new) == new == read_recipe(tmp_path / "recipe.json")


def test_a_recipe_in_python_goes_on_with_the_run_of_before(tmp_path):
    """To the same bits as the run whose recipe says it."""
    messages = tiny(model_options=(*POOLED, "class_token=true"), patience=0, keep="last")
    go(tmp_path / "straight", messages)
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    for name in ("result.json", "model.safetensors"):
        (tmp_path / "again" / name).unlink()
    aged(tmp_path / "again")
    unsaid = tiny(model_options=POOLED, patience=0, keep="last")
    assert go(tmp_path / "again", unsaid).steps == 12
    one, other = weights(tmp_path / "straight"), weights(tmp_path / "again")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with refused("run.changed", "class_token=true"):
        go(tmp_path / "straight", unsaid)


def test_all_runs_of_a_protocol_have_the_class_token_of_the_first(tmp_path):
    going = {"evaluations": 0, "patience": 0, "keep": "auto"}
    messages = tiny(model_options=(*POOLED, "class_token=true"), report_on="val", **going)
    go(tmp_path / "rate-0.01", messages)
    aged(tmp_path / "rate-0.01")
    protocol = Protocol(tmp_path, Runtime(), RunOptions(quiet=True, workers=0), lambda text: None)
    before = (tmp_path / "rate-0.01" / "result.json").stat().st_mtime_ns
    protocol.follow({"rate-0.01": tiny(model_options=POOLED, **going)}, seeds=1)
    assert (tmp_path / "rate-0.01" / "result.json").stat().st_mtime_ns == before, "it was only read"
    assert "class_token" in weights(tmp_path / "seed-0")


def test_a_plan_of_before_keeps_its_class_tokens_and_one_of_today_has_none():
    s = Setting(data=("digits",), downstream="digits", seeds=1, images=1000)
    new = Plan(study="heads", asked={}, chosen={}, trials=tuple(STUDIES["heads"].make(s)))
    assert plan_from_json(plan_to_json(new)) == new
    table = json.loads(plan_to_json(new))
    for one in table["trials"]:
        assert one["recipe"].pop("version") == VERSION
    old = plan_from_json(json.dumps(table))
    for before, after in zip(old.trials, new.trials, strict=True):
        assert before.recipe == as_meant(after.recipe, 2)
        assert before.recipe.model_options.get("class_token") == (
            None if after.factors["head"] == "token" else True
        )
        run = json.loads(to_json(after.recipe)) | {"version": 2}  # as the folder of that trial has it
        assert changed_flags(from_json(json.dumps(run)), before.recipe) == []


def test_the_recipes_of_compared_runs_have_a_version_too():
    stored = json.loads((FILES / "plans.json").read_text())["optimizer"]
    again = json.loads(plan_to_json(plan_from_json(json.dumps(stored))))
    compared = [one for trial in again["trials"] for one in trial["compared"].values()]
    assert compared and all(one["version"] == VERSION for one in compared)
