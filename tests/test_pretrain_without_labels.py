"""`vitkit pretrain DATA --task NAME`: its recipe, what is chosen by the images, and what is refused."""

import json
import zipfile

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from test_cli import run
from toy_task import registered_toy

import vitkit
from vitkit import listing
from vitkit.commands.finetune import finetuning, pretraining
from vitkit.data.sources.source import digits
from vitkit.options import Training
from vitkit.planning import pretraining_rules as rules
from vitkit.planning.augmentation_text import augmentation
from vitkit.planning.automatic import Circumstances, decide, fixed_fields
from vitkit.recipes import recipe
from vitkit.tasks.task import task_class

SMALL = ["--set", "model_options=width=32,depth=1,heads=2,hidden=32", "schedule.warmup=1", "evaluations=2"]


@pytest.fixture(scope="module", autouse=True)
def toy():
    with registered_toy():
        yield


def photos(folder, names, side=20):
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (side, side + 4, 3), dtype=np.uint8)).save(folder / name)
    return folder


def chosen(name, side, *, images=1000, gpu=False, **changes):
    """The recipe of `pretrain --task` for so many images with a shorter side of so many pixels."""

    class Sized(Circumstances):
        images = property(lambda self: count)
        side = property(lambda self: shorter)

    count, shorter, options = images, side, Training(task=name, **changes)
    fixed = frozenset(fixed_fields(options))
    known = Sized({}, fixed, "cuda" if gpu else "cpu", fixed_rate=options.lr is not None)
    return decide(pretraining("photos", options).recipe, rules.RULES, known, lambda choice: None)


@pytest.mark.parametrize(
    ("side", "gpu", "model", "pixels"),
    [
        (8, False, "ViT-Ti/4", 8), (32, True, "ViT-Ti/4", 32), (63, False, "ViT-Ti/4", 60),
        (96, False, "ViT-Ti/8", 96), (200, False, "ViT-Ti/16", 192), (500, False, "ViT-Ti/16", 224),
        (500, True, "ViT-S/16", 224),
    ],
)  # fmt: skip
def test_the_model_fits_the_images_and_the_device(side, gpu, model, pixels):
    r = chosen("toy", side, gpu=gpu)
    assert (r.model, r.image_size) == (model, (pixels, pixels))


def test_the_rate_follows_the_batch_as_the_task_says():
    published = recipe("toy")
    few = chosen("toy", 32)
    assert few.batch == 64 < published.batch
    assert few.schedule.rate == pytest.approx(published.schedule.rate * 64 / published.batch, rel=1e-2)
    assert chosen("toy", 32, lr=0.5).schedule.rate == 0.5
    masked = chosen("masked", 32)  # its source states no rate for a batch
    assert task_class("masked").rate_power == 0 and masked.schedule.rate == recipe("masked").schedule.rate


def test_the_length_is_the_recipes_epochs_and_bounded_on_a_cpu():
    epochs = recipe("toy").length.epochs
    assert chosen("toy", 32, gpu=True).length.steps == round(epochs * 1000 / 64)
    few, many = chosen("toy", 32), chosen("toy", 32, images=10**6)
    assert few.length.steps * few.batch <= rules.CPU_IMAGES + few.batch
    assert many.length.steps * many.batch == pytest.approx(2 * 10**6, rel=1e-3)
    assert few.schedule.warmup == few.length.steps // 10
    assert chosen("toy", 32, steps=40).length.steps == 40


def test_what_the_user_says_is_not_chosen():
    r = chosen("toy", 300, model="ViT-Ti/16", image_size="64", batch=8)
    assert (r.model, r.image_size, r.batch) == ("ViT-Ti/16", (64, 64), 8)
    r = chosen("toy", 100, model="ViT-S/32")
    assert r.image_size == (96, 96)  # whole patches


