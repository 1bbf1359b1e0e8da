"""DINOv2, DINOv3, CLIP, SigLIP, DeiT and EVA-02 against timm and transformers, random weights everywhere."""

import pytest
import torch

import vitkit
from vitkit.models.variants import skeleton
from vitkit.weights.convert import PEERS, compare, convert, with_config
from vitkit.weights.formats import formats

LIMIT = 1e-5
DINOV2 = {"layer_scale": True, "mask_token": True, "gelu": "erf", "classes": 0, "hidden": 64}
DINOV3 = DINOV2 | {"positions": "none", "rope": "dinov3", "registers": 4, "norm_eps": 1e-5, "key_bias": False}
LINEAR = {"head": "token+gap", "classes": 7}
TIMM = {"mask_token": False, "position_resize": "timm"}
SWIGLU = {"mlp": "swiglu", "hidden": 88}
EVA02 = {"rope": "eva02", "key_bias": False, "gelu": "erf", "mlp": "swiglu", "position_resize": "timm"}
CLIP = {
    "gelu": "quick", "input_norm": True, "project_bias": False, "norm_eps": 1e-5, "classes": 0,
    "representation": 12, "representation_kind": "linear",
}  # fmt: skip
POOLED = {"head": "gap", "class_token": True, "final_norm": "pooled"}
MODELS = {  # format and options
    "hf-dinov2": ("hf", DINOV2 | {"position_resize": "hf"}),
    "hf-dinov2-giant": ("hf", DINOV2 | SWIGLU | {"position_resize": "hf"}),
    "hf-dinov2-registers": ("hf", DINOV2 | {"registers": 4, "position_resize": "timm"}),
    "hf-dinov2-classifier": ("hf", DINOV2 | LINEAR | {"position_resize": "hf"}),
    "hf-dinov2-registers-classifier": ("hf", DINOV2 | LINEAR | {"registers": 4, "position_resize": "timm"}),
    "hf-dinov3": ("hf", DINOV3),
    "hf-dinov3-plus": ("hf", DINOV3 | SWIGLU),
    "hf-dinov3-7b": ("hf", DINOV3 | SWIGLU | {"qkv_bias": False, "key_bias": True}),
    "hf-clip": ("hf", CLIP | {"position_resize": "hf"}),
    "hf-siglip": ("hf", {"head": "map", "classes": 0, "position_resize": "hf"}),
    "hf-deit": ("hf", {"distilled": True, "gelu": "erf", "norm_eps": 1e-12, "position_resize": "hf"}),
    "timm-dinov2": ("timm", DINOV2 | TIMM),
    "timm-dinov2-registers": (
        "timm",
        DINOV2 | SWIGLU | TIMM | {"registers": 4, "class_position": False},
    ),
    "timm-dinov3": ("timm", DINOV3 | TIMM | {"qkv_bias": False, "key_bias": True}),
    "timm-dinov3-qkvb": ("timm", DINOV3 | SWIGLU | TIMM),
    "timm-clip": ("timm", CLIP | {"position_resize": "timm"}),
    "timm-qk-norm": ("timm", {"qk_norm": True, "gelu": "erf", "position_resize": "timm"}),
    "timm-siglip": ("timm", {"head": "map", "classes": 0, "position_resize": "timm", "gelu": "erf"}),
    "timm-deit": ("timm", {"distilled": True, "gelu": "erf", "position_resize": "timm"}),
    "timm-deit3": (
        "timm", {"class_position": False, "layer_scale": True, "gelu": "erf", "position_resize": "timm"},
    ),
    "timm-eva02-small": ("timm", EVA02 | {"hidden": 85} | POOLED),
    "timm-eva02-base": ("timm", EVA02 | {"hidden": 85, "mlp_norm": True} | POOLED),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_outputs_equal_those_of_the_library(small, tmp_path, name):
    """At the model's own size, and at another one that is not square."""
    format, options = MODELS[name]
    model = small(**options)
    path = tmp_path / ("m" if format == "hf" else "m.safetensors")
    vitkit.save(model, path, format)
    layout = formats()[format].layout_for(model.config)
    parity = compare(path, model, layout)
    assert not parity.skipped, parity.skipped
    assert parity.features is not None and parity.features <= LIMIT
    assert parity.logits is None or parity.logits <= LIMIT
    config = layout.native(model.config)
    images = torch.rand(2, 3, 48, 24) * 2 - 1
    with torch.no_grad():
        logits, tokens = PEERS[layout.peer].load(path, config, layout.name)(images)
        ours = with_config(model, config)
        assert (tokens - ours.tokens(images)).abs().max() <= LIMIT
        assert logits is None or not ours(images).numel() or (logits - ours(images)).abs().max() <= LIMIT


def without_key_bias(model):
    """Zeros where the model reads zeros anyway: no file has a place for these numbers."""
    for block in model.encoder.blocks:
        if not block.attention.key_bias:
            block.attention.qkv.bias.data.chunk(3)[1].zero_()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_files_without_our_card_come_back_bit_for_bit(small, tmp_path, name):
    """Sizes and options are inferred from names and shapes alone (and config.json, in a folder)."""
    import safetensors.torch

    format, options = MODELS[name]
    model = without_key_bias(small(**options))
    path = tmp_path / ("m" if format == "hf" else "m.safetensors")
    vitkit.save(model, path, format)
    file = path / "model.safetensors" if format == "hf" else path
    safetensors.torch.save_file(safetensors.torch.load_file(file), file)  # without the card
    back = vitkit.load(path, heads=2, image_size=32)
    if name == "timm-clip":  # timm's projection is its head: nothing tells them apart
        assert back.config.classes == 12 and torch.equal(back.head.weight, model.representation.weight)
        return
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, back.state_dict()[n]) for n, tensor in model.state_dict().items())
    changed = {"rope_rescale"} | ({"gelu"} if back.config.mlp == "swiglu" else set())
    fields = {f for f in vars(model.config) if getattr(model.config, f) != getattr(back.config, f)}
    assert fields <= changed
    vitkit.save(back, tmp_path / ("n" if format == "hf" else "n.safetensors"), format)
    again = tmp_path / ("n/model.safetensors" if format == "hf" else "n.safetensors")
    first, second = safetensors.torch.load_file(file), safetensors.torch.load_file(again)
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(
    "options",
    [
        DINOV2, DINOV2 | SWIGLU, DINOV2 | {"registers": 4}, DINOV3 | {"rope_rescale": 2.0}, DINOV2 | LINEAR,
        DINOV2 | LINEAR | {"registers": 4}, DINOV3 | LINEAR | {"rope_rescale": 2.0},
        DINOV3 | SWIGLU | {"rope_rescale": 2.0, "qkv_bias": False, "key_bias": True},
    ],
)  # fmt: skip
def test_the_original_files_of_dino_come_back_bit_for_bit(small, tmp_path, options):
    resize = "timm" if options.get("registers") else "dinov2"
    model = small(**options, position_resize=resize)
    if model.encoder.rope is not None:  # the published ones are rounded to bfloat16
        model.encoder.rope.periods.copy_(model.encoder.rope.periods.bfloat16().float())
    vitkit.save(model, tmp_path / "m.pth", "dino")
    back = vitkit.load(tmp_path / "m.pth", heads=2, image_size=32)
    assert back.config == model.config and back.origin.format in ("dinov2", "dinov3")
    assert all(torch.equal(tensor, back.state_dict()[n]) for n, tensor in model.state_dict().items())
    theirs = torch.load(tmp_path / "m.pth", weights_only=True)
    if options["classes"]:  # as torch.hub's dinov2_vits14_lc names them
        assert theirs["linear_head.weight"].shape == (7, 64)
        theirs = {name.removeprefix("backbone."): tensor for name, tensor in theirs.items()}
    assert theirs["mask_token"].shape == (1, 32)
    if options.get("rope") and options.get("qkv_bias", True):
        assert theirs["blocks.1.attn.qkv.bias_mask"].sum() == 64 and theirs["storage_tokens"].shape == (
            1,
            4,
            32,
        )


