"""Typed recipes: the model's options, names by groups, versions of files, and what may be chosen."""

import copy
import json
import pickle
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from refusals import refused

import vitkit
from vitkit.data.sources.source import digits
from vitkit.flat_recipe import settings_of
from vitkit.models.variants import configure, with_options
from vitkit.options import Training
from vitkit.planning.automatic import RECIPE_RULES, Circumstances, choose_stopping, decide, fixed_fields
from vitkit.planning.plan import optimizer
from vitkit.recipes import RECIPES, recipe
from vitkit.recipes.recipe import (
    AUTO,
    VERSION,
    Recipe,
    from_json,
    from_table,
    override,
    read_recipe,
    settings,
    to_json,
)
from vitkit.recipes.values import GROUPED, SYNONYMS, ModelOptions, field_of, own_name
from vitkit.tasks.task import task_class


def test_model_options_are_a_frozen_typed_value():
    options = ModelOptions(head="gap", depth=4)
    assert options == {"depth": 4, "head": "gap"} and hash(options) == hash(ModelOptions(depth=4, head="gap"))
    for one in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert one == options and type(one) is ModelOptions
    with pytest.raises(TypeError, match="immutable"):
        options["depth"] = 5
    with pytest.raises(TypeError, match="immutable"):
        options.update(depth=5)
    assert options.having(depth=5) == {"head": "gap", "depth": 5} and options["depth"] == 4
    assert options.without("head") == {"depth": 4} and type(options.without("head")) is ModelOptions


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("head=gap,depth=4", {"head": "gap", "depth": 4}),
        ("blocks=1,2,3,width=32", {"blocks": (1, 2, 3), "width": 32}),
        ("stem.blocks=1,1,stem.width=32", {"stem.blocks": (1, 1), "stem.width": 32}),
        ("class_token=none,qkv_bias=no", {"class_token": None, "qkv_bias": False}),
        ("norm_eps=1e-5", {"norm_eps": 1e-5}),
        ("depth=2,depth=3", {"depth": 3}),
        ("stem=none", {"stem": None}),
    ],
)  # fmt: skip
def test_model_options_are_read_from_the_command_line_and_written_as_it_takes_them(text, options):
    r = override(recipe("scratch"), [f"model_options={text}"])
    assert r.model_options == options
    assert override(recipe("scratch"), [f"model_options={r.model_options}"]) == r
    assert from_json(to_json(r)) == r and hash(from_json(to_json(r))) == hash(r)


def test_texts_of_0_1_are_still_taken_in_python_and_in_files():
    texts = ("width=32", "blocks=1,1", "stem.width=32")
    typed = {"width": 32, "blocks": (1, 1), "stem.width": 32}
    assert Recipe(name="x", model_options=texts).model_options == typed
    assert from_table({"name": "x", "model_options": list(texts)}).model_options == typed
    nested = from_table({"name": "x", "model_options": {"stem": {"width": 32}}})
    assert nested.model_options == {"stem.width": 32}
    with refused("recipe.value", "model_options", "3"):
        from_table({"name": "x", "model_options": 3})


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ("model.hed=gap", ("recipe.unknown-field", "model.hed", "model.head")),
        ("model_options=hed=gap", ("recipe.unknown-field", "model.hed", "model.head")),
        ("model.stem.widht=3", ("recipe.unknown-field", "model.stem.widht", "model.stem.width")),
        ("model.depth=many", ("recipe.value", "model.depth", "'many'", "a whole number")),
        ("model.stem=3", ("recipe.value", "model.stem", "'3'")),
        ("model_options=depth", ("recipe.value", "'depth'", "field=value")),
        ("warmup=5", ("recipe.unknown-field", "'warmup'", "schedule.warmup")),
        ("weight_decay=5", ("recipe.unknown-field", "'weight_decay'", "optimizer.weight_decay")),
        ("mixpu=0.2", ("recipe.unknown-field", "'mixpu'", "mixup")),
        ("augment.mixpu=0.2", ("recipe.unknown-field", "augment.mixpu", "augment.mixup")),
        ("evaluaton.val=0.2", ("recipe.unknown-field", "evaluaton.val", "evaluation.val")),
        ("batch.size=3", ("recipe.unknown-field", "batch.size")),
        ("lr=0.1", ("recipe.unknown-field", "'lr'", "schedule.rate?")),
        ("optimizer.lr=0.1", ("recipe.unknown-field", "'optimizer.lr'", "schedule.rate?")),
        ("drop_path=0.1", ("recipe.unknown-field", "'drop_path'", "stochastic_depth?")),
        ("augment.mixup=x", ("recipe.value", "mixup", "'x'", "a number")),
        ("auto=colour", ("recipe.value", "auto", "'colour'", "weights")),
    ],
)
def test_a_mistake_in_a_name_or_a_value_names_the_nearest(change, refusal):
    with refused(*refusal):
        override(recipe("scratch"), [change])


