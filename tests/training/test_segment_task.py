"""The task of segmentation: heads learn drawn shapes, are evaluated at full size, and answer with masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitkit.data.run_lengths import mask_of, parse_counts
from vitkit.data.sources.source import Source
from vitkit.data.targets import Target, Targets
from vitkit.data.views import View, normalise
from vitkit.errors import Error
from vitkit.models.card import Preprocessing
from vitkit.models.dense.eomt import Eomt, mask_probabilities
from vitkit.models.dense.linear_segmenter import LinearSegmenter
from vitkit.models.dense.pixel_loss import pixel_loss
from vitkit.models.variants import build
from vitkit.tasks.segment import ClassMask, Segment, class_map
from vitkit.tasks.task import Evaluation, option_names, task_class

LABELS = ("ground", "box", "ball")
SIZE = (40, 60)
VIT = {"width": 24, "depth": 2, "heads": 2, "hidden": 48, "patch": 8, "image_size": (48, 64), "classes": 4}


def drawn(index):
    """Mask and picture of an image with one object, whose colour is its class."""
    rng = np.random.default_rng(index)
    mask = np.zeros(SIZE, np.uint8)
    y, x = rng.integers(0, 20, 2)
    mask[y : y + 18, x : x + 25] = 1 + index % 2
    picture = (80 * mask + rng.integers(0, 40, SIZE)).astype(np.uint8)[..., None].repeat(3, 2)
    mask[0, :3] = 255
    return Target(size=SIZE, mask=mask), picture


def read(index):
    return drawn(index)[0]


SOURCE = Source(
    "shapes", LABELS, list(range(20)), np.zeros(20, np.int64), lambda i: drawn(i)[1],
    targets=Targets(read=read, kinds=frozenset({"mask"})),
)  # fmt: skip


def model_of(task, vit=None):
    start = build("ViT-Ti/16", seed=0, **(VIT | (vit or {})))
    model = task.adapt(start, LABELS, (48, 64), 0)
    model.labels, model.task = LABELS, task.name
    return task.build(model)


def evaluation_batch(indices):
    pictures = np.stack([drawn(i)[1] for i in indices])
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    images = F.interpolate(images, (43, 64), mode="bilinear", antialias=True)  # fitted into 48 x 64
    return {"image": F.pad(images, (0, 0, 0, 5)), "index": torch.tensor(indices)}


def evaluated(task, model, indices=range(20), forward=None):
    def run(model, images):
        p = model.preprocessing
        with torch.no_grad():
            return model.eval()(normalise(images, p.mean, p.std))

    batches = [evaluation_batch(list(indices)[i : i + 4]) for i in range(0, len(indices), 4)]
    return task.evaluate(model, batches, Evaluation(forward=forward or run, source=SOURCE))


@pytest.mark.parametrize("head", ["linear", "eomt"])
def test_a_head_learns_shapes_from_their_colours(head):
    task = Segment(head=head, queries=6, points=200, scale=(0.8, 1.2))
    model = model_of(task)
    assert isinstance(model, LinearSegmenter if head == "linear" else Eomt)
    before = evaluated(task, model)
    view, steps = task.target_view(View(size=(48, 64), crop="squash", flip=True), SOURCE), 50
    objective, optimizer = task.objective(model), torch.optim.AdamW(model.parameters(), 3e-3)
    task.begin(model, steps)
    model.train()
    for step in range(steps):
        rows = [view(drawn(i)[1], read(i), np.random.default_rng(i)) for i in range(4 * step, 4 * step + 4)]
        images = torch.stack([torch.from_numpy(pixels.copy()).permute(2, 0, 1) for pixels, _ in rows])
        masks = torch.stack([torch.from_numpy(arrays["mask"].copy()) for _, arrays in rows])
        losses = objective(model, {"image": images, "mask": masks})
        losses["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        task.after_update(model)
    after = evaluated(task, model)
    assert after.miou > max(0.6, before.miou + 0.2)
    assert after.loss < 0.5 * before.loss
    if head == "eomt":
        assert model.step == steps and not model.mask_probabilities.any() and model.masked == (False,)


def test_eomt_counts_its_steps_in_checkpoints_but_not_in_files(tmp_path):
    from vitkit.weights.load import load
    from vitkit.weights.save import save

    task = Segment(head="eomt", queries=4)
    model = model_of(task)
    task.begin(model, 60)
    assert model.mask_probabilities.tolist() == [1.0]
    for _ in range(15):
        task.after_update(model)
    expected = mask_probabilities(15, 60, 1)
    assert torch.equal(model.mask_probabilities, expected) and 0 < expected < 1
    resumed = model_of(task)
    resumed.load_state_dict(model.state_dict())
    task.begin(resumed, 60)
    assert resumed.step == 15 and torch.equal(resumed.mask_probabilities, expected)
    save(model, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors")
    assert "step" not in loaded.state_dict() and loaded.masked == (bool(expected >= 0.5),)


def test_predictions_are_compared_at_the_original_pixels():
    """Logits of the view that are the true masks give a mean IoU near 1, and an exact confusion."""
    task = Segment(upscale=3)  # cells of one pixel of the view
    model = model_of(task)
    model.preprocessing = Preprocessing(resize="fit")

    order = iter(range(20))

    def truth(model, images):
        rows = []
        for _ in images:
            mask = read(next(order)).mask
            onehot = F.one_hot(torch.from_numpy(np.where(mask == 255, 0, mask)).long(), 3)
            fine = F.interpolate(onehot.permute(2, 0, 1)[None].float(), (43, 64), mode="bilinear")
            rows.append(F.pad(fine, (0, 0, 0, 5)))
        return 20 * torch.cat(rows)

    metrics = evaluated(task, model, forward=truth)
    assert metrics.miou > 0.95 and metrics.images == 20
    assert metrics.confusion.sum() == 20 * (40 * 60 - 3), "ignored pixels do not count"
    assert 0 < metrics.loss < 0.1


def test_the_view_of_training_is_scaled_to_the_window():
    view = View(size=(96, 128), crop="squash", flip=True, color_jitter=0.5)
    whole = Segment().target_view(view, SOURCE)
    assert (whole.size, whole.scale, whole.flip, whole.photometric) == ((96, 128), (0.5, 2.0), True, 0.5)
    part = Segment(window=64).target_view(view, SOURCE)
    assert (part.size, part.scale) == ((64, 64), (1.0, 4.0))


def test_losses_and_weights_of_classes_reach_the_objective():
    task = Segment(weighting="rare", dice=1.0, norm="batch", upscale=0).for_source(SOURCE)
    weights = torch.tensor(task.per_class)
    pixels = torch.tensor([sum((read(i).mask == k).sum() for i in range(20)) for k in range(3)])
    expected = 1 / torch.log(1.02 + pixels / pixels.sum())
    assert torch.allclose(weights, expected.float() / expected.mean(), atol=1e-5) and weights[0] < weights[1]
    model = model_of(task).train()
    batch = evaluation_batch([0, 1])
    batch["mask"] = torch.randint(0, 3, (2, 48, 64)).to(torch.uint8)
    torch.nn.init.normal_(model.classifier.weight)
    loss = task.objective(model)(model, batch)["loss"]
    logits = model(normalise(batch["image"], (0.5,) * 3, (0.5,) * 3))
    assert torch.allclose(loss, pixel_loss(logits, batch["mask"], 8.0, weights=weights, dice=1.0).mean())


@pytest.mark.parametrize(
    "vit", [{"head": "map", "class_token": False}, {"head": "gap", "final_norm": "pooled"},
            {"representation": 16}, {"mask_token": True}, {"head": "token+gap"}],
    ids=str,
)  # fmt: skip
def test_models_lose_what_only_a_classifier_reads(vit):
    model = model_of(Segment(), vit).train()
    model(torch.randn(1, 3, 48, 64)).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize(
    "task, other",
    [
        (Segment(upscale=0, norm="batch"), Segment(upscale=1)),
        (Segment(head="eomt", queries=7, joint=2, upscale=2), Segment(queries=9)),
    ],
    ids=["linear", "eomt"],
)
def test_a_model_keeps_the_sizes_of_its_own_head(task, other):
    own, again = model_of(task), Segment()
    torch.nn.init.normal_(own.vit.project.bias)
    new = again.adapt(own, LABELS, (48, 64), 1)
    state = own.state_dict()
    assert new.config == own.config
    assert all(torch.equal(state[name], tensor) for name, tensor in new.state_dict().items())
    changed = {"upscale": other.upscale} if other.upscale >= 0 else {"queries": other.queries}
    assert other.adapt(own, LABELS, (48, 64), 1).config == replace(own.config, **changed)
    assert isinstance(Segment(head="linear").adapt(own, LABELS, (48, 64), 1), LinearSegmenter)


def test_options_are_checked():
    assert task_class("segment") is Segment and "per_class" not in option_names(Segment)
    for options in ({"head": "fcn"}, {"weighting": "balanced"}, {"scale": (2.0, 1.0)}, {"upscale": 5}):
        with pytest.raises(Error) as error:
            Segment(**options)
        assert error.value.code == "recipe.value"
    with pytest.raises(Error) as error:
        Segment(window=20).configure(build("ViT-Ti/16", **VIT).config)
    assert error.value.code == "model.config"


def test_an_answer_is_the_class_of_each_pixel_of_the_original():
    task = Segment()
    model = model_of(task)
    model.preprocessing = Preprocessing(resize="fit")
    values = torch.randn(2, 3, 12, 16)
    wide, tall = task.answers(model, values, 2, [(60, 80), (90, 30)])
    assert wide.value.shape == (60, 80) and tall.value.shape == (90, 30)
    fine = F.interpolate(values[:1], (60, 80), mode="bilinear")[0]
    assert np.array_equal(wide.value, fine.argmax(0).numpy())
    part = F.interpolate(values[1:, :, :, :4], (90, 30), mode="bilinear")[0]  # 16 of 64 columns
    assert np.array_equal(tall.value, part.argmax(0).numpy())
    assert torch.equal(class_map(values[0], (48, 64), (48, 64), 4.0), torch.from_numpy(
        task.answers(model, values[:1], 2)[0].value
    ))  # fmt: skip


def test_an_answer_in_every_form():
    mask = np.zeros((4, 5), np.uint8)
    mask[1:3, 1:4] = 2
    answer = ClassMask(mask, LABELS, 1)
    assert answer.shares == [("ground", 0.7), ("ball", 0.3)] and answer.cells() == [("ground", 0.7)]
    content = answer.to_json()
    assert content["size"] == [4, 5] and [row["class"] for row in content["classes"]] == [0, 2]
    ball = content["classes"][1]["mask"]
    assert np.array_equal(mask_of(parse_counts(ball["counts"], "x"), (4, 5)), mask == 2)
    assert "ground" in answer.text("x.png") and "ball" not in answer.text("x.png")


def test_probabilities_and_back():
    values, task = torch.randn(2, 3, 4, 4), Segment()
    shares = task.activate(values)
    assert torch.allclose(shares.sum(1), torch.ones(2, 4, 4))
    assert torch.equal(task.invert(shares).argmax(1), values.argmax(1))


def test_data_without_masks_is_refused():
    source = Source("boxes", LABELS, [0], np.zeros(1, np.int64), lambda i: drawn(i)[1],
                    targets=Targets(read=read, kinds=frozenset({"boxes"})))  # fmt: skip
    with pytest.raises(Error) as error:
        Segment().check_source(source)
    assert error.value.code == "data.labels"
    Segment().check_source(SOURCE)
