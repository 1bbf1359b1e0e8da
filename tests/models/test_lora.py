"""LoRA: the adapted weights are W + alpha / rank * B A, part by part, on every path that reads them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from refusals import refused

import vitkit
from vitkit.models.lora import LoRA, adapter_state, add_lora, has_lora, merge_lora, merged_state, updates
from vitkit.models.variants import configure, skeleton
from vitkit.training.trainable import freeze, trainable_parameters
from vitkit.weights.adapter import merge_adapter, save_adapter

D = 32
PARTS = {  # of each layer of a block that can be adapted, by targets: the rows that change
    "qv": {"attention.qkv": {"q": (0, D), "v": (2 * D, 3 * D)}},
    "qkv": {"attention.qkv": {"q": (0, D), "k": (D, 2 * D), "v": (2 * D, 3 * D)}},
}
MLP = {"mlp.up": {"up": (0, 48)}, "mlp.down": {"down": (0, D)}}
PARTS["qkv+mlp"] = PARTS["qkv"] | MLP
PARTS["all-linear"] = PARTS["qkv+mlp"] | {"attention.out": {"out": (0, D)}}


def filled(model, config):
    """The model with adapters whose factors are all random: B is not zero, as after some steps."""
    add_lora(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, update in updates(model):
            for factor in update.parameters():
                factor.copy_(0.3 * torch.randn(factor.shape, generator=generator))
    return model


@pytest.mark.parametrize("options", [{}, {"head": "gap"}, {"qkv_bias": False, "layer_scale": True}], ids=str)
@pytest.mark.parametrize("targets", PARTS)
def test_the_outputs_are_those_of_the_sum_written_out(small, targets, options):
    config = LoRA(rank=3, alpha=7.0, targets=targets)
    by_hand = small(**options)
    adapted = filled(copy.deepcopy(by_hand), config)
    factors = adapter_state(adapted, torch.clone)
    state, images = by_hand.state_dict(), torch.randn(4, 3, 32, 32)
    before = by_hand(images)
    for block in range(2):
        for layer, parts in PARTS[targets].items():
            name = f"encoder.blocks.{block}.{layer}"
            for part, (start, stop) in parts.items():
                a, b = (factors.pop(f"{name}.{part}.lora_{factor}.weight") for factor in "AB")
                assert a.shape[0] == b.shape[1] == 3
                state[f"{name}.weight"][start:stop] += 7 / 3 * (b @ a)
    assert set(factors) == {"head.weight", "head.bias"}, "each factor was used"
    by_hand.load_state_dict(state)
    torch.testing.assert_close(adapted(images), by_hand(images), rtol=0, atol=1e-5)
    assert (by_hand(images) - before).abs().max() > 0.01


def test_queries_and_values_are_adapted_as_two_layers_of_peft(small):
    """y = x W^T + b + alpha / r (x A^T) B^T in a query and a value layer; the keys stay as they are."""
    model, name, x = small(), "encoder.blocks.1.attention.qkv", torch.randn(2, 5, D)
    base = copy.deepcopy(model.get_submodule(name))
    factors = adapter_state(filled(model, LoRA(rank=4, alpha=6.0)), torch.clone)
    layer = model.get_submodule(name)
    weights, biases = base.weight.chunk(3), base.bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    for part, output in (("q", q), ("v", v)):
        a, b = (factors[f"{name}.{part}.lora_{factor}.weight"] for factor in "AB")
        output += 6 / 4 * (x @ a.mT) @ b.mT
    torch.testing.assert_close(layer(x), torch.cat([q, k, v], -1), rtol=0, atol=1e-5)
    assert torch.equal(layer.weight[D : 2 * D], weights[1])


def test_training_starts_at_the_pretrained_model(small):
    """A is uniform up to 1 / sqrt(inputs), as in peft, and B is zero; the seed decides A."""
    model, images = small(), torch.randn(2, 3, 32, 32)
    before = model(images)
    add_lora(model, LoRA(targets="all-linear"), seed=3)
    assert torch.equal(model(images), before)
    factors = adapter_state(model, torch.clone)
    down = factors["encoder.blocks.0.mlp.down.down.lora_A.weight"]
    assert down.shape == (8, 48) and 0.9 / math.sqrt(48) < down.abs().max() <= 1 / math.sqrt(48)
    assert not any(t.any() for name, t in factors.items() if ".lora_B" in name)
    again, other = small(), small()
    add_lora(again, LoRA(targets="all-linear"), seed=3)
    add_lora(other, LoRA(targets="all-linear"), seed=4)
    name = "encoder.blocks.1.attention.qkv.v.lora_A.weight"
    assert torch.equal(adapter_state(again, torch.clone)[name], factors[name])
    assert not torch.equal(adapter_state(other, torch.clone)[name], factors[name])


def test_the_number_of_parameters_is_that_of_peft():
    """ViT-B/16, query and value, rank 16, 101 classes: as print_trainable_parameters reports it."""
    model = skeleton(configure("ViT-B/16", classes=101))
    freeze(model, "lora", LoRA(rank=16))
    assert trainable_parameters(model) == 12 * 2 * 16 * (768 + 768) + 101 * 769 == 667_493


@pytest.mark.parametrize("targets", PARTS)
def test_merged_weights_give_the_same_outputs(small, targets):
    model = filled(small(), LoRA(targets=targets))
    images = torch.randn(4, 3, 32, 32)
    expected, state = model(images), merged_state(model, torch.clone)
    plain = small()
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(images), expected, rtol=0, atol=1e-5)
    merge_lora(model)
    assert not has_lora(model) and type(model.encoder.blocks[0].attention.qkv) is torch.nn.Linear
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()


def test_axial_attention_and_hybrids_have_adapters_too(small, small_hybrid):
    for make in (lambda: small(attention="axial", head="gap"), small_hybrid):
        model = make()
        images = torch.randn(2, 3, *model.config.image_size)
        before, expected = model(images), filled(model, LoRA(targets="all-linear"))(images)
        merge_lora(model)
        torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)
        assert (expected - before).abs().max() > 0.01


def test_autocast_does_not_round_the_update(small):
    """So the weights that are merged at the end are those that were trained with."""
    layer = filled(small(), LoRA()).encoder.blocks[0].attention.qkv
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer.weight
    assert inside.dtype == torch.float32 and torch.equal(inside, layer.weight)


BAD = [{"rank": 0}, {"rank": -1}, {"alpha": 0.0}, {"alpha": math.nan}, {"targets": "k"}]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_impossible_settings_are_refused(bad):
    (name, value), *_ = bad.items()
    with refused("recipe.value", f"lora.{name}", value):
        LoRA(**bad)


def test_a_model_without_blocks_is_refused(small_resnet):
    with refused("model.unsupported", "train=last-N"):
        add_lora(small_resnet(), LoRA())


def test_an_adapter_file_gives_the_model_back(small, tmp_path):
    """From the base at another size, with another head: the positions are interpolated as in the run."""
    base, path, config = small(), tmp_path / "adapter.safetensors", LoRA(rank=2, targets="qkv")
    tuned = vitkit.adapt(base, labels=("a", "b"), image_size=(48, 48), dropout=0.1)
    torch.nn.init.normal_(tuned.head.weight)
    filled(tuned, config)
    factors = adapter_state(tuned, torch.clone)
    merge_lora(tuned)
    save_adapter(factors, tuned, config, "base.safetensors", path)
    before = copy.deepcopy(base.state_dict())
    again = merge_adapter(base, path)
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in tuned.state_dict().items())
    assert again.labels == ("a", "b") and again.preprocessing == tuned.preprocessing and not again.training
    assert all(torch.equal(t, before[name]) for name, t in base.state_dict().items())
    with refused("weights.shape", "depth=3"):
        merge_adapter(small(depth=3), path)
    vitkit.save(base, model := tmp_path / "model.safetensors")
    with refused("weights.format", "not a LoRA adapter"):
        merge_adapter(base, model)
    save_adapter(factors | {"head.bias": torch.zeros(3)}, tuned, config, "", path)
    with refused("weights.names", "head.bias"):
        merge_adapter(base, path)
    with refused("weights.format", "merge_adapter"):
        vitkit.load(path)