def test_an_unknown_task_is_answered_with_the_nearest_and_the_plan_names_adamw():
    for name, nearest in (("MAE", "mae?"), ("instance", "instances?")):
        with refused("model.unsupported", repr(name), nearest):
            task_class(name)
    assert [optimizer(recipe(name)) for name in ("finetune", "lora", "table4")] == [
        "AdamW, weight decay 0.05", "Adam", "SGD, momentum 0.9"
    ]  # fmt: skip


def test_names_of_other_tools_are_no_fields_and_lead_to_fields():
    known = {*GROUPED, *settings(recipe("finetune"))}
    assert not known.intersection(SYNONYMS) and known.issuperset(SYNONYMS.values())
    other = override(recipe("table4"), ["optimizer.kind=AdamW", "crop=center", "evaluation.crop=center"])
    assert (other.optimizer.kind, other.crop, other.evaluation_crop) == ("adam", "centre", "centre")


def test_options_change_the_fields_that_they_name_and_a_head_its_class_token():
    vit, hybrid = configure("ViT-B/16"), configure("R50+ViT-B/16")
    assert with_options(vit, {}) == vit
    assert with_options(vit, ModelOptions(depth=2)) == replace(vit, depth=2)
    assert with_options(vit, ModelOptions(head="gap")) == replace(vit, head="gap", class_token=False)
    assert with_options(hybrid, {"stem.width": 32}).stem == replace(hybrid.stem, width=32)
    for config, options, nearest in (
        (vit, {"stem.width": 32}, "width"), (configure("BiT-R50x1"), {"head": "gap"}, "heads"),
    ):  # fmt: skip
        with refused("model.config", *options, nearest):
            with_options(config, options)


def test_every_field_has_a_name_by_its_group_and_only_one():
    own = {field.name for field in fields(Recipe)}
    assert {name.partition(".")[0] for name in GROUPED.values()} <= own
    assert len(set(GROUPED.values())) == len(GROUPED)
    top = {"name", "about", "auto", "seed", "schedule", "optimizer"}
    later = {
        "objective",
        "task_options",
        "loss",
        "label_smoothing",
        "class_weights",
        "dropout",
        "stochastic_depth",
    }
    later |= {"train", "lora"}
    assert own - {name.partition(".")[0] for name in GROUPED.values()} == top | later


def test_names_by_groups_are_the_same_fields():
    changes = {
        "data.batch": "64", "data.source": "photos", "augment.mixup": "0.2", "evaluation.val": "0.2",
        "evaluation.count": "3", "schedule.epochs": "7", "schedule.warmup": "2", "model.name": "ViT-Ti/4",
        "model.head": "gap", "model.stem.width": "64", "optimizer.weight_decay": "0.3",
    }  # fmt: skip
    grouped = override(recipe("scratch"), [f"{name}={text}" for name, text in changes.items()])
    flat = override(recipe("scratch"), [f"{own_name(name)}={text}" for name, text in changes.items()])
    assert grouped == flat and (grouped.batch, grouped.data, grouped.mixup) == (64, "photos", 0.2)
    assert (grouped.val, grouped.evaluations, grouped.length.epochs, grouped.model) == (0.2, 3, 7, "ViT-Ti/4")
    assert grouped.model_options == {"head": "gap", "stem.width": 64}
    assert override(recipe("plain"), ["model.depth=2"]).model_options == {
        "head": "gap", "positions": "sincos2d", "representation": 384, "depth": 2,
    }  # fmt: skip
    whole = override(recipe("plain"), ["model_options=width=32", "model.depth=2"])
    assert whole.model_options == {"width": 32, "depth": 2}


def test_a_field_that_is_set_by_its_group_is_not_chosen_for_the_user():
    words = ("data.batch=8", "model.head=gap", "schedule.steps=5", "optimizer.clip=1", "augment.flip=no")
    assert fixed_fields(Training(set=words)) == {"batch", "model_options", "length", "optimizer", "flip"}
    assert field_of("data.image_size = 64") == "image_size"


def test_a_file_may_have_names_by_groups():
    table = {
        "version": VERSION,
        "name": "mine", "data": {"source": "photos", "batch": 8}, "augment": {"mixup": 0.1},
        "model": {"name": "ViT-Ti/4", "head": "gap"}, "schedule": {"rate": 0.1, "steps": 30},
        "evaluation.val": 0.2,
    }  # fmt: skip
    r = from_table(table)
    assert (r.data, r.batch, r.mixup, r.model, r.val) == ("photos", 8, 0.1, "ViT-Ti/4", 0.2)
    assert r.model_options == {"head": "gap"} and r.schedule.rate == 0.1 and r.length.steps == 30
    for change, refusal in (
        ({"batch": 4}, ("recipe.format", "batch")),
        ({"augment": {"mixpu": 1}}, ("recipe.unknown-field", "augment.mixpu", "augment.mixup")),
        ({"colour": 3}, ("recipe.unknown-field", "colour")),
        ({"schedule.speed": 3}, ("recipe.unknown-field", "schedule.speed")),
        ({"model": 3}, ("recipe.value", "model", "3")),
        ({"model_options": {"depth": 3}, "model.depth": 3}, ("recipe.format", "model.depth")),
    ):
        with refused(*refusal):
            from_table(table | change)


