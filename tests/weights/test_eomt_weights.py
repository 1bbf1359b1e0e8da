"""EoMT's weights: parity with transformers, both sets of names, and files that are refused."""

import json

import pytest
import torch
from conftest import randomise

from vitkit.errors import Error, WeightsError
from vitkit.models.dense.eomt import Eomt, EomtConfig
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats import formats
from vitkit.weights.formats.eomt_layouts import ORIGINAL
from vitkit.weights.load import load
from vitkit.weights.save import save

VIT = {
    "width": 32, "depth": 3, "heads": 4, "hidden": 128, "patch": 16, "image_size": (64, 64), "classes": 0,
    "class_position": False, "registers": 4, "layer_scale": True, "gelu": "erf", "position_resize": "timm",
}  # fmt: skip


def small(vit=None, **options):
    fields = {"classes": 5, "queries": 7, "joint": 2, "upscale": 2} | options
    model = fresh(EomtConfig(vit=ViTConfig(**(VIT | (vit or {}))), **fields), seed=0)
    randomise(model, 0.1)
    return model


def theirs(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64,
        "num_blocks": 2, "num_queries": 7, "num_labels": 5, "num_upscale_blocks": 2,
    }  # fmt: skip
    model = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**(sizes | options)))
    model.attn_mask_probs.zero_()  # as in a trained model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def difference(own, other, images):
    with torch.no_grad():
        expected = other(images)
        masks, classes = list(own.predictions(images))[-1]
    pairs = ((masks, expected.masks_queries_logits), (classes, expected.class_queries_logits))
    return max((a - b).abs().max().item() / b.abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"use_swiglu_ffn": True}, {"num_upscale_blocks": 1}], ids=str)
def test_a_folder_of_transformers_gives_the_same_outputs(tmp_path, options):
    other = theirs(**options)
    other.save_pretrained(tmp_path / "eomt")
    own = load(tmp_path / "eomt")
    assert isinstance(own, Eomt) and own.config.joint == 2 and own.config.queries == 7
    assert own.masked == (False, False) and own.origin.format == "hf-eomt"
    assert difference(own, other, torch.randn(2, 3, 64, 64)) < 1e-5


def test_a_model_that_is_not_yet_annealed_masks_attention_as_transformers_does(tmp_path):
    other = theirs()
    other.attn_mask_probs.fill_(1.0)
    other.save_pretrained(tmp_path / "eomt")
    own, images = load(tmp_path / "eomt"), torch.randn(2, 3, 64, 64)
    assert own.masked == (True, True)
    assert difference(own, other, images) < 1e-5
    with torch.no_grad():
        masked = list(own.predictions(images))
        own.masked = (False, False)
        assert len(masked) == 3 and not torch.allclose(masked[-1][0], list(own.predictions(images))[-1][0])


def test_what_we_write_transformers_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    own = small()
    own.labels = ("road", "sky", "car", "tree", "sign")
    assert save(own, tmp_path / "out", format="hf") == ()
    other = transformers.EomtForUniversalSegmentation.from_pretrained(tmp_path / "out").eval()
    assert difference(own.eval(), other, torch.randn(2, 3, 64, 64)) < 1e-5
    assert other.config.id2label[2] == "car"
    again = load(tmp_path / "out")
    assert again.labels == own.labels and again.config == own.config
    assert all(
        torch.equal(a, b) for a, b in zip(own.state_dict().values(), again.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("vit", [{}, {"mlp": "swiglu", "hidden": 88}], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_original_names_there_and_back(tmp_path, vit, ending):
    own, path = small(vit), tmp_path / f"eomt{ending}"
    notes = save(own, path, format="eomt")
    assert all("labels" in note or "heads=4" in note for note in notes)
    again = load(path, heads=4)
    assert again.config == own.config and again.origin.format == "eomt"
    assert all(
        torch.equal(a, b) for a, b in zip(own.state_dict().values(), again.state_dict().values(), strict=True)
    )


def original(model):
    """The arrays of a checkpoint of the original code, with what is not part of the model."""
    state, arrays = model.state_dict(), {}
    for entry in ORIGINAL.entries(model.config):
        for name, part in zip(entry.foreign, state[entry.own].chunk(len(entry.foreign)), strict=True):
            arrays[name] = entry.form.write(part).clone()
    shapes = {"network.encoder.pixel_mean": (1, 3, 1, 1), "criterion.empty_weight": (6,)}
    return arrays | {name: torch.ones(shape) for name, shape in shapes.items()}


def test_a_checkpoint_of_the_original_code(tmp_path):
    own, path = small(), tmp_path / "pytorch_model.bin"
    arrays = original(own)
    for name in ("encoder.backbone.reg_token", "encoder.backbone.blocks.2.ls1.gamma", "q.weight",
                 "mask_head.4.bias", "upscale.1.conv2.weight", "attn_mask_probs"):  # fmt: skip
        assert f"network.{name}" in arrays
    assert arrays["network.q.weight"].shape == (7, 32)
    torch.save({"state_dict": arrays}, path)
    again = load(path, heads=4)
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(own.eval()(images), again(images))
    assert any("empty_weight" in note for note in again.origin.notes)


def test_differences_to_dinov3_are_no_model(tmp_path):
    arrays = {k: v for k, v in original(small()).items() if "pos_embed" not in k}
    torch.save(arrays, tmp_path / "delta.bin")
    with pytest.raises(WeightsError) as error:
        load(tmp_path / "delta.bin")
    assert error.value.code == "weights.unsupported"
    save(small(), tmp_path / "out", format="hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"model_type": "eomt_dinov3"}))
    from safetensors.torch import load_file, save_file

    save_file(load_file(tmp_path / "out/model.safetensors"), tmp_path / "out/model.safetensors")  # no card
    with pytest.raises(WeightsError) as error:
        load(tmp_path / "out")
    assert error.value.code == "weights.unsupported"


@pytest.mark.parametrize(
    "vit", [{"layer_scale": False}, {"class_position": True}, {"rope": "dinov3"}], ids=str
)
def test_other_encoders_are_saved_as_vitkit_only(tmp_path, vit):
    own = small(vit)
    for format, name in (("eomt", "x.pth"), ("hf", "folder")):
        with pytest.raises(Error) as error:
            save(own, tmp_path / name, format=format)
        assert error.value.code == "weights.unsupported"
    assert save(own, tmp_path / "x.safetensors") == ()
    again = load(tmp_path / "x.safetensors")
    images = torch.randn(1, 3, 64, 64)
    assert again.config == own.config and torch.equal(again(images), own.eval()(images))


def test_gate_and_value_in_one_layer_as_in_earlier_versions_of_transformers(tmp_path):
    from safetensors.torch import load_file, save_file

    own = small({"mlp": "swiglu", "hidden": 88})
    save(own, tmp_path / "out", format="hf")
    arrays = load_file(tmp_path / "out/model.safetensors")
    for i in range(3):
        for part in ("weight", "bias"):
            mlp = f"layers.{i}.mlp"
            both = [arrays.pop(f"{mlp}.{name}_proj.{part}") for name in ("gate", "up")]
            arrays[f"{mlp}.weights_in.{part}"] = torch.cat(both)
            arrays[f"{mlp}.weights_out.{part}"] = arrays.pop(f"{mlp}.down_proj.{part}")
    save_file(arrays, tmp_path / "out/model.safetensors")
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(load(tmp_path / "out")(images), own.eval()(images))


def test_the_format_is_listed():
    assert "eomt" in formats() and "eomt_layouts" not in formats()
