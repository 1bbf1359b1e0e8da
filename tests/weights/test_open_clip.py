"""open_clip_config.json beside open_clip's weights: what it states is read, and it must fit the arrays."""

import json
from copy import deepcopy

import pytest
import torch
from refusals import refused

import vitkit
from vitkit.models.card import Preprocessing
from vitkit.models.text_tower import TextConfig
from vitkit.weights.formats.layout import Hints
from vitkit.weights.formats.timm import siglip_spec

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
STATED = {
    "model_cfg": {
        "embed_dim": 24,
        "vision_cfg": {"image_size": [16, 32], "layers": 1, "width": 32, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 4, "layers": 1},
    },
    "preprocess_cfg": {
        "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear", "resize_mode": "squash",
    },
}  # fmt: skip
CLIP = {
    "width": 32, "heads": 4, "hidden": 128, "depth": 1, "patch": 8, "image_size": (16, 32), "classes": 0,
    "input_norm": True, "project_bias": False, "norm_eps": 1e-5, "representation": 24,
    "representation_kind": "linear", "position_resize": "timm", "gelu": "erf",
}  # fmt: skip
TEXT = TextConfig(
    vocabulary=20, length=6, width=16, depth=1, heads=4, hidden=64, output=24, gelu="erf", norm_eps=1e-5
)


@pytest.fixture
def folder(small, tmp_path):
    """A folder with a CLIP of open_clip's names, whose GELU, heads and image size no array shows."""
    torch.manual_seed(0)
    model = small(**CLIP, text=TEXT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    vitkit.save(model, tmp_path / "made.pt", "clip")
    arrays = torch.load(tmp_path / "made.pt", weights_only=True)
    (tmp_path / "m").mkdir()
    torch.save(arrays, tmp_path / "m/open_clip_pytorch_model.bin")
    state(tmp_path / "m", {})
    return model, tmp_path / "m"


def state(folder, changes):
    """Write the file with changes, each named by its path in it."""
    content = deepcopy(STATED)
    for path, value in changes.items():
        *tables, name = path.split("/")
        table = content
        for key in tables:
            table = table[key]
        table[name] = value
    (folder / CONFIG).write_text(json.dumps(content))


@pytest.mark.parametrize("place", ["", "open_clip_pytorch_model.bin"])
def test_nothing_is_guessed(folder, place):
    model, path = folder
    back = vitkit.load(path / place if place else path, text=True)
    assert back.config == model.config and not back.origin.notes
    assert back.preprocessing == Preprocessing(
        interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )
    images, tokens = torch.rand(2, 3, 16, 32), torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(back(images), model.eval()(images))
        assert torch.equal(back.text(tokens), model.text(tokens))
    assert (
        vitkit.load(path, heads=2).config.heads == 2 and vitkit.load(path, gelu="tanh").config.gelu == "tanh"
    )


@pytest.mark.parametrize(
    ("changes", "tower", "values"),
    [
        ({"quick_gelu": True}, "both", {"gelu": "quick"}),
        ({"vision_cfg/act_kwargs": {"approximate": "tanh"}}, "image", {"gelu": "tanh"}),
        ({"text_cfg/act_kwargs": {"approximate": "tanh"}}, "text", {"gelu": "tanh"}),
        ({"vision_cfg/head_width": 16}, "image", {"heads": 2}),
        ({"text_cfg/heads": 2}, "text", {"heads": 2}),
        ({"vision_cfg/norm_kwargs": {"eps": 1e-6}}, "image", {"norm_eps": 1e-6}),
        ({"text_cfg/norm_kwargs": {"eps": 1e-6}}, "text", {"norm_eps": 1e-6}),
        ({"vision_cfg/pool_type": "avg"}, "image", {"head": "gap", "final_norm": "tokens"}),
        ({"vision_cfg/pool_type": "avg", "vision_cfg/final_ln_after_pool": True}, "image",
         {"head": "gap", "final_norm": "pooled"}),
        ({"text_cfg/no_causal_mask": True, "text_cfg/pool_type": "last"}, "text",
         {"causal": False, "pool": "last"}),
    ],
)  # fmt: skip
def test_what_no_array_shows_is_as_stated(folder, changes, tower, values):
    model, path = folder
    before = {"image": model.config, "text": model.config.text}
    state(path, {f"model_cfg/{name}": value for name, value in changes.items()})
    config = vitkit.load(path, text=True).config
    for name, part in {"image": config, "text": config.text}.items():
        for field, value in values.items():
            expected = value if tower in (name, "both") else getattr(before[name], field, None)
            assert getattr(part, field, None) == expected, (name, field)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"vision_cfg/width": 48}, "weights.shape", ("width is 48", "32")),
        ({"vision_cfg/layers": 2}, "weights.shape", ("layers is 2", "1")),
        ({"vision_cfg/patch_size": 4}, "weights.shape", ("patch_size is 4", "8")),
        ({"vision_cfg/image_size": 32}, "weights.shape", ("32x32", "16 patches", "8")),
        ({"vision_cfg/mlp_ratio": 2.0}, "weights.shape", ("mlp_ratio", "64", "128")),
        ({"vision_cfg/head_width": 12}, "weights.shape", ("head_width is 12", "32")),
        ({"embed_dim": 32}, "weights.shape", ("embed_dim is 32", "24")),
        ({"text_cfg/context_length": 77}, "weights.shape", ("context_length is 77", "6")),
        ({"text_cfg/vocab_size": 21}, "weights.shape", ("vocab_size is 21", "20")),
        ({"text_cfg/heads": 3}, "weights.shape", ("text_cfg.heads is 3", "16")),
        ({"vision_cfg/attentional_pool": True}, "weights.unsupported", ("attentional_pool",)),
        ({"vision_cfg/pool_type": "none"}, "weights.unsupported", ("tok, avg",)),
        ({"text_cfg/pool_type": "first"}, "weights.unsupported", ("argmax, last",)),
        ({"vision_cfg": [1]}, "weights.format", ("vision_cfg",)),
        ({"vision_cfg/image_size": "large"}, "weights.format", ("image_size", "large")),
        ({"quick_gelu": "false"}, "weights.format", ("quick_gelu", "false")),
        ({"vision_cfg/head_width": 0}, "weights.format", ("head_width is 0",)),
    ],
)
def test_a_file_of_other_weights_is_refused(folder, changes, code, words):
    _, path = folder
    state(path, {f"model_cfg/{name}": value for name, value in changes.items()})
    with refused(code, CONFIG, *words):
        vitkit.load(path, text=True)


