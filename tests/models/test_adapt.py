"""adapt: a zero head and another resolution, the same features, and the old model left alone (Sec. 3.2)."""

import pytest
import torch
from refusals import refused

import vitkit
from vitkit.models.adapt import with_table
from vitkit.models.card import Origin, pair


def test_features_are_bit_equal_at_the_same_size_and_the_head_is_zero(small, small_hybrid, small_resnet):
    for model in (small(), small_hybrid(), small_resnet()):
        images = torch.randn(2, 3, *model.config.image_size)
        new = vitkit.adapt(model, classes=7)
        assert torch.equal(new.features(images), model.features(images))
        assert (new.head.weight == 0).all() and (new.head.bias == 0).all()
        assert new(images).shape == (2, 7)


def test_the_input_is_left_as_it_was(small):
    model = small()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    new = vitkit.adapt(model, classes=7, image_size=48)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.config.classes == 5 and model.config.image_size == (32, 32)


@pytest.mark.parametrize("method", [None, "timm"])
def test_positions_are_interpolated_by_the_named_convention(small, method):
    model = small()
    new = vitkit.adapt(model, image_size=(48, 24), resize=method)
    expected = vitkit.resize_positions(model.positions.table, (4, 4), (6, 3), method or "official")
    assert torch.equal(new.positions.table, expected)
    assert new.config.image_size == (48, 24) and new.config.position_resize == (method or "official")


@pytest.mark.parametrize("options", [{"positions": "2d"}, {"injection": "every"}, {"positions": "sincos2d"}])
def test_every_kind_of_positions_is_adapted(small, options):
    model = small(**options)
    images = torch.randn(1, 3, 48, 24)
    assert torch.equal(vitkit.adapt(model, image_size=(48, 24))(images), model(images))


def test_relative_positions_are_refused_at_another_size_but_kept_at_their_own(small):
    model = small(positions="relative")
    assert vitkit.adapt(model, classes=3).config.classes == 3
    with refused("model.unsupported", "(4, 4)", "(6, 6)"):
        vitkit.adapt(model, image_size=48)


def test_the_whole_head_goes_unless_the_representation_is_kept(small):
    model = small(representation=16)
    assert vitkit.adapt(model, classes=3).representation is None
    kept = vitkit.adapt(model, classes=3, keep_representation=True)
    assert torch.equal(kept.representation.weight, model.representation.weight)
    assert kept.head.weight.shape == (3, 16)


def test_mean_pooling_reads_the_patches_through_a_new_norm(small):
    model = small(registers=2)
    new = vitkit.adapt(model, classes=3, mean_pooling=True)
    assert (new.config.head, new.config.final_norm, new.config.class_token) == ("gap", "pooled", True)
    images = torch.randn(2, 3, 32, 32)
    patches, grid = model.patches(images)
    *_, before = list(model.encoder.states(model.embed(patches, grid), grid, model.inject(grid)))[:-1]
    last = model.encoder.blocks[-1](before)[:, 3:].mean(1)  # without the final norm
    expected = torch.nn.functional.layer_norm(last, (last.shape[1],), eps=model.config.norm_eps)
    assert torch.allclose(new.features(images), expected, atol=1e-5)
    again = vitkit.adapt(new, classes=2, mean_pooling=True)
    assert torch.equal(again.features(images), new.features(images))
    for other in (vitkit.build("BiT-R50x1", image_size=64), small(distilled=True)):
        with refused("model.unsupported", "pooling"):
            vitkit.adapt(other, classes=3, mean_pooling=True)


@pytest.mark.parametrize("kind", ["sincos2d", "sincos2d-mae"])
@pytest.mark.parametrize("options", [{}, {"class_position": False}, {"head": "gap"}, {"injection": "shared"}])
def test_fixed_positions_as_a_table_give_the_same_outputs(small, kind, options):
    model = small(positions=kind, **options)
    new = with_table(model)
    images = torch.randn(2, 3, 32, 32)
    assert new.config.positions == "1d" and torch.allclose(new(images), model(images), atol=1e-6)
    assert new.positions.table.requires_grad


def test_without_classes_the_head_stays(small):
    model = small(representation=16)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(vitkit.adapt(model, dropout=0.1)(images), model(images))


def test_labels_preprocessing_and_origin_travel(small):
    model = small()
    model.origin = Origin(source="somewhere")
    new = vitkit.adapt(model, labels=("cat", "dog"))
    assert new.config.classes == 2 and new.labels == ("cat", "dog")
    assert new.origin == model.origin and new.preprocessing == model.preprocessing


def test_training_fields_can_be_changed_and_others_not(small):
    assert vitkit.adapt(small(), dropout=0.1, stochastic_depth=0.2).config.stochastic_depth == 0.2
    with refused("model.unsupported", "width", "dropout"):
        vitkit.adapt(small(), width=64)
    with refused("data.labels", "3 labels", "2 classes"):
        vitkit.adapt(small(), classes=2, labels=("a", "b", "c"))


def test_a_size_that_does_not_fit_is_refused(small):
    with refused("model.input", "height 4", "fits: 8"):
        vitkit.adapt(small(), image_size=4)


def test_the_adapted_model_keeps_precision_and_mode(small):
    new = vitkit.adapt(small().double().train(), classes=2)
    assert new.head.weight.dtype == torch.float64 and new.training


def test_a_size_is_one_number_or_two(small, tmp_path):
    assert pair(24) == (24, 24) and pair((24, 16)) == (24, 16) and pair([24, 16]) == (24, 16)
    for wrong in ((24,), (24, 16, 3)):
        with refused("model.config", wrong):
            pair(wrong)
    assert small(image_size=24).config == small(image_size=[24, 24]).config
    assert vitkit.adapt(small(), image_size=[48, 24]).config.image_size == (48, 24)
    assert vitkit.build("BiT-R50x1", image_size=64).config.image_size == (64, 64)
    vitkit.save(small(), tmp_path / "m.pth", "timm")  # whose table tells no size of its own
    assert vitkit.load(tmp_path / "m.pth", image_size=32, heads=2).config.image_size == (32, 32)