def test_every_layout_names_every_parameter(small):
    for name, (format, options) in MODELS.items():
        config = small(**options).config
        own = {entry.own for entry in formats()[format].layout_for(config).entries(config)}
        stored = dict(skeleton(config).named_parameters())
        assert own >= stored.keys(), name


@pytest.mark.parametrize("text", [False, True])
def test_a_clip_tower_of_openai_is_read_beside_its_text_tower(small, tmp_path, text):
    model = small(**CLIP, position_resize="timm")
    vitkit.save(model, tmp_path / "m.pt", "clip")
    arrays = torch.load(tmp_path / "m.pt", weights_only=True)
    assert arrays["visual.proj"].shape == (32, 12) and arrays["visual.class_embedding"].shape == (32,)
    if text:
        arrays |= {"token_embedding.weight": torch.zeros(9, 4), "logit_scale": torch.zeros(())}
        torch.save(arrays, tmp_path / "m.pt")
    back = vitkit.load(tmp_path / "m.pt", heads=2)
    assert back.config == model.config and back.origin.format == "clip"
    assert all(torch.equal(tensor, back.state_dict()[n]) for n, tensor in model.state_dict().items())


def test_a_siglip_tower_of_open_clip_is_read_beside_its_text_tower(small, tmp_path):
    model = small(head="map", classes=0, gelu="erf")
    vitkit.save(model, tmp_path / "m.pth", "timm")
    arrays = {f"visual.trunk.{n}": t for n, t in torch.load(tmp_path / "m.pth", weights_only=True).items()}
    torch.save(
        arrays | {"text.token.weight": torch.zeros(3, 3), "logit_bias": torch.zeros(1)}, tmp_path / "m.pth"
    )
    back = vitkit.load(tmp_path / "m.pth", heads=2)
    assert back.config.gelu == "tanh"  # as it was trained
    assert all(torch.equal(tensor, back.state_dict()[n]) for n, tensor in model.state_dict().items())


