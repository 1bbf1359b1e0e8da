"""Every newer architecture through all that uses a model: evaluate, train, inspect, predict, serve."""

import json

import numpy as np
import pytest
import torch

import vitkit
from vitkit.cli.verbs import main
from vitkit.inference.bulk import forward_tokens
from vitkit.inference.predict import prepare_batch, view_of
from vitkit.models.adapt import set_head
from vitkit.runs.kept_weights import apply_calibration
from vitkit.server.served_model import attention_maps, open_served
from vitkit.server.settings import Settings

DIGITS = {"image_size": (16, 16), "patch": 4, "classes": 0}
FAMILIES = {
    "registers": {"registers": 4, "layer_scale": True, "mask_token": True},
    "rope": {
        "rope": "dinov3", "positions": "none", "registers": 2, "key_bias": False, "norm_eps": 1e-5,
        "rope_rescale": 2.0, "layer_scale": True,
    },
    "swiglu": {
        "rope": "eva02", "mlp": "swiglu", "mlp_norm": True, "key_bias": False, "head": "gap",
        "class_token": True, "final_norm": "pooled",
    },
    "map": {"head": "map"},
    "clip": {
        "input_norm": True, "project_bias": False, "gelu": "quick", "representation": 12,
        "representation_kind": "linear",
    },
    "distilled": {"distilled": True, "qk_norm": True},
    "token+gap": {"head": "token+gap", "registers": 2, "class_position": False},
}  # fmt: skip
WIDTHS = {"clip": 12, "distilled": 64, "token+gap": 64}  # of the features; 32 for the others


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (20, 16, 3), dtype=np.uint8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_every_family_is_evaluated_trained_inspected_predicted_and_served(
    small, tmp_path, capsys, image, family
):
    file, options = tmp_path / "m.safetensors", FAMILIES[family]
    vitkit.save(small(**(DIGITS | options)), file)
    assert vitkit.embed(file, image).shape == (WIDTHS.get(family, 32),)

    words = ("fewshot", str(file), "digits", "--shots", "5", "--seeds", "1", "--knn", "5", "--probe")
    main([*words, "--workers", "0", "--cache", str(tmp_path / "features"), "--json"])
    frozen = json.loads(capsys.readouterr().out)
    assert min(frozen["knn"]["top1"], frozen["probe"]["top1"]) > 0.4  # chance is 0.1

    run = vitkit.finetune(
        "digits", weights=file, out=tmp_path / "run", steps=4, batch=32, image_size=16, workers=0,
        set={
            "evaluations": 1, "schedule.warmup": 1, "schedule.rate": 1e-4, "head_init": "least-squares",
            "calibrate": True,
        },
    )  # fmt: skip
    trained, old = run.model, vitkit.load(file).state_dict()
    kept = {k: v for k, v in options.items() if not k.startswith("representation")}
    assert {field: getattr(trained.config, field) for field in kept} == kept
    now = trained.state_dict()
    changed = [name for name in now.keys() & old.keys() if not torch.equal(old[name], now[name])]
    assert any(name.startswith("encoder.blocks.0.") for name in changed)
    assert run.metrics.top1 > 0.4

    answers = vitkit.predict(run.folder, image, top=10)
    assert sum(probability for _, probability in answers) == pytest.approx(1, abs=1e-5)

    look = vitkit.inspect_model(run.folder, [image], layer=0)
    assert look.arrays["rollout"].shape == (1, 4, 4) and look.arrays["class_maps"].shape == (1, 1, 4, 4)
    assert ("register_maps" in look.arrays) == ("registers" in options)

    served = open_served(Settings(model=str(tmp_path / "run")))
    views = view_of(image, served.model)[None]
    with torch.inference_mode():
        best = served.engine(views).softmax(-1)[0].max(0)
    assert trained.labels[best.indices] == answers[0][0]
    assert float(best.values) == pytest.approx(answers[0][1], abs=1e-5)
    assert attention_maps(served.model, views[0], 3)["grid"] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exported(small, tmp_path, image, family, any_size):
    """export itself compares the answers of the file with the model's and refuses to write others."""
    model = small(**(DIGITS | {"classes": 5} | FAMILIES[family]))
    model.labels = tuple("abcde")
    vitkit.export(model, tmp_path / "m.onnx", any_size=any_size)
    answers, ours = vitkit.predict(tmp_path / "m.onnx", image), vitkit.predict(model, image)
    assert [label for label, _ in answers] == [label for label, _ in ours]
    assert [p for _, p in answers] == pytest.approx([p for _, p in ours], abs=1e-4)


def test_a_temperature_and_a_fitted_head_hold_for_both_heads_of_a_distilled_model(small):
    from types import SimpleNamespace

    model, images = small(distilled=True), torch.rand(2, 3, 32, 32)
    weight, bias = torch.randn(5, 64), torch.randn(5)
    set_head(model, weight, bias)
    with torch.no_grad():
        logits = model.features(images) @ weight.T + bias
        torch.testing.assert_close(model(images), logits)
        fitted = {"calibration": {"temperature": 2.0, "threshold": 0.3}}
        apply_calibration(model, SimpleNamespace(keeps_best=False), fitted)
        torch.testing.assert_close(model(images), logits / 2)
    assert model.reject_below == 0.3


def test_the_mean_of_the_patches_leaves_registers_out():
    sizes = {"image_size": 16, "depth": 1, "width": 32, "heads": 2, "hidden": 32}
    model = vitkit.build("ViT-Ti/4", classes=2, registers=4, **sizes).eval()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        tokens = model.tokens(prepare_batch(model, images))
        assert tokens.shape[1] == 1 + 4 + 16
        assert torch.equal(forward_tokens(model, "mean", images), tokens[:, -16:].mean(1))