def test_conflicts_are_refused():
    with refused("request.conflict", "--task toy", "pretrain DATA --task toy", "--weights RUN"):
        finetuning("DATA", Training(task="toy"))
    with refused("request.conflict", "toy", "plain", "classify"):
        pretraining("DATA", Training(task="toy", recipe="plain"))
    with refused("request.conflict", "toy", "masked"):
        pretraining("DATA", Training(task="toy", set=("objective=masked",)))
    with refused("model.unsupported", "no-such-task"):
        pretraining("DATA", Training(task="no-such-task"))
    with refused("recipe.unknown", "--recipe deit-distilled"):
        pretraining("DATA", Training(task="distill_labels"))
    with refused("recipe.unknown", "multilabel", "--recipe"):
        pretraining("DATA", Training(task="multilabel"))
    assert finetuning("digits", Training(task="classify")).recipe.name == "finetune"
    assert pretraining("digits", Training(task="classify")).recipe.name == "pretrain"
    assert pretraining("digits", Training(task="masked", recipe="masked-imagenet")).recipe.auto == ()


def test_the_features_of_one_image_are_not_said_to_be_all_the_same():
    task, test = recipe("mae").task, {"loss": 1.5, "images": 1, "std": 0.0, "rank": 0.0, "split": "test"}
    assert "0.00" not in task.summary(test, "test images") + task.report_headline(test)[1]
    assert "std 0.00" in task.summary(test | {"images": 2}, "test images")


def test_the_help_names_the_tasks(capsys):
    assert "masked" in listing.tasks_without_labels() and "classify" not in listing.tasks_without_labels()
    assert run("pretrain", "--help") == 0
    assert "--task NAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    "names",
    [
        [f"{i}.png" for i in range(20)],
        [f"only/{i}.png" for i in range(20)],
        [f"train/{i}.png" for i in range(12)] + [f"val/{i}.png" for i in range(8)],
        [f"2020/may/{i}.png" for i in range(10)] + [f"2021/{i}.png" for i in range(10)],
        [f"a/{i}.png" for i in range(10)] + [f"{i}.png" for i in range(10)],
        [f"a/b/c/{i}.png" for i in range(10)] + [f"a/{i}.png" for i in range(10)],
    ],
)
@pytest.mark.slow
def test_images_in_any_folders_are_found(tmp_path, names):
    place = str(photos(tmp_path / "photos", names))
    plan = vitkit.pretrain(place, task="toy", plan=True, workers=0)
    assert sum(map(len, plan.splits.values())) == 20 and plan.recipe.image_size == (20, 20)
    archive = tmp_path / "photos.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in names:
            file.write(tmp_path / "photos" / name, name)
    plan = vitkit.pretrain(archive, task="toy", plan=True, workers=0)
    assert sum(map(len, plan.splits.values())) == 20


def test_a_run_without_labels_and_the_same_command_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = str(photos(tmp_path / "photos", [f"{i}.png" for i in range(40)]))
    words = ["pretrain", place, "--task", "toy", "--steps", "4", "--workers", "0", *SMALL, "--json"]
    assert run(*words) == 0
    result = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "runs/photos/recipe.json").read_text())
    assert stored["model"] == "ViT-Ti/4" and stored["image_size"] == [20, 20] and stored["objective"] == "toy"
    assert result["steps"] == 4 and result.get("features") is None  # nothing to measure them on
    assert run(*words) == 0
    assert json.loads(capsys.readouterr().out)["already_finished"]
    more = ["pretrain", place, "--task", "toy", "--more-steps", "2", "--workers", "0", "--json"]
    assert run(*more) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6


def test_the_plan_names_the_distortions_and_the_further_views():
    names = ("dino", "contrastive", "mae")
    words = {name: "; ".join(augmentation(recipe(name), digits())) for name in names}
    assert "random colours (80 %); grayscale (20 %); blur (100 %)" in words["dino"]
    assert "1 more view of 224x224 pixels (40 to 100 % of the area)" in words["dino"]
    assert "solarization (20 %)" in words["dino"]
    assert "8 more views of 96x96 pixels (5 to 40 % of the area)" in words["dino"]
    assert words["contrastive"].count("random colours (80 %)") == 2 and "colours" not in words["mae"]
