"""Our models against timm, transformers and torchvision: random weights in every tensor, float32."""

import pytest
import torch

import vitkit
from vitkit.models.resnet import StemConfig
from vitkit.weights.convert import compare, convert
from vitkit.weights.formats import bit, huggingface, official, timm, torchvision


def check(model, path, layout, limit):
    vitkit.save(model, path, {"official-bit": "official", "timm-bit": "timm"}.get(layout.name, layout.name))
    parity = compare(path, model, layout)
    assert not parity.skipped, parity.skipped
    assert parity.features is not None and parity.features <= limit
    assert parity.logits is None or parity.logits <= limit
    return parity


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gelu": "erf"},
        {"gelu": "erf", "qkv_bias": False},
        {"gelu": "erf", "head": "gap"},
        {"gelu": "erf", "head": "gap", "class_token": True, "final_norm": "pooled"},
        {"gelu": "erf", "head": "map"},
        {"gelu": "erf", "head": "map", "class_token": True},
        {"gelu": "erf", "layer_scale": True},
        {"gelu": "erf", "image_size": (24, 40)},
        {"gelu": "erf", "classes": 0},
        {"gelu": "erf", "channels": 1},
    ],
    ids=str,
)
def test_vit_equals_timm(small, tmp_path, options):
    check(small(**options), tmp_path / "m.safetensors", timm.LAYOUT, 1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"head": "gap"}, {"head": "map"}, {"representation": 32}, {"representation": 16}, {"channels": 1}],
    ids=str,
)
def test_official_files_mean_the_same_to_timm(small, tmp_path, options):
    parity = check(small(**options), tmp_path / "m.npz", official.LAYOUT, 1e-5)
    assert (parity.logits is None) == ("representation" in options)  # timm has no tanh layer


@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": False}, {"classes": 0}, {"classes": 0, "representation": 32}], ids=str
)
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_vit_equals_transformers(small, tmp_path, options, gelu):
    parity = check(small(gelu=gelu, **options), tmp_path / "m", huggingface.LAYOUT, 1e-5)
    assert parity.logits is not None or options == {"classes": 0}


def test_a_distilled_model_without_a_head_has_the_tokens_of_both_peers(small, tmp_path):
    model = small(gelu="erf", distilled=True, classes=0)
    for path, layout in ((tmp_path / "m.safetensors", timm.LAYOUT), (tmp_path / "m", huggingface.LAYOUT)):
        assert check(model, path, layout, 1e-5).logits is None


@pytest.mark.parametrize(
    ("options", "name", "format"),
    [
        ({"image_size": (24, 40)}, "m.pth", "torchvision"),
        ({"channels": 4}, "m.pth", "torchvision"),
        ({"channels": 4}, "m.npz", "official"),
        ({"stem": StemConfig(blocks=(1, 1), width=32), "patch": 1}, "m.npz", "official"),
        ({"stem": StemConfig(blocks=(), width=32), "patch": 1}, "m.pth", "timm"),
    ],
    ids=str,
)
def test_what_a_peer_cannot_build_is_written_and_not_compared(small, tmp_path, options, name, format):
    vitkit.save(small(gelu="erf", **options), tmp_path / "m.safetensors")
    result = convert(tmp_path / "m.safetensors", tmp_path / name, format=format)
    assert result.ok and result.parity.skipped and (tmp_path / name).exists()


@pytest.mark.parametrize(("options", "name"), [({"channels": 4}, "m.npz"), ({"width": 32}, "m.pth")], ids=str)
def test_resnets_that_timm_cannot_build_are_written_and_not_compared(small_resnet, tmp_path, options, name):
    vitkit.save(small_resnet(**options), tmp_path / "m.safetensors")
    result = convert(tmp_path / "m.safetensors", tmp_path / name, format="timm" if ".pth" in name else None)
    assert result.ok and result.parity.skipped and (tmp_path / name).exists()


@pytest.mark.parametrize("options", [{}, {"representation": 16}, {"classes": 0}], ids=str)
def test_vit_equals_torchvision(small, tmp_path, options):
    check(small(gelu="erf", **options), tmp_path / "m.pth", torchvision.LAYOUT, 1e-5)


