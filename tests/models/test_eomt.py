"""EoMT: which token sees which, annealing, every kind of encoder, and the merging of masks."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.errors import Error
from vitkit.models.dense.eomt import (
    EomtConfig,
    Joint,
    JointAttention,
    default_joint,
    mask_probabilities,
    semantic_scores,
    unpacked,
)
from vitkit.models.dense.segments import instances, masks_at_pixels, panoptic
from vitkit.models.encoder import scaled
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig

VIT = {"width": 16, "depth": 4, "heads": 2, "hidden": 32, "patch": 8, "image_size": (32, 48), "classes": 0}
KINDS = {
    "class token": {},
    "registers": {"registers": 3, "class_position": False, "layer_scale": True},
    "rope": {"positions": "none", "rope": "dinov3", "registers": 2},
    "norm after the mean": {"head": "gap", "final_norm": "pooled"},
    "distilled": {"distilled": True},
    "positions in every layer": {"injection": "every"},
}


def eomt(vit=None, **options):
    sizes = {"classes": 5, "queries": 6, "joint": 2, "upscale": 1} | options
    model = fresh(EomtConfig(vit=ViTConfig(**(VIT | (vit or {}))), **sizes), seed=1)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "token" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    return model.eval()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_kind_of_encoder_predicts_and_learns(options):
    model = eomt(options)
    images = torch.randn(2, 3, 32, 48)
    assert model(images).shape == (2, 5, 8, 12)
    outputs = model.train()(images, train=True)
    assert [mask.shape for mask in outputs["masks"]] == [(2, 6, 8, 12)] * 3
    assert [classes.shape for classes in outputs["classes"]] == [(2, 6, 6)] * 3
    sum(value.square().sum() for values in outputs.values() for value in values).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]


def by_hand(model, images, masks):
    """The tokens after the joint blocks, with attention written out; masks: what queries may see, or None."""
    vit, c = model.vit, model.config
    patches, grid = vit.patches(images)
    z = vit.embed(patches, grid)
    for block in vit.encoder.blocks[: -c.joint]:
        z = block(z, grid, None, vit.encoder.turn(grid))
    z = torch.cat([model.queries.expand(len(z), -1, -1), z], 1)
    for block, seen in zip(vit.encoder.blocks[-c.joint :], masks, strict=True):
        q, k, v = block.attention.project(block.norm1(z), None, vit.encoder.turn(grid))
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if seen is not None:  # (B, Q, N)
            hidden = torch.zeros_like(logits, dtype=torch.bool)
            hidden[:, :, : c.queries, -seen.shape[-1] :] = ~seen[:, None]
            logits = logits.masked_fill(hidden, -torch.inf)
        mixed = block.attention.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        z = z + scaled(mixed, block.scale1)
        z = z + scaled(block.mlp(block.norm2(z)), block.scale2)
    return z, grid


@pytest.mark.parametrize(
    "options", [{}, KINDS["registers"], KINDS["rope"]], ids=["plain", "registers", "rope"]
)
def test_without_masks_queries_are_tokens_like_others(options):
    model, images = eomt(options), torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        masks, classes = model.predict(*by_hand(model, images, [None, None]))
        expected = semantic_scores(masks, classes).log()
        assert torch.allclose(model(images), expected, atol=1e-4)


def test_masked_attention_hides_patches_outside_the_mask_from_queries():
    model, images = eomt(KINDS["registers"]), torch.randn(2, 3, 32, 48)
    model.masked = (True, True)
    with torch.no_grad():
        pairs = list(model.predictions(images))
        seen = [F.interpolate(mask, size=(4, 6), mode="bilinear").flatten(2) > 0 for mask, _ in pairs[:2]]
        assert any(0 < part.float().mean() < 1 for part in seen)
        masks, classes = model.predict(*by_hand(model, images, seen))
    assert torch.allclose(pairs[-1][0], masks, atol=1e-4)
    assert torch.allclose(pairs[-1][1], classes, atol=1e-4)


def test_only_patches_are_ever_hidden_and_only_from_queries():
    model = eomt(KINDS["registers"])  # 6 queries, a class token, 3 registers, 24 patches
    masks = torch.full((2, 6, 8, 12), -1.0)
    masks[0, 2] = 1.0
    seen = model.attention_mask(masks, (4, 6), 34, 0)
    assert seen.shape == (2, 1, 34, 34) and seen.dtype == torch.bool
    assert seen[:, :, 6:].all() and seen[..., :10].all()
    assert seen[0, 0, 2, 10:].all()
    hidden = ~seen[:, 0, :6, 10:]
    hidden[0, 2] = True
    assert hidden.all()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_queries_of_each_image_masks_its_attention(share):
    model = eomt(queries=200).train()
    model.mask_probabilities.fill_(share)
    seen = model.attention_mask(torch.full((4, 200, 8, 12), -1.0), (4, 6), 225, 1)[:, 0, :200, -24:]
    assert torch.equal(seen.all(-1), seen.any(-1)), "of a query all patches, or none"
    dropped = seen.all(-1).float().mean(1)
    assert torch.allclose(dropped, torch.full((4,), 1 - share), atol=0.12)
    if share in (0, 1):
        assert (dropped == 1 - share).all()


def test_annealing_follows_the_published_phases():
    steps = 600  # phases of a sixth: 100
    for blocks, starts in ((3, (100, 250, 400)), (4, (100, 200, 300, 400)), (5, (100, 175, 250, 325, 400))):
        for step in (0, 99, 130, 200, 260, 350, 450, 500, 599):
            expected = [(1 - min(1.0, max(0.0, (step - start) / 100))) ** 0.9 for start in starts]
            values = mask_probabilities(torch.tensor(step), steps, blocks).tolist()
            assert values == pytest.approx(expected, abs=1e-5)
    assert mask_probabilities(150.0, 600, 3)[0].item() == pytest.approx(0.5**0.9)
    assert not mask_probabilities(500, 600, 4).any()


def test_a_loaded_model_masks_where_training_does():
    model = eomt()
    assert model.masked == (False, False)
    model.load_state_dict(model.state_dict() | {"mask_probabilities": torch.tensor([0.4, 0.9])})
    assert model.masked == (False, True)
    images = torch.randn(1, 3, 32, 48)
    assert len(list(model.predictions(images))) == 2


def test_recomputed_blocks_give_the_same_gradients():
    model, images = eomt().train(), torch.randn(1, 3, 32, 48)
    gradients = []
    for again in (False, True):
        model.encoder.recompute = again
        model.mask_probabilities.fill_(1.0)
        outputs = model.train_outputs(images)
        loss = sum(mask.square().sum() for mask in outputs["masks"])
        gradients.append(torch.autograd.grad(loss, model.queries)[0])
    assert torch.allclose(*gradients, atol=1e-5)


def test_the_attention_of_joint_blocks_is_otherwise_unchanged():
    model = eomt()
    block = model.joint_blocks()[0]
    assert type(block.attention) is JointAttention
    z = torch.randn(2, 9, 16)
    assert torch.equal(block.attention(z, None, Joint(None, None)), block.attention(z))
    assert {n.split(".", 1)[0] for n in model.state_dict()} == {
        "vit", "queries", "upscale", "mask_head", "class_head", "mask_probabilities",
    }  # fmt: skip


def test_other_sizes_are_padded_and_windows_average_scores():
    model, images = eomt(), torch.randn(1, 3, 30, 44)
    assert model(images).shape == (1, 5, 8, 11)
    assert torch.equal(model(images), model(F.pad(images, (0, 4, 0, 2)))[..., :11])
    split = eomt(window=32)
    split.load_state_dict(model.state_dict())
    large = torch.randn(1, 3, 32, 48)  # windows at columns 0 and 16
    with torch.no_grad():
        one, two = model.scores(large[..., :32]), model.scores(large[..., 16:])
        scores = split(large).exp()
    assert torch.allclose(scores[..., :4], one[..., :4], atol=1e-5)
    assert torch.allclose(scores[..., 4:8], (one[..., 4:] + two[..., :4]) / 2, atol=1e-5)


def test_masks_and_classes_fit_into_one_tensor():
    model, images = eomt(output="masks"), torch.randn(2, 3, 30, 48)
    values = model(images)
    masks, classes = unpacked(values, 5, (8, 12))
    expected = list(model.predictions(F.pad(images, (0, 0, 0, 2))))[-1]
    assert values.shape == (2, 6, 6 + 96)
    assert torch.equal(masks, expected[0]) and torch.equal(classes, expected[1])


@pytest.mark.parametrize(
    "vit,options,code",
    [
        ({"attention": "axial", "head": "gap", "class_token": False}, {}, "model.unsupported"),
        ({"positions": "relative"}, {}, "model.unsupported"),
        ({}, {"joint": 5}, "model.config"),
        ({}, {"output": "boxes"}, "model.config"),
        ({}, {"window": 20}, "model.config"),
        ({}, {"window": 32, "output": "masks"}, "model.config"),
    ],
)
def test_impossible_models_are_refused(vit, options, code):
    with pytest.raises(Error) as error:
        eomt(vit, **options)
    assert error.value.code == code


def test_the_scores_of_classes_are_sums_over_queries():
    masks, classes = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 6)
    expected = torch.einsum("bqk,bqhw->bkhw", classes.softmax(-1)[..., :-1], masks.sigmoid())
    assert torch.allclose(semantic_scores(masks, classes), expected, atol=1e-6)
    assert default_joint(12) == 3


# segments and instances


def outputs(count=12, classes=4):
    """Queries with smooth masks that overlap and, most of them, a sure class."""
    rough = torch.randn(1, count, 4, 5) * 4 - 4
    masks = F.interpolate(rough, (16, 20), mode="bicubic")
    logits = torch.randn(1, count, classes + 1)
    logits[0, torch.arange(count), torch.randint(0, classes + 1, (count,))] += 6
    return masks, logits


@pytest.fixture
def processor():
    pytest.importorskip("transformers")
    from transformers.models.eomt.image_processing_eomt import EomtImageProcessor

    return EomtImageProcessor(size={"shortest_edge": 32, "longest_edge": 40})


@pytest.mark.parametrize("stuff", [(), (0, 2)])
@pytest.mark.parametrize("visible", [0.8, 0.3])
def test_panoptic_segments_are_those_of_transformers(processor, stuff, visible):
    from transformers.models.eomt.image_processing_eomt import compute_segments, remove_low_and_no_objects

    segments = 0
    for seed in range(8):
        torch.manual_seed(seed)
        masks, classes = (values[0] for values in outputs())
        own = panoptic(masks, classes, stuff, visible=visible)
        scores, labels = classes.softmax(-1).max(-1)
        kept = remove_low_and_no_objects(masks, scores, labels, 0.8, 4)
        owner, info = compute_segments(*kept, list(stuff), 0.5, visible)
        assert torch.equal(own.owner, owner)
        assert own.classes == tuple(part["label_id"] for part in info)
        assert own.scores == pytest.approx([part["score"] for part in info], abs=1e-5)
        segments += len(info)
    assert segments > 8


def test_without_sure_queries_there_are_no_segments():
    masks, classes = torch.randn(5, 8, 8), torch.zeros(5, 4)
    assert panoptic(masks, classes).classes == () and (panoptic(masks, classes).owner == -1).all()


def test_instances_are_the_best_pairs_of_queries_and_classes():
    masks, classes = (values[0] for values in outputs())
    own = instances(masks, classes, best=10)
    shares, inside = classes.softmax(-1)[:, :-1], masks > 0
    rows = []
    for query, label in torch.cartesian_prod(torch.arange(12), torch.arange(4)).tolist():
        sure = masks[query].sigmoid()[inside[query]].sum() / (inside[query].sum() + 1e-6)
        rows.append((shares[query, label].item(), (shares[query, label] * sure).item(), label, query))
    best = sorted(sorted(rows, reverse=True)[:10], key=lambda row: -row[1])
    assert own.scores.tolist() == pytest.approx([row[1] for row in best], abs=1e-6)
    assert own.classes.tolist() == [row[2] for row in best]
    assert all(torch.equal(mask, inside[row[3]]) for mask, row in zip(own.masks, best, strict=True))


def test_scores_of_instances_are_those_of_transformers(processor):
    masks, classes = outputs()
    fine = F.interpolate(masks, (32, 40), mode="bilinear")
    result = type("Outputs", (), {"masks_queries_logits": masks, "class_queries_logits": classes})
    expected = processor.post_process_instance_segmentation(result, [(32, 40)], threshold=0.5)[0]
    own = instances(fine[0], classes[0], best=48)
    scores = dict.fromkeys(round(score, 4) for score in own.scores.tolist())
    assert expected["segments_info"]
    assert all(round(part["score"], 4) in scores for part in expected["segments_info"])


def test_masks_at_the_pixels_of_the_image_leave_the_padding_out():
    masks = torch.randn(3, 8, 8)
    expected = F.interpolate(masks[None, :, :6], (12, 16), mode="bilinear")[0]
    assert torch.allclose(masks_at_pixels(masks, (24, 32), (12, 16), 4.0), expected, atol=1e-5)