def test_deit_iii_names_layer_scale_gamma(small, tmp_path):
    model = small(class_position=False, layer_scale=True, gelu="erf")
    vitkit.save(model, tmp_path / "m.pth", "timm")
    arrays = torch.load(tmp_path / "m.pth", weights_only=True)
    renamed = {
        n.replace(".ls1.gamma", ".gamma_1").replace(".ls2.gamma", ".gamma_2"): t for n, t in arrays.items()
    }
    assert renamed["pos_embed"].shape == (1, 16, 32)
    torch.save({"model": renamed}, tmp_path / "deit3.pth")
    back = vitkit.load(tmp_path / "deit3.pth", heads=2)
    assert not back.config.class_position and back.config.layer_scale
    assert all(torch.equal(tensor, back.state_dict()[n]) for n, tensor in model.state_dict().items())


def test_shards_with_an_index_are_one_model(small, tmp_path):
    import json

    import safetensors.torch

    model = small(**DINOV3)
    vitkit.save(model, tmp_path / "m", "hf")
    file = tmp_path / "m/model.safetensors"
    arrays = safetensors.torch.load_file(file)
    file.unlink()
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(arrays)}
    for shard in set(weight_map.values()):
        part = {name: arrays[name] for name in arrays if weight_map[name] == shard}
        safetensors.torch.save_file(part, tmp_path / "m" / shard)
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    back = vitkit.load(tmp_path / "m")
    images = torch.rand(1, 3, 40, 24)
    assert back.config.registers == 4 and torch.equal(back(images), model(images))


