"""vitkit from Python: pictures and models in every form, short reprs, and types that mypy accepts."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from refusals import refused

import vitkit
from vitkit.data.decode import decode, from_pillow
from vitkit.io.files import sha256
from vitkit.metrics.classification import accuracy
from vitkit.models.resnet import ResNetConfig, StemConfig  # noqa: F401
from vitkit.models.vit import ViTConfig  # noqa: F401
from vitkit.recipes import RECIPES
from vitkit.recipes.recipe import Recipe

LABELS = ("tench", "church", "truck", "dog", "parachute")
SCRIPT = """
from pathlib import Path

import numpy as np
from PIL import Image

import vitkit
from vitkit.data.pictures import Picture


def best(picture: Path) -> tuple[str, float]:
    model = vitkit.load("runs/photos", image_size=224, labels=["a", "b"])
    answers: list[tuple[str, float]] = vitkit.predict(model, picture, top=3)
    return answers[0]


def many(folder: Path) -> list[list[tuple[str, float]]]:
    mixed: list[Picture] = [Image.new("RGB", (8, 8)), np.zeros((8, 8, 3), np.uint8), b"", "a.jpg", folder]
    return vitkit.predict("runs/photos", mixed) + vitkit.predict(folder, sorted(folder.glob("*.jpg")))


def train(folder: Path) -> float | None:
    run: vitkit.Run = vitkit.finetune(folder, steps=3, image_size=(32, 48), set={"mixup": 0.2}, track="wandb")
    plan: vitkit.Plan = vitkit.pretrain("digits", model="ViT-Ti/4", epochs=1.5, plan=True)
    tuned = vitkit.finetune("digits", weights=run, keep="best", protocol=True, seeds=2, progress=True)
    rows: np.ndarray = vitkit.embed(run.model, sorted(folder.glob("*.jpg")))
    done: vitkit.Exported = vitkit.export(tuned, folder / "m.onnx", precision="fp16", images=folder)
    print(plan.steps, plan.seconds, [choice.reason for choice in plan.choices], rows.shape, done.files)
    print(run.report.name, run.recipe.batch, run.folder / "x", vitkit.predict(run, "a.jpg"))
    metrics: vitkit.Metrics = vitkit.evaluate(run, folder, split="test", batch=8)
    return metrics.top1


def other() -> None:
    larger = vitkit.adapt(vitkit.build("ViT-Ti/16", seed=0, classes=10), image_size=384, classes=3)
    notes: tuple[str, ...] = vitkit.save(larger, "m.safetensors")
    vitkit.inspect(larger, "cat.jpg", target=2).save("look.png")
    features, labels = np.zeros((4, 2)), np.zeros(4, int)
    share: float = vitkit.fewshot(features, labels, features, labels)
    try:
        vitkit.load("m.safetensors")
    except (vitkit.WeightsError, vitkit.UntrustedCheckpoint) as error:
        print(error, notes, share, vitkit.__version__, larger.config.image_size)