@pytest.mark.parametrize(
    ("blocks", "patch"), [((1, 2), 1), ((2, 1, 1), 2), ((), 4)], ids=["two-stages", "patch-2", "root-alone"]
)
@pytest.mark.parametrize("layout", [timm.LAYOUT, official.LAYOUT], ids=["timm", "official"])
def test_hybrids_equal_timm(small_hybrid, tmp_path, blocks, patch, layout):
    model = small_hybrid(blocks=blocks, patch=patch, gelu="erf")
    check(model, tmp_path / ("m.pth" if layout.name == "timm" else "m.npz"), layout, 5e-5)


@pytest.mark.parametrize("layout", [bit.TIMM, bit.OFFICIAL], ids=["timm", "official"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"classes": 0},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"width": 128}, {"image_size": (40, 72)})),
    ],
    ids=str,
)
def test_resnets_equal_timm(small_resnet, tmp_path, layout, options):
    check(small_resnet(**options), tmp_path / ("m.pth" if layout is bit.TIMM else "m.npz"), layout, 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timm_name"),
    [
        ("ViT-Ti/16", "vit_tiny_patch16_224"),
        ("ViT-B/16", "vit_base_patch16_224"),
        ("R26+ViT-S/32", "vit_small_r26_s32_224"),
        ("R50+ViT-B/16", "vit_base_r50_s16_224"),
        ("R+ViT-Ti/16", "vit_tiny_r_s16_p8_224"),
        ("BiT-R50x1", "resnetv2_50x1_bit"),
    ],
)
def test_timms_own_models_load_and_answer_the_same(tmp_path, name, timm_name):
    """The other way round: timm builds and saves, we infer everything from the arrays."""
    import timm as library

    theirs = library.create_model(timm_name, num_classes=10).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = vitkit.load(tmp_path / "theirs.pth")
    images = torch.rand(1, 3, 224, 224) * 2 - 1
    with torch.no_grad():
        a, b = ours(images), theirs(images)
    limit = (1e-5 if name.startswith("ViT") else 5e-5) * max(1.0, float(b.abs().max()))
    assert (a - b).abs().max() <= limit
    expected = vitkit.build(name, classes=10).config
    assert (ours.config.width, ours.config.classes) == (expected.width, 10)


def test_transformers_own_models_load_and_answer_the_same(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    names = {0: "cat", 1: "dog", 2: "heron"}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3, id2label=names)
    theirs = ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = vitkit.load(tmp_path / "theirs")
    images = torch.rand(2, 3, 32, 32)
    assert (ours(images) - theirs(images).logits).abs().max() <= 1e-5
    assert ours.labels == ("cat", "dog", "heron") and ours.config.heads == 4 and ours.config.norm_eps == 1e-12


@pytest.mark.parametrize("kind", ["ViTMAEForPreTraining", "ViTForMaskedImageModeling", "ViTModel"])
def test_other_transformers_models_that_share_the_encoder_load(tmp_path, kind):
    import transformers

    config_kind = transformers.ViTMAEConfig if "MAE" in kind else transformers.ViTConfig
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config = config_kind(**sizes, **(decoder if "MAE" in kind else {}), image_size=32, patch_size=8)
    theirs = getattr(transformers, kind)(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = vitkit.load(tmp_path / "theirs")
    assert (ours.mask_token is not None) == (kind == "ViTForMaskedImageModeling")
    assert ours.config.representation == (32 if kind == "ViTModel" else 0)
    images = torch.rand(2, 3, 32, 32)
    if kind == "ViTModel":
        out = theirs(images)
        assert (ours.tokens(images) - out.last_hidden_state).abs().max() <= 1e-5
        assert (ours(images) - out.pooler_output).abs().max() <= 1e-5
    else:
        assert any("skipped" in note and "decoder" in note for note in ours.origin.notes)


@pytest.mark.parametrize("representation", [None, 16])
def test_torchvisions_own_models_load_and_answer_the_same(tmp_path, representation):
    from torchvision.models.vision_transformer import VisionTransformer

    theirs = VisionTransformer(32, 8, 2, 2, 128, 64, num_classes=4, representation_size=representation).eval()
    torch.nn.init.normal_(theirs.heads.head.weight)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = vitkit.load(tmp_path / "theirs.pth")
    images = torch.rand(2, 3, 32, 32)
    assert (ours(images) - theirs(images)).abs().max() <= 1e-5
