"""Images that are no whole number of patches: the rest is dropped as in the official code, and told once."""

import json

import numpy as np
import pytest
import torch
from test_cli import run as exit_code

import vitkit
from vitkit.commands.export import export
from vitkit.commands.look import inspect
from vitkit.inference.graphs import Form, trace
from vitkit.metrics.cost import flops, forward_flops
from vitkit.models.self_supervised.masked import MaskedViT, with_mask_token
from vitkit.models.variants import configure, skeleton
from vitkit.models.vit import in_patches
from vitkit.ops.fused import patchify
from vitkit.tasks.masked import Masked, MaskedLoss, corrupt_for_evaluation
from vitkit.weights.convert import convert
from vitkit.weights.save import save

ODD = (38, 29)  # patches of 8: 4 x 3 of them on 32 x 24 pixels


def test_the_h14_of_tables_4_to_6_has_27_x_27_patches_at_384():
    config = configure("ViT-H/14", image_size=384)
    assert config.grid == (27, 27) and config.covered == (378, 378) and config.tokens == 730
    assert skeleton(config).positions.table.shape == (1, 730, 1280)


@pytest.mark.parametrize("options", [{}, {"positions": "2d"}, {"positions": "sincos2d"}, {"head": "gap"}])
def test_logits_are_those_of_the_image_without_its_rest(small, options):
    model, images = small(image_size=ODD, **options), torch.randn(2, 3, *ODD)
    whole = images[:, :, :32, :24]
    assert torch.equal(model(images), model(whole))
    for ours, theirs in zip(model.attention(images), model.attention(whole), strict=True):
        assert torch.equal(ours, theirs)
    other = torch.randn(2, 3, 47, 55)  # in forward alone, of another size than the model's own
    assert torch.equal(model(other), model(other[:, :, :40, :48]))
    changed = images.clone()
    changed[:, :, 32:], changed[:, :, :, 24:] = 9, 9
    assert torch.equal(model(images), model(changed))


def test_a_hybrid_drops_the_rest_before_its_stem(small_hybrid):
    model, images = small_hybrid(), torch.randn(1, 3, 71, 66)
    assert model.config.stride == 8
    assert torch.equal(model(images), model(images[:, :, :64, :64]))


def test_the_product_of_a_gpu_cuts_the_same_patches(small):
    """On a GPU patches are cut and multiplied; here the same by hand, against the convolution."""
    model, images = small(), torch.randn(2, 3, *ODD)
    ours, grid = model.patches(images)
    pieces = patchify(in_patches(images, 8), 8)
    by_product = torch.nn.functional.linear(pieces, model.project.weight.flatten(1), model.project.bias)
    assert grid == (4, 3) and torch.allclose(ours, by_product, atol=1e-5)


def test_positions_are_resized_to_the_grid_of_whole_patches(small):
    model = small()
    ours, theirs = vitkit.adapt(model, image_size=ODD), vitkit.adapt(model, image_size=(32, 24))
    assert torch.equal(ours.positions.table, theirs.positions.table)
    assert torch.equal(ours(images := torch.randn(1, 3, *ODD)), theirs(images))


def test_the_model_tells_once_what_it_drops(small):
    note = vitkit.adapt(small(), image_size=ODD).origin.notes[-1]
    assert all(word in note for word in ("38x29", "32x24", "6 at the bottom", "5 at the right"))
    assert small(image_size=ODD).origin.notes == (note,)
    again = vitkit.adapt(small(image_size=ODD), image_size=(46, 29)).origin.notes
    assert len(again) == 1 and "46x29" in again[0]
    assert vitkit.adapt(small(image_size=ODD), image_size=32).origin.notes == () == small().origin.notes


@pytest.mark.parametrize("name", ["ViT-H/14", "R50+ViT-B/32", "R+ViT-Ti/16"])
def test_counter_and_formula_agree_on_the_cost(name):
    model = skeleton(configure(name, image_size=384))
    for size in ((384, 384), (395, 450)):
        assert forward_flops(model.config, size) == flops(model, size)