def test_a_changed_bias_mask_is_refused(small, tmp_path):
    from refusals import refused

    vitkit.save(small(**DINOV3), tmp_path / "m.pth", "dino")
    arrays = torch.load(tmp_path / "m.pth", weights_only=True)
    arrays["blocks.0.attn.qkv.bias_mask"][40] = 1.0
    torch.save(arrays, tmp_path / "m.pth")
    with refused("weights.values", "bias_mask"):
        vitkit.load(tmp_path / "m.pth", image_size=32)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
THEIRS = {  # model, configuration, options
    "dinov2": ("Dinov2Model", "Dinov2Config", {"mlp_ratio": 2}),
    "dinov2-registers": (
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"mlp_ratio": 4, "use_swiglu_ffn": True},
    ),
    "dinov2-classifier": ("Dinov2ForImageClassification", "Dinov2Config", {"mlp_ratio": 2, "num_labels": 6}),
    "dinov2-registers-classifier": (
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig",
        {"mlp_ratio": 2, "id2label": {0: "cat", 1: "dog", 2: "bird"}},
    ),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 4}),
    "dinov3-no-registers": (
        "DINOv3ViTModel", "DINOv3ViTConfig", {"use_gated_mlp": True, "hidden_act": "silu"},
    ),
    "clip": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {"projection_dim": 12}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {"num_labels": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_own_models_load_and_answer_the_same(tmp_path, name):
    """The other way round: transformers builds and saves, with 4 heads, which its config.json says."""
    import transformers

    kind, config_kind, options = THEIRS[name]
    config = getattr(transformers, config_kind)(**SIZES, image_size=32, patch_size=8, **options)
    theirs = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = vitkit.load(tmp_path / "theirs")
    assert ours.config.heads == 4
    assert ours.labels == (("cat", "dog", "bird") if "id2label" in options else ())
    for size in ((32, 32), (48, 24)):
        images = torch.rand(2, 3, *size) * 2 - 1
        resized = {} if name.startswith("dino") else {"interpolate_pos_encoding": True}
        with torch.no_grad():
            out = theirs(images, **resized)
            expected = next(
                getattr(out, key) for key in ("logits", "image_embeds", "pooler_output") if hasattr(out, key)
            )
            assert (ours(images) - expected).abs().max() <= LIMIT


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("vit_small_patch14_reg4_dinov2", 6), ("vit_small_patch16_dinov3_qkvb", 6),
        ("deit3_small_patch16_224", 6), ("deit_tiny_distilled_patch16_224", 3),
        ("eva02_tiny_patch14_224", 3), ("flexivit_small", 6), ("vit_so400m_patch14_siglip_224", 16),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_timms_own_models_load_and_answer_the_same(tmp_path, name, heads):
    import timm

    depth = {"depth": 27 if "so400m" in name else 12}
    theirs = timm.create_model(name, **depth, **({"global_pool": "token"} if "dinov3" in name else {})).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = vitkit.load(tmp_path / "theirs.pth")
    assert ours.config.heads == heads
    size = theirs.patch_embed.img_size
    images = torch.rand(1, 3, *size) * 2 - 1
    with torch.no_grad():
        a, b = ours(images), theirs(images)
    assert (a - b).abs().max() <= LIMIT * max(1.0, float(b.abs().max()))


def test_a_linear_head_on_four_layers_is_refused(small, tmp_path):
    from refusals import refused

    vitkit.save(small(**DINOV2, position_resize="dinov2"), tmp_path / "m.pth", "dino")
    arrays = torch.load(tmp_path / "m.pth", weights_only=True)
    arrays |= {"linear_head.weight": torch.zeros(7, 5 * 32), "linear_head.bias": torch.zeros(7)}
    torch.save(arrays, tmp_path / "m.pth")
    with refused("weights.unsupported", "160"):
        vitkit.load(tmp_path / "m.pth", heads=2)


@pytest.mark.parametrize("format", ["timm", "torchvision", "official"])
def test_formats_without_such_a_head_refuse_it(small, tmp_path, format):
    from refusals import refused

    with refused("weights.unsupported"):
        vitkit.save(small(**LINEAR), tmp_path / ("m.npz" if format == "official" else "m.pth"), format)


@pytest.mark.parametrize("format", ["timm", "hf"])
def test_rounded_periods_are_refused_where_the_library_computes_exact_ones(small, tmp_path, format):
    from refusals import refused

    model = without_key_bias(small(**DINOV3))
    model.encoder.rope.periods.copy_(model.encoder.rope.periods.bfloat16().float())
    vitkit.save(model, tmp_path / "original.pth", "dino")
    out = tmp_path / ("m" if format == "hf" else "m.safetensors")
    with refused("weights.unsupported", "dino"):
        convert(tmp_path / "original.pth", out, format=format, image_size=32)
    assert [path.name for path in tmp_path.iterdir()] == ["original.pth"]
    back = convert(tmp_path / "original.pth", tmp_path / "m.safetensors", image_size=32)
    assert back.ok and vitkit.push(model, "me/dino", dry_run=tmp_path / "push").format == "vitkit"


@pytest.mark.parametrize("format", ["timm", "hf", "dino"])
def test_the_position_of_the_class_token_is_written_as_the_library_needs_it(small, tmp_path, format):
    """timm adds it to the token of a model with registers, and has no mask token; the others have both."""
    theirs = {"class_position": format == "timm", "mask_token": format != "hf"}
    model = small(**(DINOV2 | {"registers": 4, "position_resize": "timm"} | theirs))
    vitkit.save(model, tmp_path / "own.safetensors")
    out = tmp_path / {"timm": "m.safetensors", "hf": "m", "dino": "m.pth"}[format]
    result = convert(tmp_path / "own.safetensors", out, format=format)
    assert result.ok and (format == "dino" or result.parity.features <= LIMIT)
    back = vitkit.load(out, heads=2)
    assert (back.config.class_position, back.config.mask_token) == (format != "timm", format != "timm")
    for size in ((32, 32), (48, 24)):
        images = torch.rand(2, 3, *size)
        assert torch.equal(back(images), model(images))


def test_a_clip_tower_without_its_projection_comes_back_as_such(tmp_path):
    import safetensors.torch
    import transformers

    config = transformers.CLIPVisionConfig(**SIZES, image_size=32, patch_size=8)
    theirs = transformers.CLIPVisionModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1))
    theirs.save_pretrained(tmp_path / "theirs")
    result = convert(tmp_path / "theirs", tmp_path / "ours", format="hf")
    assert result.ok and result.parity.logits <= LIMIT and result.parity.features <= LIMIT
    first, second = (
        safetensors.torch.load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours")
    )
    second = {n.removeprefix("vision_model."): t for n, t in second.items()}  # transformers 5 omits it
    first = {n.removeprefix("vision_model."): t for n, t in first.items() if "position_ids" not in n}
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in second)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_classifier_that_reads_other_tokens_is_not_dropped_without_a_word(tmp_path, kind):
    import transformers
    from refusals import refused

    text = SIZES | {"vocab_size": 40}
    config = getattr(transformers, f"{kind}Config")(
        vision_config=SIZES | {"image_size": 32, "patch_size": 8}, text_config=text, num_labels=3
    )
    getattr(transformers, f"{kind}ForImageClassification")(config).save_pretrained(tmp_path / "m")
    with refused("weights.names", "classifier"):
        vitkit.load(tmp_path / "m")
    assert vitkit.load(tmp_path / "m", ignore=["classifier"]).config.classes == 0


