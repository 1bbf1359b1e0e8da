"""The two published paddings of a BiT root's max pooling: what each computes, and which file means which."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from refusals import refused

import vitkit
from vitkit.models.resnet import ResNetConfig, pad_same, pool_root
from vitkit.weights.card import card_of, from_json, to_json
from vitkit.weights.convert import convert
from vitkit.weights.save import save

# one channel, all below zero: the two conventions differ along the border and nowhere else
BELOW = -torch.arange(1.0, 17.0).view(1, 1, 4, 4)


def test_zeros_are_the_largest_in_a_border_of_negative_numbers():
    assert pool_root(BELOW, "zeros").tolist() == [[[[0, 0], [0, -6]]]]
    assert pool_root(BELOW, "-inf").tolist() == [[[[-1, -2], [-5, -6]]]]


def test_a_hybrids_root_has_one_convention_since_nothing_is_below_zero_there():
    x = torch.randn(2, 3, 9, 8).relu()
    pools = [torch.nn.functional.max_pool2d(pad_same(x, 3, 2, value), 3, 2) for value in (0.0, -torch.inf)]
    assert torch.equal(*pools)


def test_an_unknown_padding_is_refused():
    with refused("model.config", "root_padding", "zeros, -inf", "ones"):
        ResNetConfig(root_padding="ones")


def as_big_vision(model) -> dict[str, np.ndarray]:
    """The arrays as models/bit_paper.py of big_vision names and shapes them, written out by hand."""
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}

    def norm(name: str, own: str) -> dict[str, np.ndarray]:
        shapes = {"scale": f"{own}.weight", "bias": f"{own}.bias"}
        return {f"{name}/{part}": state[source].reshape(1, 1, 1, -1) for part, source in shapes.items()}

    arrays = {"root_block/conv_root/kernel": state["root.weight"].transpose(2, 3, 1, 0)}
    arrays |= norm("norm-pre-head", "norm")
    arrays |= {"head/kernel": state["head.weight"].T, "head/bias": state["head.bias"]}
    for s, count in enumerate(model.config.blocks):
        for u in range(count):
            own, name = f"stages.{s}.{u}", f"block{s + 1}/unit{u + 1:02d}"
            for k in (1, 2, 3):
                arrays[f"{name}/conv{k}/kernel"] = state[f"{own}.conv{k}.weight"].transpose(2, 3, 1, 0)
                arrays |= norm(f"{name}/gn{k}", f"{own}.norm{k}")
            if u == 0:
                arrays[f"{name}/conv_proj/kernel"] = state[f"{own}.shortcut.weight"].transpose(2, 3, 1, 0)
    return arrays


@pytest.mark.parametrize("prefix", ["", "params/", "opt/target/"])
def test_a_big_vision_file_pads_with_minus_infinity(small_resnet, tmp_path, prefix):
    model, images = small_resnet(root_padding="-inf"), torch.randn(2, 3, 64, 64)
    arrays = {prefix + name: array for name, array in as_big_vision(model).items()}
    np.savez(tmp_path / "bv.npz", **arrays)
    again = vitkit.load(tmp_path / "bv.npz", image_size=64)
    assert again.origin.format == "big_vision-bit" and again.config == model.config
    assert torch.equal(again(images), model(images))
    assert not torch.allclose(again(images), small_resnet()(images), atol=1e-4)  # with zeros: other answers


def test_the_origin_of_a_file_decides(small_resnet, tmp_path):
    for padding, name in (("zeros", "official-bit"), ("-inf", "big_vision-bit")):
        model = small_resnet(root_padding=padding)
        save(model, tmp_path / "m.npz")
        with np.load(tmp_path / "m.npz") as arrays:
            np.savez(tmp_path / "bare.npz", **arrays)  # the arrays alone, without a card
        again = vitkit.load(tmp_path / "bare.npz", image_size=64)
        assert (again.origin.format, again.config.root_padding) == (name, padding)
    assert vitkit.build("BiT-R50x1").config.root_padding == "zeros"


def test_convert_prints_the_padding_and_formats_that_lack_it_say_so(small_resnet, tmp_path):
    save(small_resnet(root_padding="-inf"), tmp_path / "own.safetensors")
    made = convert(tmp_path / "own.safetensors", tmp_path / "bv.npz")
    assert made.ok and made.format == "big_vision-bit" and made.changed == 0
    assert any("padded with -inf" in note and "big_vision" in note for note in made.notes)
    made = convert(tmp_path / "own.safetensors", tmp_path / "t.safetensors", format="timm")
    assert made.ok and made.changed > 1e-4
    assert any("root_padding=zeros, this model -inf" in note for note in made.notes)
    save(small_resnet(), tmp_path / "own.safetensors")
    made = convert(tmp_path / "own.safetensors", tmp_path / "bit.npz")
    assert made.format == "official-bit" and any("padded with zeros" in note for note in made.notes)
    assert not any("root_padding" in note for note in made.notes)


def test_a_card_keeps_it_and_an_old_card_means_zeros(small_resnet):
    card = card_of(small_resnet(root_padding="-inf"), "vitkit")
    assert from_json(to_json(card)).config == card.config
    old = json.loads(to_json(card))
    assert old["config"].pop("root_padding") == "-inf"
    assert asdict(from_json(json.dumps(old)).config)["root_padding"] == "zeros"
