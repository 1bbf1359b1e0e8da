"""What is trained and what is frozen: which parameters, in which groups, and what they cost."""

import pytest
import torch
from refusals import refused

from vitkit.errors import Error
from vitkit.metrics.cost import training_memory, training_passes
from vitkit.models.lora import LoRA
from vitkit.models.variants import configure, skeleton
from vitkit.options import parse_train
from vitkit.training.optimizer import OptimizerConfig, group_parameters
from vitkit.training.trainable import freeze, trainable_parameters, trainable_text

HEAD = {"head.weight", "head.bias"}


def trained(model, train: str, **lora) -> set[str]:
    freeze(model, train, LoRA(**lora))
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_all_the_head_or_the_last_blocks(small):
    model = small(depth=3)
    names = {name for name, _ in model.named_parameters()}
    last = {name for name in names if name.startswith(("encoder.blocks.2.", "encoder.norm.", "head."))}
    assert trained(model, "head") == HEAD and trained(model, "last-1") == last
    assert trained(model, "last-2") == last | {n for n in names if n.startswith("encoder.blocks.1.")}
    assert names - trained(model, "last-3") == {
        "project.weight", "project.bias", "class_token", "positions.table",
    }  # fmt: skip
    assert trained(model, "all") == names


def test_the_blocks_of_a_resnet_are_its_stages(small_resnet):
    model = small_resnet()
    last = f"stages.{len(model.stages) - 1}."
    assert trained(model, "last-1") == {
        name for name, _ in model.named_parameters() if name.startswith((last, "norm.", "head."))
    }
    with refused("model.unsupported"):
        freeze(model, "lora")


def test_lora_trains_its_factors_and_the_head(small):
    factors = {
        f"encoder.blocks.{block}.attention.qkv.parametrizations.weight.0.lora_{factor}.{part}"
        for block in range(2) for factor in "AB" for part in "qv"
    }  # fmt: skip
    assert trained(small(), "lora") == HEAD | factors


def test_more_blocks_than_there_are_and_unknown_names_are_refused(small):
    with refused("recipe.value", "last-3", "last-1 to last-2"):
        freeze(small(), "last-3")
    for text in ("last-0", "last", "last-x", "LoRA", "none", ""):
        with pytest.raises(Error) as caught:
            parse_train(text)
        assert caught.value.code == "request.value"
    assert [parse_train(text) for text in ("all", "head", "lora", "last-12")] == [
        ("all", 0), ("head", 0), ("lora", 0), ("last", 12),
    ]  # fmt: skip


def test_weight_decay_and_layer_decay_reach_the_factors(small):
    model = small()
    freeze(model, "lora")
    names = {id(p): name for name, p in model.named_parameters()}
    config = OptimizerConfig(kind="adam", weight_decay=0.1, layer_decay=0.5)
    groups = {
        names[id(p)]: (g["weight_decay"], g["rate_share"])
        for g in group_parameters(model, config)
        for p in g["params"]
    }
    assert len(groups) == 2 + 2 * 4
    assert groups["head.weight"] == (0.1, 1.0) and groups["head.bias"] == (0.0, 1.0)
    for block, share in ((0, 0.25), (1, 0.5)):
        for factor in "AB":
            prefix = f"encoder.blocks.{block}.attention.qkv.parametrizations.weight.0"
            assert groups[f"{prefix}.lora_{factor}.q"] == (0.1, share)


def memory(train: str, **options):
    model = skeleton(configure("ViT-B/16", classes=10))
    freeze(model, train)
    return training_memory(model, 64, half=True, slots=2, **options), trainable_parameters(model)


def test_frozen_parameters_need_no_gradients_moments_or_average():
    full, count = memory("all")
    for train, factors in (("head", 0), ("last-4", 0), ("lora", 12 * 2 * 8 * 1536)):
        part, trainable = memory(train)
        assert (part.gradients, part.optimizer) == (4 * trainable, 8 * trainable)
        assert part.parameters == 4 * (count + factors)
        assert memory(train, average=True)[0].parameters == part.parameters + 4 * trainable
        assert part.total < full.total
    head, last, lora = (memory(train)[0].activations for train in ("head", "last-4", "lora"))
    assert head < full.activations / 10 and 0.3 < last / full.activations < 0.4 and lora == full.activations


def test_frozen_layers_cost_less_than_three_forward_passes(small_resnet):
    model = skeleton(configure("ViT-B/16", classes=10))
    expected = {"all": 3, "last-3": 1 + 2 * 3 / 12, "head": 1, "lora": 2}
    for train, passes in expected.items():
        freeze(model, train)
        assert training_passes(model) == passes, train
    resnet = small_resnet()
    units = sum(len(stage) for stage in resnet.stages)
    for train, passes in (("all", 3), ("head", 1), ("last-1", 1 + 2 * len(resnet.stages[-1]) / units)):
        freeze(resnet, train)
        assert training_passes(resnet) == passes, train


def test_what_is_trained_in_words():
    lora = trainable_text("lora", LoRA(), 149_000, 5_717_416)
    assert lora == "0.15 of 5.7 million parameters (LoRA, rank 8)"
    last = trainable_text("last-4", LoRA(), 28_400_000, 86_000_000)
    assert last == "28.4 of 86.0 million parameters (last 4 blocks and head)"


def test_frozen_weights_have_no_gradient(small):
    for train in ("head", "last-1", "lora"):
        model = small()
        freeze(model, train)
        model(torch.randn(2, 3, 32, 32)).square().mean().backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