"""


@pytest.fixture
def model(small):
    made = small()
    made.labels = LABELS
    return made


@pytest.fixture
def picture(tmp_path):
    """A JPEG that lies on its side, as cameras write them."""
    pixels = np.add.outer(np.arange(40), 3 * np.arange(60)).astype(np.uint8)
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(np.stack([pixels, pixels.T.reshape(40, 60), 255 - pixels], -1)).save(
        tmp_path / "a.jpg", exif=exif, quality=95
    )
    return tmp_path / "a.jpg"


def near(answers):
    return [(label, pytest.approx(probability, abs=1e-4)) for label, probability in answers]


def test_a_picture_may_be_a_path_its_bytes_a_pil_image_or_an_array(model, picture):
    want = vitkit.predict(model, picture, top=3)
    assert len(want) == 3 and want == sorted(want, key=lambda one: -one[1])
    upright = ImageOps.exif_transpose(Image.open(picture))
    forms = [str(picture), picture.read_bytes(), Image.open(picture), upright, np.array(upright)]
    assert upright.size == (40, 60)
    for form in forms:
        assert vitkit.predict(model, form, top=3) == near(want)
    assert vitkit.predict(model, forms, top=3) == [near(want)] * 5
    assert vitkit.predict(model, (form for form in forms[:2]), top=3) == [near(want)] * 2
    assert vitkit.predict(model, []) == []
    lying = vitkit.predict(model, np.array(Image.open(picture)), top=3)
    assert dict(lying) != dict(near(want))  # the control: which way is up changes the answer
    gray = np.arange(900, dtype=np.uint8).reshape(30, 30)
    assert vitkit.predict(model, gray) == near(vitkit.predict(model, Image.fromarray(gray)))


def test_more_pictures_than_a_batch_come_back_in_their_order(model):
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 255, (32, 32, 3), dtype=np.uint8) for _ in range(70)]
    assert vitkit.predict(model, pictures) == [near(vitkit.predict(model, one)) for one in pictures]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "I;16", "CMYK"])
def test_an_open_image_has_the_pixels_of_its_file(mode, tmp_path):
    rng = np.random.default_rng(1)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65535, (9, 7), dtype=np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 255, (9, 7, 4), dtype=np.uint8), "RGBA").convert(mode)
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    image.save(path)
    assert np.array_equal(from_pillow(Image.open(path)), decode(path.read_bytes()))


@pytest.mark.parametrize(
    "shape, dtype, remedy",
    [
        ((3, 32, 40), np.uint8, "transpose"),
        ((2, 32, 32, 3), np.uint8, "list"),
        ((32, 32, 4), np.uint8, "[..., :3]"),
        ((32, 32, 1), np.uint8, "[..., 0]"),
        ((32, 32, 3), np.float32, "255"),
        ((32, 32, 3), np.int64, "astype"),
        ((0, 32, 3), np.uint8, ""),
        ((32,), np.uint8, ""),
    ],
)
def test_an_array_that_is_no_picture_is_refused_with_what_to_do(model, shape, dtype, remedy):
    with refused("request.value", shape, np.dtype(dtype).name, remedy):
        vitkit.predict(model, np.zeros(shape, dtype))


def test_what_is_no_picture_or_model_is_named(model, tmp_path, picture):
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    with refused("image.unreadable", "broken.jpg"):
        vitkit.predict(model, [picture, tmp_path / "broken.jpg"])
    with refused("image.unreadable", "none.jpg"):
        vitkit.predict(model, "none.jpg")
    with refused("request.value", tmp_path, "*.jpg"):
        vitkit.predict(model, tmp_path)
    with refused("request.value", "Tensor") as caught:
        vitkit.predict(model, [torch.zeros(3, 32, 32)])
    assert isinstance(caught.value, TypeError)
    with refused("request.value", "Linear"):
        vitkit.predict(torch.nn.Linear(2, 2), picture)
    with refused("request.value", "top", "not 0"):
        vitkit.predict(model, picture, top=0)
    with refused("weights.not-found", "nowhere"):
        vitkit.predict("nowhere", picture)


def test_a_model_may_be_a_file_a_run_folder_or_a_published_name(model, picture, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text("{}")
    vitkit.save(model, run / "model.safetensors")
    want = near(vitkit.predict(model, picture))
    assert vitkit.predict(run / "model.safetensors", picture) == want
    assert vitkit.predict(str(run), picture) == want and vitkit.predict(run, [picture]) == [want]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched = tmp_path / "vitkit" / "ViT-B_16.augreg-i21k-i1k-384.npz"  # as if it had been
    fetched.parent.mkdir()
    fetched.write_bytes((run / "model.safetensors").read_bytes())
    Path(f"{fetched}.sha256").write_text(sha256(fetched))
    assert vitkit.predict("ViT-B/16.augreg-i21k-i1k-384", picture) == want


def test_reprs_are_short_and_configurations_can_be_read_back(small_hybrid, small_resnet, model, picture):
    for made in (model, small_hybrid(), small_resnet(), vitkit.build("ViT-B/16", head="gap")):
        count = sum(p.numel() for p in made.parameters())
        assert f"{count:,} parameters" in repr(made) and "\n" not in repr(made) and len(repr(made)) < 400
        assert str(made.config.image_size) in repr(made) and len(repr(made.config)) < 350
        assert eval(repr(made.config)) == made.config
    assert "Linear(in_features=32" in repr(model.encoder)  # the parts show themselves as torch has them
    look = vitkit.inspect(model, picture)
    assert (
        "rollout" in repr(look) and "%" in repr(look) and len(repr(look)) < 400 and "array(" not in repr(look)
    )
    recipe = RECIPES["pets"]()
    assert "name='pets'" in repr(recipe) and len(repr(recipe)) < 900
    assert repr(Recipe(name="a", batch=7)) == "Recipe(name='a', batch=7)"
    batch = {"image": torch.zeros(2, 3, 32, 32), "label": torch.tensor([0, 1]), "index": torch.arange(2)}
    assert "tensor" not in repr(accuracy(lambda images: torch.zeros(2, 5), [batch], 5))


def test_the_package_says_that_it_is_typed():
    assert (Path(vitkit.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict_against_the_installed_package(tmp_path):
    venv.create(tmp_path / "env", symlinks=True)
    [packages] = (tmp_path / "env" / "lib").glob("python*/site-packages")
    ours, others = Path(vitkit.__file__).parent.parent, Path(torch.__file__).parent.parent
    (packages / "paths.pth").write_text(f"{ours}\n{others}\n")
    (tmp_path / "user.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(
        "import vitkit\nanswer: int = vitkit.predict('m', 'a.jpg')\nvitkit.predict('m', 3)\n"
        "vitkit.finetune('d', stepz=3)\nvitkit.finetune('d', steps='3')\nvitkit.evaluate('m')\n"
        "run: vitkit.Run = vitkit.finetune('d', plan=True)\nvitkit.export('m', 'm.onnx', precision='fp7')\n"
    )
    words = ["--strict", "--python-executable", tmp_path / "env" / "bin" / "python", "user.py", "wrong.py"]
    env = {k: v for k, v in os.environ.items() if k != "MYPYPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    result = [line for line in done.stdout.splitlines() if ": error:" in line]
    places = dict.fromkeys(tuple(line.split(":")[:2]) for line in result)
    assert list(places) == [("wrong.py", str(number)) for number in range(2, 9)], done.stdout