@pytest.mark.parametrize("ending, format", [
    ("m.safetensors", "vitkit"), ("m.npz", "official"), ("m.pth", "timm"), ("m.pth", "torchvision"),
    ("folder", "hf"),
])  # fmt: skip
def test_every_format_keeps_the_size_and_its_library_agrees(small, tmp_path, ending, format):
    """timm and transformers drop the rest as we do; torchvision, which refuses it, gets the cropped image."""
    model = small(image_size=(38, 38), gelu="erf")  # as torchvision has it
    save(model, tmp_path / "own.safetensors")
    made = convert(tmp_path / "own.safetensors", tmp_path / ending, format=format)
    assert made.ok and (made.parity is None or made.parity.skipped or made.parity.logits is not None)
    assert any("38x38" in note for note in made.notes)
    known = {"image_size": 38, "heads": 2} if ending == "m.pth" else {}  # which holds arrays alone
    again, images = vitkit.load(tmp_path / ending, **known), torch.randn(1, 3, 38, 38)
    assert again.config.image_size == (38, 38) and again.config.grid == (4, 4)
    assert torch.allclose(again(images), model(images), atol=0.05)  # with another GELU, where only arrays


def test_inspection_shows_the_pixels_that_the_maps_cover(small):
    model = small(image_size=ODD)
    picture = np.random.default_rng(0).integers(0, 256, (*ODD, 3), dtype=np.uint8)
    look = inspect(model, picture)
    assert look.image.shape == (32, 24, 3) and np.array_equal(look.image, picture[:32, :24])
    assert look.rollout.shape == (4, 3) and look.class_map.shape == (4, 3)
    assert dict(look.panels())["attention"].shape == (32, 24, 3)


def test_masked_patches_are_those_that_the_model_sees(small):
    vit = with_mask_token(small(image_size=ODD))
    config = Masked(target="pixels")
    model, objective = MaskedViT(vit, config.predictions(8)), MaskedLoss(config=config, patch=8)
    batch = {"image": torch.randint(0, 256, (2, 3, *ODD), dtype=torch.uint8), "place": torch.arange(2)}
    batch = corrupt_for_evaluation(config, 12, batch)
    torch.nn.init.normal_(model.predict.weight)
    whole = batch | {"image": batch["image"][:, :, :32, :24]}
    ours, theirs = objective.each(model, batch)["loss"], objective.each(model, whole)["loss"]
    assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_graph_of_an_odd_size_takes_images_of_that_size(small):
    model, images = small(image_size=ODD), torch.randn(2, 3, *ODD)
    graph = trace(model, Form()).module()
    assert torch.allclose(graph(images), model(images), atol=1e-5)
    anywhere = trace(model, Form(any_size=True)).module()
    assert torch.allclose(anywhere(images[..., :32, :24]), model(images), atol=1e-5)


@pytest.mark.slow
def test_an_exported_file_of_an_odd_size_gives_the_models_answers(small, tmp_path):
    done = export(small(), tmp_path / "m.onnx", image_size=ODD)
    assert done.compared[0].size == ODD and all(one.result.ok for one in done.compared)


def test_a_plan_says_it_once_and_strict_size_refuses(tmp_path, capsys):
    words = ["finetune", "digits", "--model", "ViT-Ti/14", "--image-size", "48", "--steps", "1", "--plan",
             "--out", tmp_path / "run", "--device", "cpu"]  # fmt: skip
    assert exit_code(*words) == 0
    output = capsys.readouterr()
    assert not output.err and output.out.count("48x48") == 1 and "42x42" in output.out
    assert exit_code(*words, "--json") == 0
    assert "42x42" in json.loads(capsys.readouterr().out)["pixels"]
    assert exit_code(*words, "--strict-size") == 2
    assert "42 or 56" in capsys.readouterr().err
    fits = [word if word != "48" else "42" for word in words]
    assert exit_code(*fits, "--strict-size", "--json") == 0
    assert "pixels" not in json.loads(capsys.readouterr().out)