def test_a_projection_after_a_trunk_of_open_clip_is_not_dropped_without_a_word(small, tmp_path):
    from refusals import refused

    vitkit.save(small(head="map", classes=0, gelu="erf"), tmp_path / "m.pth", "timm")
    arrays = {f"visual.trunk.{n}": t for n, t in torch.load(tmp_path / "m.pth", weights_only=True).items()}
    torch.save(arrays | {"visual.head.proj.weight": torch.zeros(12, 32)}, tmp_path / "m.pth")
    with refused("weights.names", "head.proj"):
        vitkit.load(tmp_path / "m.pth", heads=2)


def test_another_base_of_rope_is_refused(small, tmp_path):
    import json

    from refusals import refused

    eva = EVA02 | {"hidden": 85} | POOLED
    for format, options, change in (
        ("hf", DINOV3, lambda c: c.update(rope_theta=50.0)),
        ("timm", DINOV3 | TIMM, lambda c: c["model_args"].update(rope_temperature=50.0)),
        ("timm", eva, lambda c: c["model_args"].update(ref_feat_shape=[32, 32])),
    ):
        vitkit.save(small(**options), tmp_path / "m", format)
        vitkit.load(tmp_path / "m")
        content = json.loads((tmp_path / "m/config.json").read_text())
        change(content)
        (tmp_path / "m/config.json").write_text(json.dumps(content))
        with refused("weights.unsupported"):
            vitkit.load(tmp_path / "m")


