"""Instance segmentation: its loss as defined, what is learned and compared, and its answers."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_models import NAMES, instance_segmenter, model_of, photograph, vit
from PIL import Image
from refusals import refused
from test_cli import run

import vitkit
from vitkit.data.order import Order
from vitkit.data.run_lengths import counts_of, mask_of, parse_counts
from vitkit.data.sources.shapes import shapes
from vitkit.data.sources.source import Source
from vitkit.data.target_views import BoxView
from vitkit.data.targets import Target, Targets, tight_box
from vitkit.data.views import View, normalise
from vitkit.metrics.overlaps import Detections, flattened, overlap, restored
from vitkit.models.card import Preprocessing
from vitkit.models.dense.eomt import EomtConfig, unpacked
from vitkit.models.dense.feature_map import cells_of
from vitkit.models.dense.mask_criterion import largest_objects, shifted
from vitkit.models.dense.segments import instances, instances_at_pixels, masks_at_pixels
from vitkit.ops.points import even_points
from vitkit.tasks.instances import Instances, detected_at_pixels, owners
from vitkit.tasks.task import Evaluation

TASK = Instances(points=60, objects=3)
SIZE = (32, 48)


def batch_of(task, model, step=5):
    """Two images with four and with one object, whose pixels an int16 map gives, and the random numbers."""
    generator = torch.Generator().manual_seed(0)
    segments = torch.full((2, *SIZE), -1, dtype=torch.int16)
    for number, (top, left, side) in enumerate(((0, 0, 12), (4, 20, 20), (20, 4, 9), (26, 30, 5))):
        segments[0, top : top + side, left : left + side] = number
    segments[1, 8:24, 8:40] = 0
    batch = {
        "image": torch.randint(0, 255, (2, 3, *SIZE), dtype=torch.uint8, generator=generator),
        "segments": segments, "classes": torch.tensor([[0, 2, 1, 2], [1, -1, -1, -1]]),
        "place": torch.arange(2),
    }  # fmt: skip
    return task.prepare(model, Order(2, 2, 3))(step, batch)


def defined_loss(task, model, batch, objects):
    """The sum over predictions, written out with one binary mask for each object and SciPy's assignment.

    objects: of each image the numbers of those that are learned, in the order of their points
    """
    optimize = pytest.importorskip("scipy.optimize")
    p, total, count, weight = model.preprocessing, 0.0, sum(map(len, objects)), 0.0
    outputs = model(normalise(batch["image"], p.mean, p.std), train=True, drawn=batch["drawn"])
    entropies = []
    for n, (masks, classes) in enumerate(zip(outputs["masks"], outputs["classes"], strict=True)):
        for image, numbers in enumerate(objects):
            true = torch.stack([batch["segments"][image] == k for k in numbers]).float()
            labels = batch["classes"][image][list(numbers)]
            shifts = batch["shifts"][image, n]
            points = shifted(even_points(task.points, true.device), shifts[-1:])[0]
            at = partial(F.grid_sample, grid=2 * points[None, None] - 1, align_corners=False)
            logits, target = at(masks[image][None])[0, :, 0], at(true[None])[0, :, 0]
            cost = torch.zeros(len(numbers), len(logits))
            for t in range(len(numbers)):
                for q in range(len(logits)):
                    share = logits[q].sigmoid()
                    dice = 1 - (2 * (share * target[t]).sum() + 1) / (share.sum() + target[t].sum() + 1)
                    binary = F.binary_cross_entropy_with_logits(logits[q], target[t])
                    cost[t, q] = 5 * binary + 5 * dice - 2 * classes[image, q].softmax(0)[labels[t]]
            rows, columns = optimize.linear_sum_assignment(cost.detach().numpy())
            wanted = torch.full((len(logits),), len(NAMES))
            for t, q in zip(rows, columns, strict=True):
                wanted[q] = labels[t]
                own = task.criterion.uncertain_points(masks[image, q][None], shifts[t][None])
                grid = 2 * own[None] - 1
                z = F.grid_sample(masks[image, q][None, None], grid, align_corners=False).flatten()
                y = F.grid_sample(true[t][None, None], grid, align_corners=False).flatten()
                share = z.sigmoid()
                dice = 1 - (2 * (share * y).sum() + 1) / (share.sum() + y.sum() + 1)
                total = total + 5 * (F.binary_cross_entropy_with_logits(z, y) + dice) / count
            weights = torch.where(wanted == len(NAMES), 0.1, 1.0)
            entropies.append((F.cross_entropy(classes[image], wanted, reduction="none") * weights).sum())
            weight += float(weights.sum()) if n == 0 else 0.0
    return total + 2 * sum(entropies) / weight


def test_the_loss_and_its_gradients_are_those_of_the_definition():
    model = TASK.build(instance_segmenter()).train()
    TASK.begin(model, 100)
    batch = batch_of(TASK, model)
    kept = ((1, 0, 2), (0,))  # of four objects the three largest
    loss, expected = TASK.objective(model)(model, batch)["loss"], defined_loss(TASK, model, batch, kept)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(v, parameters, allow_unused=True) for v in (loss, expected))
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or torch.allclose(a, b, atol=1e-4 * float(b.abs().max()) + 1e-6), name
    other = defined_loss(TASK, model, batch, ((0, 2, 3), (0,)))  # a control: other objects, another loss
    assert abs(loss.item() - other.item()) > 1e-2


def test_random_numbers_are_a_function_of_the_step_and_the_place():
    model = instance_segmenter()
    first, again, later = (batch_of(TASK, model, step) for step in (5, 5, 6))
    assert first["shifts"].shape == (2, 2, 4, 2) and first["drawn"].shape == (2, 1, 5)
    assert all(torch.equal(first[name], again[name]) for name in ("shifts", "drawn"))
    assert not torch.equal(first["shifts"], later["shifts"])
    one = {name: value[1:] for name, value in batch_of(TASK, model).items()}
    alone = TASK.prepare(model, Order(2, 2, 3))(5, {n: one[n] for n in ("place", "classes")})
    assert torch.equal(alone["shifts"], first["shifts"][1:])


def test_the_largest_objects_are_kept_and_the_pixels_of_others_are_no_objects():
    owner = torch.tensor([[[0, 0, 1, 1], [1, 2, 2, 2], [2, 3, -1, -1]]], dtype=torch.int16)
    labels = torch.tensor([[4, 5, 6, 7]])
    kept, classes = largest_objects(owner, labels, 2)
    assert classes.tolist() == [[6, 5]]
    assert kept.tolist() == [[[-1, -1, 1, 1], [1, 0, 0, 0], [0, -1, -1, -1]]]
    same = largest_objects(owner, labels, 4)
    assert same[0] is owner and same[1] is labels
    few = largest_objects(torch.full((1, 2, 2), -1), torch.full((1, 3), -1), 2)
    assert few[1].tolist() == [[-1, -1]]


@pytest.mark.parametrize("size", [(91, 150), (14, 24), (9, 200), (1, 1)])
def test_masks_are_computed_where_they_are(size):
    generator = torch.Generator().manual_seed(3)
    masks, classes = torch.randn(9, 8, 12, generator=generator), torch.randn(9, 4, generator=generator)
    for number, place in enumerate([(0, 0), (6, 11), (3, 5)]):  # at corners, in the middle, and nowhere
        masks[number] = -1.0
        masks[(number, *place)] = 5.0
    masks[3], masks[4], masks[5, :, 3:] = -2.0, 3.0, -4.0
    fit = (28, 48)
    whole = instances(masks_at_pixels(masks, fit, size, 4.0), classes, 20)
    parts = instances_at_pixels(masks, classes, fit, size, 4.0, 20)
    assert torch.allclose(parts.scores, whole.scores) and torch.equal(parts.classes, whole.classes)
    assert torch.equal(parts.masks, whole.masks) and parts.masks.any()
    config = EomtConfig(
        vit=vit(SIZE), classes=3, queries=9, joint=1, upscale=1, output="masks", detections=20
    )
    found = detected_at_pixels((masks, classes), fit, size, config, ("a", "b", "c"))
    seen = [k for k in range(20) if whole.masks[k].any()]
    assert [one.score for one in found] == pytest.approx(whole.scores[seen].tolist())
    for one, k in zip(found, seen, strict=True):
        mask = whole.masks[k].numpy()
        assert np.array_equal(one.mask.pixels, mask) and one.box == tuple(tight_box(mask).tolist())
        assert np.array_equal(one.mask.counts, counts_of(mask))


def test_overlaps_survive_the_way_between_processes():
    target = shapes()["test"].targets.read(3)
    masks = np.concatenate([target.instances, target.instances[:1] & False])
    scores, classes = np.linspace(0.9, 0.1, len(masks)), np.append(target.labels, 1)
    images = [overlap(Detections(scores=scores, classes=classes, masks=masks), target)]
    images.append(overlap(Detections(masks=masks[:0]), target))
    row = np.concatenate([flattened(image) for image in images])
    for image in images:
        other, row = restored(row)
        for name, value in vars(image).items():
            assert np.array_equal(getattr(other, name), value) and getattr(other, name).dtype == value.dtype
    assert not len(row)


def read_shape(index):
    target = shapes()["test"].targets.read(index)
    return Target(**vars(target) | {"mask": None})


def source(kinds=("boxes", "instances")):
    drawn = shapes()["test"]
    return Source(
        "objects", NAMES + ("kite",), list(range(6)), np.zeros(6, np.int64), drawn.fetch,
        targets=Targets(read_shape, frozenset(kinds), 4),
    )  # fmt: skip


def test_evaluation_compares_the_objects_that_are_answered():
    config = EomtConfig(
        vit=vit((48, 48)), classes=4, queries=6, joint=1, upscale=1, output="masks", detections=9
    )
    model, task, indices = model_of(config), Instances(points=50), range(6)
    model.labels = source().classes
    pictures = [Image.fromarray(source().fetch(i)).resize((48, 48)) for i in indices]
    images = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    p = model.preprocessing = Preprocessing(resize="fit")

    def forward(model, images):
        with torch.no_grad():
            return model(normalise(images, p.mean, p.std))

    context = Evaluation(forward=forward, source=source())
    batches = [{"image": images[part], "index": torch.arange(6)[part]} for part in (slice(3, 6), slice(0, 3))]
    metrics = task.evaluate(model, batches, context)
    assert metrics.index.tolist() == [0, 1, 2, 3, 4, 5] and metrics.images == 6 and metrics.loss > 0
    overlaps = []
    for index in indices:
        target = read_shape(index)
        found = task.answers(model, forward(model, images[index : index + 1]), 1, [target.size])[0].all
        detected = Detections(
            scores=np.array([one.score for one in found]),
            classes=np.array([model.labels.index(one.label) for one in found]),
            masks=np.array([one.mask.pixels for one in found], bool).reshape(-1, *target.size),
        )
        overlaps.append(overlap(detected, target))
        for one in found:
            rows, columns = np.nonzero(one.mask.pixels)
            assert one.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    assert max(image.iou.max() for image in overlaps) > 0.1
    for image, expected in zip(metrics.overlaps, overlaps, strict=True):
        some = image.areas > 0  # an object without pixels is no answer
        assert np.array_equal(image.iou[some], expected.iou)
        assert image.scores[some] == pytest.approx(expected.scores, abs=1e-6)
    other = task.evaluate(model, [batches[0] | {"image": images[:3]}, batches[1]], context)
    assert other.loss != metrics.loss  # a control: other images


def test_the_objects_of_an_evaluation_are_those_of_a_view_without_randomness():
    for index in range(6):
        target = read_shape(index)
        view = BoxView(size=(96, 128), scale=(1, 1), flip=False, photometric=0, most=4, segments=True)
        _, arrays = view(shapes()["test"].fetch(index), target, np.random.default_rng(0))
        batch = owners(target, (96, 96), (96, 128))
        assert np.array_equal(batch["owner"][0].numpy(), arrays["segments"])
        classes = arrays["classes"][arrays["classes"] >= 0].tolist()
        assert batch["labels"].tolist() == [[*classes, -1]]


def test_a_new_model_takes_the_blocks_of_another_eomt_and_the_queries_of_the_task():
    own = model_of(EomtConfig(vit=vit(SIZE), classes=3, queries=7, joint=2, upscale=2))
    new = Instances(queries=7).adapt(own, ("a", "b"), SIZE, 0)
    assert (new.config.joint, new.config.upscale, new.config.output) == (2, 2, "masks")
    assert torch.equal(new.queries, own.queries) and new.config.task == "instances"
    assert Instances().adapt(own, ("a", "b"), SIZE, 0).config.queries == 200


def test_a_model_keeps_its_threshold_and_how_many_objects_it_answers_with(tmp_path):
    task, start = Instances(detections=2, threshold=0.001), model_of(EomtConfig(vit=vit(SIZE), joint=1))
    new = task.build(task.adapt(start, NAMES, SIZE, 0))
    assert new.config.detections == 2 and new.reject_below == 0.001
    model, image = instance_segmenter(detections=2, queries=30), photograph(40, 60)
    assert len(vitkit.predict(model, image, reject=0.0)) == 2
    model.reject_below = 0.999
    assert vitkit.predict(model, image) == []


@pytest.mark.parametrize("kinds", [("boxes",), ("mask",), ()])
def test_data_without_masks_of_objects_is_refused(kinds, tmp_path):
    with refused("data.labels", "polygons"):
        TASK.check_source(source(kinds))
    TASK.check_source(source())  # a control
    for split in ("train", "test"):
        for folder in ("images", "labels"):
            (tmp_path / "data" / folder / split).mkdir(parents=True)
        Image.fromarray(photograph(40, 40)).save(tmp_path / "data" / "images" / split / "a.png")
        (tmp_path / "data" / "labels" / split / "a.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    yaml = "train: images/train\ntest: images/test\nnames: [one, two]\n"
    (tmp_path / "data" / "data.yaml").write_text(yaml)
    small = {"model": "ViT-Ti/8", "steps": 1, "device": "cpu", "workers": 0, "out": tmp_path / "run"}
    with refused("data.labels"):
        vitkit.finetune(str(tmp_path / "data"), task="instances", **small)


def test_a_model_of_another_output_has_no_objects():
    with refused("model.unsupported"):
        TASK.check_head(model_of(EomtConfig(vit=vit(SIZE), classes=3, queries=5, joint=1)))


def test_objects_are_printed_drawn_and_written(tmp_path, capsys):
    pixels, file = photograph(45, 70), tmp_path / "model.safetensors"
    vitkit.save(instance_segmenter(), file)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    model = vitkit.load(file)
    assert (model.task, model.config.output) == ("instances", "masks")
    objects = vitkit.predict(model, pixels, reject=0.001)
    assert objects and all(one["mask"].shape == (45, 70) and one["mask"].dtype == bool for one in objects)
    words = ["predict", file, tmp_path / "a.png", "--device", "cpu", "--reject", "0.001"]
    files = ["--draw", tmp_path / "drawn", "--coco", tmp_path / "objects.json"]
    assert run(*words, "--json", *files) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    results = json.loads((tmp_path / "objects.json").read_text())
    assert len(answer["detections"]) == len(objects)
    for one, printed, entry in zip(objects, answer["detections"], results, strict=False):
        assert printed["label"] == one["label"] and printed["box"] == one["box"]
        for mask in (printed["mask"], entry["segmentation"]):
            drawn = mask_of(parse_counts(mask["counts"], "test"), tuple(mask["size"]))
            assert np.array_equal(drawn, one["mask"])
    picture = np.asarray(Image.open(tmp_path / "drawn" / "a.png"))
    union = np.any([one["mask"] for one in objects], axis=0)
    assert (picture != pixels).any(-1)[union].mean() > 0.9
    with refused("request.conflict"):
        from vitkit.commands.answer_files import answer_files

        answer_files(model, (), None, masks=tmp_path / "masks")
    grid = cells_of(SIZE, model.config.cell)
    masks, classes = unpacked(torch.zeros(1, *TASK.output_shape(model.config)[1:]), 3, grid)
    assert masks.shape == (1, 5, *grid) and classes.shape == (1, 5, 4)


def test_pictures_of_training_show_masks():
    view = TASK.target_view(View(size=(96, 96), crop="fit"), source())
    pixels = shapes()["test"].fetch(0)
    image, arrays = view(pixels, read_shape(0), np.random.default_rng(1))
    batch = {name: torch.from_numpy(array)[None] for name, array in arrays.items()}
    batch["image"] = torch.from_numpy(image).permute(2, 0, 1)[None]
    shown = TASK.visible(instance_segmenter(), Order(1, 1), 0, batch)
    without = TASK.visible(
        instance_segmenter(), Order(1, 1), 0, batch | {"segments": batch["segments"] * 0 - 1}
    )
    assert shown.shape == without.shape and (shown != without).any()