@pytest.mark.parametrize(
    ("name", "value"), [("resize_mode", "longest"), ("interpolation", "nearest"), ("mean", "grey")]
)
def test_preprocessing_that_vitkit_does_not_have_is_refused(folder, name, value):
    _, path = folder
    state(path, {f"preprocess_cfg/{name}": value})
    with refused("weights.format" if name == "mean" else "weights.unsupported", CONFIG, value):
        vitkit.load(path)


def test_without_the_file_or_for_another_name_the_guess_is_noted(folder):
    _, path = folder
    (path / CONFIG).rename(path / "config.json")  # which describes the weights of other libraries
    guessed = vitkit.load(path, heads=4, image_size=(16, 32))
    assert guessed.config.gelu == "quick" and any("GELU" in note for note in guessed.origin.notes)


def test_a_file_without_the_model_is_refused(folder):
    _, path = folder
    (path / CONFIG).write_text(json.dumps(STATED["model_cfg"]))
    with refused("weights.format", CONFIG, "model_cfg"):
        vitkit.load(path)


def siglip_shapes(width):
    """The shapes of a SigLIP trunk of two layers at 32 pixels."""
    block = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.fc1": (4 * width, width),
             "mlp.fc2": (width, 4 * width)}  # fmt: skip
    shapes = {f"blocks.{i}.{name}.weight": shape for i in range(2) for name, shape in block.items()}
    return shapes | {"patch_embed.proj.weight": (width, 3, 16, 16), "pos_embed": (1, 4, width),
                     "attn_pool.latent": (1, 1, width), "blocks.0.attn.qkv.bias": (3 * width,)}  # fmt: skip


def test_the_name_of_timms_model_states_the_heads():
    vision = {"timm_model_name": "vit_so400m_patch16_siglip_256", "image_size": 32}
    stated = {"model_cfg": {"embed_dim": 1152, "vision_cfg": vision}}
    spec = siglip_spec(siglip_shapes(1152), Hints(files={CONFIG: stated}))
    assert spec.config.heads == 16 and spec.config.gelu == "tanh" and not spec.notes
    assert spec.preprocessing.resize == "crop" and spec.preprocessing.mean[0] == pytest.approx(0.48145466)
    with refused("weights.shape", CONFIG, "1152", "768"):
        siglip_spec(siglip_shapes(768), Hints(files={CONFIG: stated}))