def test_a_stored_recipe_has_a_version_and_a_newer_one_is_refused(tmp_path):
    stored = json.loads(to_json(recipe("plain")))
    assert stored["version"] == VERSION == 3
    assert stored["model_options"] == {"head": "gap", "positions": "sincos2d", "representation": 384}
    for version in (4, 0, "2", None, True):
        (tmp_path / "recipe.json").write_text(json.dumps(stored | {"version": version}))
        with refused("recipe.format", tmp_path / "recipe.json", repr(version)):
            read_recipe(tmp_path / "recipe.json")


def test_no_recipe_of_such_a_name():
    with refused("recipe.unknown", "'finetun'", "finetune"):
        recipe("finetun")


def test_what_may_be_chosen_is_a_field_and_no_part_of_what_a_run_is():
    expected = dict.fromkeys(("imagenet", "cifar10", "cifar100", "pets", "flowers", "vtab"), ("weights",))
    expected |= {"table2.ViT-L/16": ("weights",), "table2.ViT-H/14": ("weights",)}
    expected |= {"bit": ("weights", "hyperrule"), "scratch": ("weights", "keep", "patience")}
    expected["finetune"] = ("weights", "image_size", "rules", "keep")
    expected |= dict.fromkeys(("segment", "detect", "rf-detr", "instances"), ("weights", "dense"))
    for name in ("table4", "lora"):
        expected[name] = ("weights", "image_size", "batch", "length", "keep", "patience")
    assert {name: r.auto for name in RECIPES if (r := recipe(name)).auto} == expected
    assert {name for names in expected.values() for name in names} == set(AUTO) - {"pretraining"}
    chosen = replace(recipe("finetune"), auto=())
    assert chosen == recipe("finetune") and hash(chosen) == hash(recipe("finetune"))
    assert settings(chosen) == settings(recipe("finetune")) and "auto" not in settings(chosen)
    assert from_json(to_json(recipe("bit"))).auto == ("weights", "hyperrule")


def test_settings_are_the_same_of_a_recipe_and_of_its_files_of_both_versions():
    r = override(recipe("plain"), ["model.blocks=1,2", "model.class_token=none"])
    now = json.loads(to_json(r))
    options = ["head=gap", "positions=sincos2d", "representation=384", "blocks=1,2", "class_token=none"]
    before = {name: one for name, one in now.items() if name not in ("version", "auto")}
    before["model_options"] = options
    listed = json.loads(json.dumps(settings(r)))
    assert settings_of(now) == settings_of(before) == listed
    assert listed["model_options"] == options
    assert settings_of({"name": 3, "model_options": 4}) == {"name": 3, "model_options": 4}
    assert json.loads(json.dumps(asdict(r)))["model_options"]["blocks"] == [1, 2]


def test_the_documentation_names_every_field_by_its_group():
    text = (Path(__file__).parent.parent / "docs/research/recipes.md").read_text()
    names = [name for name, own in GROUPED.items() if not own.startswith("model_options.")]
    for part in ("schedule", "optimizer"):
        names += [f"{part}.{field.name}" for field in fields(getattr(Recipe, part))]
    assert [name for name in [*names, *AUTO] if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", ["finetune", "scratch", "bit", "cifar10", "pretrain"])
def test_choices_follow_auto_and_not_the_name(name):
    known = Circumstances({"train": digits(), "val": digits()}, frozenset({"seed"}))
    rules, notes = (*RECIPE_RULES, choose_stopping), []
    chosen = decide(recipe(name), rules, known, notes.append)
    renamed = decide(replace(recipe(name), name="mine"), rules, known, notes.append)
    assert replace(renamed, name=name) == chosen
    assert (chosen == recipe(name)) == (name == "pretrain"), "a recipe that leaves nothing open stays"
    assert decide(replace(recipe(name), auto=()), rules, known, notes.append) == recipe(name)


def test_no_code_asks_for_the_name_of_a_recipe():
    asks = re.compile(r"\b(recipe|r)\.name (==|!=|in|not in)\s|\.name\.(startswith|partition)")
    source = Path(vitkit.__file__).parent
    lines = [line for path in source.rglob("*.py") for line in path.read_text().splitlines()]
    assert [line for line in lines if asks.search(line) and "recipe" in line] == []
