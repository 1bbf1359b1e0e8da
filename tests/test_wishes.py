"""How to extend vitkit (docs/contributing/architecture.md): the files exist; one registry entry is enough."""

import re
from pathlib import Path

import pytest
import torch

from vitkit import recipes
from vitkit.cli import verbs
from vitkit.inference import builders
from vitkit.inference.engines import choose_engine
from vitkit.inference.predict import logits
from vitkit.recipes.recipe import Recipe
from vitkit.studies import scale
from vitkit.tasks.classify import ClassificationLoss
from vitkit.training import optimizer
from vitkit.training.optimizer import OptimizerConfig
from vitkit.training.step import Stepper, TrainState

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs/contributing/architecture.md").read_text().partition("## How to extend vitkit")[2]
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TABLE, re.M)[1:]


@pytest.mark.parametrize(("wish", "files"), ROWS, ids=[wish for wish, _ in ROWS])
def test_every_file_that_a_wish_names_exists(wish, files):
    paths = [name for name in re.findall(r"`([\w/.]+)`", files) if "/" in name]
    assert paths, wish
    for name in paths:
        place = ROOT if name.startswith("tests/") else ROOT / "src/vitkit"
        assert (place / name).exists(), f"{wish}: {name}"


def test_there_are_ten_wishes():
    assert len(ROWS) == 10


class SignSGD(torch.optim.Optimizer):
    """Each parameter moves by the learning rate, whatever the size of its gradient."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


def test_an_optimizer_is_one_entry(monkeypatch, small):
    with pytest.raises(ValueError):
        OptimizerConfig(kind="sign")
    monkeypatch.setitem(optimizer.OPTIMIZERS, "sign", lambda groups, config, fused: SignSGD(groups))
    config = OptimizerConfig(kind="sign", clip=0.0)
    model = small(classes=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = TrainState.start(model, config)
    batch = {"image": torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8), "label": torch.tensor([0, 2])}
    Stepper(state, ClassificationLoss(classes=3), config, model)([batch], 0.5)
    moved = (dict(model.named_parameters())["head.bias"] - before["head.bias"]).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.5))


def test_an_engine_is_one_entry(monkeypatch, small, tmp_path):
    def build(request: builders.Request) -> builders.Run:
        return lambda images: logits(request.model, images)

    monkeypatch.setitem(builders.BUILDERS, "mine", builders.Builder(build))
    monkeypatch.setitem(builders.ENGINES, "mine", "fp32")
    model = small().eval()
    engine = choose_engine(model, "mine", batch=2, folder=tmp_path)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    assert engine.name == "mine" and torch.equal(engine(images), logits(model, images))


def test_a_wrong_engine_is_refused(monkeypatch, small, tmp_path):
    """The control: an entry is compared with torch like all others."""
    monkeypatch.setitem(
        builders.BUILDERS, "mine", builders.Builder(lambda request: lambda x: logits(request.model, x) + 1)
    )
    monkeypatch.setitem(builders.ENGINES, "mine", "fp32")
    with pytest.raises(ValueError) as refused:
        choose_engine(small().eval(), "mine", batch=2, folder=tmp_path)
    assert refused.value.code == "engine.failed"


def test_a_recipe_is_one_entry(monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "mine", lambda: Recipe(name="mine", batch=3))
    assert recipes.recipe("mine").batch == 3


def test_a_verb_is_one_entry(monkeypatch, capsys):
    def greet(name: str = "you") -> None:
        """Say hello."""
        print(f"hello {name}")

    monkeypatch.setitem(verbs.VERBS, "greet", greet)
    verbs.main(["greet", "--name", "ViT"])
    assert capsys.readouterr().out == "hello ViT\n"


def test_a_study_is_one_entry(monkeypatch):
    first = next(iter(scale.STUDIES.values()))
    monkeypatch.setitem(scale.STUDIES, "mine", first)
    assert scale.study("mine") is first


def test_models_know_no_device():
    """Kernels and their conditions are in ops; a model asks for no device, precision or export."""
    asks = re.compile(r"is_cuda|torch\.cuda|autocast|is_exporting|\.device\.type|bfloat16")
    texts = {path.name: path.read_text() for path in (ROOT / "src/vitkit/models").glob("*.py")}
    assert {name: match[0] for name, text in texts.items() if (match := asks.search(text))} == {}
