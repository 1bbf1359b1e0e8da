"""Every named model has exactly the published number of parameters, and the published cost."""

import subprocess
import sys

import pytest
import torch
from refusals import refused

from vitkit.metrics.cost import flops, parameters
from vitkit.models.variants import NAMED, build, configure, skeleton, variant

PUBLISHED = {name: published for name, published in NAMED.items() if published}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_variant_has_the_published_parameter_count(name):
    assert parameters(skeleton(variant(name))) == PUBLISHED[name].parameters


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("ViT-S/16", {"head": "gap"}, 22_049_896),
        ("ViT-S/32", {"head": "gap"}, 22_878_184),
        ("ViT-B/16", {"head": "gap"}, 86_566_120),
        ("ViT-B/32", {"head": "gap"}, 88_222_696),
        ("ViT-B/16", {"image_size": 384}, 86_859_496),
        ("ViT-B/32", {"image_size": 384}, 88_297_192),
        ("ViT-L/16", {"image_size": 384}, 304_715_752),
        ("ViT-L/32", {"image_size": 384}, 306_632_680),
        ("R50+ViT-B/16", {"image_size": 384}, 98_950_952),
        ("ViT-L/16", {"image_size": 512}, 305_174_504),
        ("ViT-H/14", {"image_size": 518}, 633_470_440),
        ("ViT-B/16", {"representation": 768, "classes": 21_843}, 103_186_515),
        ("ViT-B/32", {"representation": 768, "classes": 21_843}, 104_843_091),
        ("ViT-L/16", {"representation": 1024, "classes": 21_843}, 326_740_307),
        ("ViT-L/32", {"representation": 1024, "classes": 21_843}, 328_949_075),
        ("ViT-H/14", {"representation": 1280, "classes": 21_843}, 660_385_363),
        ("ViT-B/16", {"classes": 21_843}, 102_595_923),
    ],
)
def test_counts_at_other_sizes_and_heads(name, options, expected):
    assert parameters(skeleton(configure(name, **options))) == expected


@pytest.mark.parametrize("name", [n for n, p in PUBLISHED.items() if p.gmac])
@pytest.mark.slow
def test_cost_is_within_a_thousandth_of_the_published(name):
    model = skeleton(variant(name))
    for pixels, gmac in ((224, PUBLISHED[name].gmac), (384, PUBLISHED[name].gmac_384)):
        if gmac:
            counted = flops(model, (pixels, pixels)) / 2e9
            last_digit = 10.0 ** -len(str(gmac).partition(".")[2])  # some are printed with two digits only
            assert abs(counted - gmac) <= max(1e-3 * gmac, 0.51 * last_digit)


@pytest.mark.parametrize(
    ("name", "pixels", "gmac"),
    [
        ("ViT-H/14", 392, 544.95),
        ("ViT-L/16", 512, 361.99),
        ("ViT-H/14", 518, 1016.7),
        ("ViT-g/14", 384, 798.2),
        ("ViT-G/14", 384, 1429.95),  # 27 x 27 patches, as in Scaling ViT's table
    ],
)
def test_cost_at_high_resolution(name, pixels, gmac):
    assert flops(skeleton(variant(name)), (pixels, pixels)) / 2e9 == pytest.approx(gmac, rel=1.5e-3)


@pytest.mark.parametrize(
    ("name", "exaflops"), [("ViT-B/16", 224), ("ViT-L/32", 196), ("ViT-L/16", 783), ("R50+ViT-B/16", 274)]
)
def test_seven_epochs_of_jft_cost_what_table_6_says(name, exaflops):
    images = 303e6 * 7
    assert images * 3 * flops(skeleton(variant(name)), (224, 224)) / 1e18 == pytest.approx(exaflops, abs=0.6)


def test_counting_does_not_change_the_model():
    model = skeleton(variant("ViT-Ti/16")).train()
    flops(model, (224, 224))
    assert model.training


@pytest.mark.parametrize("patch", [1, 7, 14, 20, 50, 300])
def test_any_patch_size_builds(patch):
    config = variant(f"ViT-Ti/{patch}")
    assert config.patch == patch and config.image_size[0] % patch == 0


def test_published_spellings_mean_the_same():
    assert variant("ViT-B_16") == variant("ViT-B/16")
    assert variant("R50x1+ViT-B/32") == variant("R50+ViT-B/32")
    assert variant("BiT-M-R50x1") == variant("BiT-R50x1")


def test_r_ti_16_has_stride_32_as_published():
    assert variant("R+ViT-Ti/16").stride == 32
    assert variant("R+ViT-Ti/16").tokens == 50


@pytest.mark.parametrize(
    "name",
    [
        "ViT-X/16", "ViT-B", "ViT-B/0", "R18+ViT-B/16", "R50+ViT-B/8", "BiT-R18x1", "BiT-R50x0", "", "vit",
        "AxialResNet-18", "AxialResNet",
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with refused("model.unknown", name, "known"):
        variant(name)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with refused("model.config", "pool", "head"):
        build("ViT-Ti/16", pool="gap")


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    a, b, c = (build("ViT-Ti/16", seed=seed, classes=2) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.project.weight, c.project.weight)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R50x1"])
@pytest.mark.slow
def test_a_fresh_model_does_not_bring_an_algebra_system_along(name):
    code = f"import sys; from vitkit.models.variants import fresh, variant; fresh(variant({name!r})); "
    ended = subprocess.run([sys.executable, "-c", code + "sys.exit('sympy' in sys.modules)"])
    assert ended.returncode == 0


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R50x1"])
@pytest.mark.slow
def test_names_and_shapes_alone_do_not_bring_a_compiler_along(name):
    code = f"import sys; from vitkit.models.variants import skeleton, variant; skeleton(variant({name!r})); "
    ended = subprocess.run([sys.executable, "-c", code + "sys.exit('torch._dynamo' in sys.modules)"])
    assert ended.returncode == 0