def test_models_of_flattened_patches_are_refused(small, tmp_path):
    import numpy as np
    import transformers
    from refusals import refused

    config = transformers.Siglip2VisionConfig(**SIZES, patch_size=8, num_patches=16)
    transformers.Siglip2VisionModel(config).save_pretrained(tmp_path / "naflex")
    vitkit.save(small(head="map", classes=0), tmp_path / "m.npz", "official")
    arrays = dict(np.load(tmp_path / "m.npz"))
    arrays["embedding/kernel"] = arrays["embedding/kernel"].reshape(-1, 32)
    np.savez(tmp_path / "naflex.npz", **arrays)
    for name in ("naflex", "naflex.npz"):
        with refused("weights.unsupported", "NaFlex"):
            vitkit.load(tmp_path / name)


def test_a_format_without_names_for_all_parameters_is_refused(small, tmp_path):
    from refusals import refused

    with refused("weights.unsupported", "map"):
        vitkit.save(small(head="map", key_bias=False), tmp_path / "m.safetensors", "timm")
    assert not (tmp_path / "m.safetensors").exists()


def test_dinov2_without_a_mask_token_is_recognised_in_its_own_layout(small, tmp_path):
    model = small(**(DINOV2 | LINEAR | {"mask_token": False, "position_resize": "dinov2"}))
    vitkit.save(model, tmp_path / "m.pth", "dino")
    back, images = vitkit.load(tmp_path / "m.pth", heads=2), torch.rand(1, 3, 48, 24)
    assert back.origin.format == "dinov2" and torch.equal(back(images), model(images))


@pytest.mark.parametrize(
    ("options", "tag", "noted"),
    [
        ({"head": "map"}, None, True), (CLIP, None, True), ({}, None, False),
        (CLIP | {"gelu": "erf"}, "openai", True), (CLIP | {"gelu": "erf"}, "laion2b", False),
    ],
)  # fmt: skip
def test_a_gelu_that_timms_arrays_do_not_tell_is_noted(small, tmp_path, options, tag, noted):
    import json

    import safetensors.torch

    model = small(**({"gelu": "erf", "classes": 0, "position_resize": "timm"} | options))
    path = tmp_path / ("m.pth" if tag is None else "m")
    vitkit.save(model, path, "timm")
    if tag is not None:  # as timm's own folders, which do not state act_layer
        content = json.loads((path / "config.json").read_text())
        del content["model_args"]["act_layer"]
        content["pretrained_cfg"]["tag"] = tag
        (path / "config.json").write_text(json.dumps(content))
        weights = path / "model.safetensors"
        safetensors.torch.save_file(safetensors.torch.load_file(weights), weights)  # without the card
    back = vitkit.load(path, heads=2)
    assert any("GELU" in note for note in back.origin.notes) == noted
    assert not any("GELU" in note for note in vitkit.load(path, heads=2, gelu="quick").origin.notes)
