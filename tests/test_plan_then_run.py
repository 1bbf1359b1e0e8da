"""Plan, then run: whatever a command does with its data, that is opened once and its weights loaded once."""

from collections import Counter
from pathlib import Path

import pytest
from refusals import refused
from test_again import paint
from test_cli import run

import vitkit
from vitkit.commands import finetune
from vitkit.data.sources import folders
from vitkit.datasets import opening
from vitkit.io import files as hashing
from vitkit.options import Training
from vitkit.planning.plan import machine_for, plan
from vitkit.weights import load as loading
from vitkit.weights import published
from vitkit.weights.published import PUBLISHED, cache_path

DEFAULT = PUBLISHED["ViT-Ti/16.augreg-i21k"]
WORDS = ("finetune", "pics", "--image-size", 16, "--steps", 4, "--workers", 0, "--device", "cpu")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Pictures, and the weights that are chosen by default, as if they had been fetched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paint(tmp_path / "pics", 12)
    small = vitkit.build("ViT-Ti/16", classes=3, image_size=32, depth=1, width=32, heads=2, hidden=32)
    cache_path(DEFAULT).parent.mkdir(parents=True)
    vitkit.save(small, cache_path(DEFAULT).with_suffix(".npz"))
    Path(f"{cache_path(DEFAULT)}.sha256").write_text(hashing.sha256(cache_path(DEFAULT)))
    return tmp_path


@pytest.fixture
def counts(home, monkeypatch) -> Counter[str]:
    """How often the data was really opened, and the starting weights really read and hashed."""
    seen: Counter[str] = Counter()

    def counted(module, name: str, what: str, place: Path) -> None:
        real = getattr(module, name)

        def call(path, *args, **kwargs):
            seen[what] += Path(path).resolve() == place.resolve()
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(folders, "open_folder", "opened", home / "pics")
    counted(loading, "open_weights", "loaded", cache_path(DEFAULT))
    counted(published, "sha256", "hashed", cache_path(DEFAULT))
    return seen


ONCE = {"opened": 1, "loaded": 1, "hashed": 1}


def after(counts: Counter[str], *words) -> dict[str, int]:
    """What one command did."""
    counts.clear()
    assert run(*words) == 0
    return {what: number for what, number in counts.items() if number}


def test_data_and_weights_are_opened_and_hashed_once(counts):
    """On every way through the command: each goes on where the one before has ended."""
    assert after(counts, *WORDS, "--plan") == ONCE and not Path("runs").exists()
    assert after(counts, *WORDS) == ONCE, "the first start"
    assert after(counts, *WORDS) == {"opened": 1}, "a finished run needs no weights"
    for name in ("result.json", "model.safetensors"):
        Path("runs/pics", name).unlink()  # as if it was stopped after its last step
    assert after(counts, *WORDS) == ONCE, "resumed"
    assert after(counts, *WORDS, "--more-steps", 2) == ONCE, "trained on"
    assert after(counts, *WORDS, "--lr", 0.02) == ONCE, "other options, in runs/pics-2"
    assert Path("runs/pics-2/result.json").exists()
    assert after(counts, *WORDS, "--lr", 0.02, "--plan") == ONCE, "the plan of a finished run"


def test_the_counts_notice_a_second_time(counts):
    """The control: what the test above would see."""
    for _ in range(2):
        vitkit.load(DEFAULT.name)
        opening.open_data("pics")
    assert counts == {"opened": 2, "loaded": 2, "hashed": 2}


def test_data_is_opened_once_where_images_of_other_sets_are_taken_out(counts, home):
    paint(home / "others", 3, seed=5)
    assert after(counts, *WORDS, "--against", "others") == ONCE


def test_a_plan_is_a_value_that_is_run_once(home):
    options = Training(image_size="16", batch=8, steps=3, workers=0, device="cpu")
    with machine_for(options, progress=False) as machine:
        made = plan(finetune.finetuning("pics", options), machine, quiet=True)
        assert (made.steps, made.steps_left, made.runs, made.state.action) == (3, 3, 1, "create")
        assert made.out == Path("runs/pics") and not made.out.exists(), "planning writes nothing"
        assert made.recipe.weights == DEFAULT.name and made.recipe.length.steps == 3
        assert [choice.what for choice in made.choices] == [
            f"weights {DEFAULT.name}",
            "learning rate 0.0005",
        ]
        assert made.seconds and made.memory.total > 0 and made.splits["train"].classes == ("ant", "bee")
        with pytest.raises(AttributeError):
            made.out = Path("elsewhere")
        result = finetune.run(made)
        assert result["steps"] == 3 and Path(result["model"]).exists()
        with refused("request.conflict", "runs/pics"):
            finetune.run(made)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({"steps": 3, "epochs": 2.0}, "request.conflict"),
        ({"weights": "pics", "model": "ViT-Ti/16"}, "request.conflict"),
        ({"more_steps": 4}, "run.not-found"),
        ({"out": Path("pics/ant/0.png")}, "file.not-writable"),
    ],
)
def test_requests_that_cannot_be_met_have_a_code(home, words, code):
    options = Training(workers=0, device="cpu", **words)
    with refused(code), machine_for(options, progress=False) as machine:
        plan(finetune.finetuning("pics", options), machine)
    assert not Path("runs").exists()
