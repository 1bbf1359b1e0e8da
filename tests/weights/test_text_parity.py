"""The text towers of CLIP and SigLIP against transformers, with random weights in every tensor."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn.functional import normalize

import vitkit

LIMIT = 1e-5
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VOCABULARY, LENGTH = 60, 12


def theirs(kind, **text):
    """A CLIPModel or SiglipModel of transformers with random weights in every tensor."""
    import transformers

    torch.manual_seed(0)
    shared = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH} | text
    vision = SIZES | {"image_size": 32, "patch_size": 8}
    if kind == "clip":
        config = transformers.CLIPConfig(
            text_config=shared | {"projection_dim": 24}, vision_config=vision | {"projection_dim": 24},
            projection_dim=24,
        )  # fmt: skip
        model = transformers.CLIPModel(config).eval()
    else:
        config = transformers.SiglipConfig(text_config=shared | {"projection_size": 32}, vision_config=vision)
        model = transformers.SiglipModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model


def some_tokens(end=VOCABULARY - 1):
    """Texts of several lengths, with their end token, filled up with end tokens."""
    tokens = torch.randint(0, VOCABULARY - 1, (5, LENGTH), generator=torch.Generator().manual_seed(1))
    for row, place in enumerate((3, 5, 1, 11, 8)):
        tokens[row, place:] = end
    return tokens


def check_equal(ours, model, tokens):
    """Image and text embeddings, and logits, as transformers computes them."""
    pixels = torch.rand(3, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        out = model(input_ids=tokens, pixel_values=pixels)
        images, texts = normalize(ours(pixels), dim=-1), normalize(ours.text(tokens), dim=-1)
        logits = images @ texts.mT * ours.text.logit_scale.exp()
        logits = logits if ours.text.logit_bias is None else logits + ours.text.logit_bias
    assert (images - out.image_embeds).abs().max() <= LIMIT
    assert (texts - out.text_embeds).abs().max() <= LIMIT
    assert (logits - out.logits_per_image).abs().max() <= LIMIT * max(1, float(logits.abs().max()))
    assert texts.std() > 0.05  # not all alike


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_own_models_have_the_same_embeddings_and_logits(tmp_path, kind, shards):
    model = theirs(kind, **({"eos_token_id": 2} if kind == "clip" else {}))
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path / "m", max_shard_size=size // shards + 1000)
    assert (tmp_path / "m/model.safetensors.index.json").exists() == (shards > 1)
    ours = vitkit.load(tmp_path / "m", text=True)
    assert (ours.config.text.heads, ours.config.text.sigmoid) == (4, kind == "siglip")
    check_equal(ours, model, some_tokens())
    assert vitkit.load(tmp_path / "m").text is None  # the image tower alone, unless the text tower is wanted


@pytest.mark.parametrize("end", [7, VOCABULARY - 1])
def test_clip_reads_the_first_end_token(tmp_path, end):
    """Configurations name it; the tokens after it are larger here, and must not matter."""
    model = theirs("clip", eos_token_id=end)
    model.save_pretrained(tmp_path / "m")
    ours = vitkit.load(tmp_path / "m", text=True)
    tokens = some_tokens()
    tokens[:, 0], tokens[:, -1] = 9, end
    assert ours.config.text.end_token == end
    check_equal(ours, model, tokens)
    changed = tokens.clone()
    changed[2, 2:] = end if end != 7 else torch.tensor([7, *range(20, 29)])
    changed[2, 1] = tokens[2, 1] = end
    with torch.no_grad():
        assert torch.allclose(ours.text(changed)[2], ours.text(tokens)[2], atol=1e-6)  # causal


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_folder_is_written_back_bit_for_bit(tmp_path, kind):
    model = theirs(kind)
    model.save_pretrained(tmp_path / "m")
    ours = vitkit.load(tmp_path / "m", text=True)
    vitkit.save(ours, tmp_path / "n", "hf")
    first, second = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in "mn")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) and first[n].shape == second[n].shape for n in first)
    back = type(model).from_pretrained(tmp_path / "n").eval()
    check_equal(ours, back, some_tokens())
    edited = json.loads((tmp_path / "n/config.json").read_text())
    edited["text_config"]["num_attention_heads"] = 2  # people edit it, and other programs read it
    (tmp_path / "n/config.json").write_text(json.dumps(edited))
    assert vitkit.load(tmp_path / "n", text=True).config.text.heads == 2


def test_the_names_of_openai_come_back_bit_for_bit(tmp_path):
    model = theirs("clip", eos_token_id=2)
    model.save_pretrained(tmp_path / "m")
    ours = vitkit.load(tmp_path / "m", text=True)
    vitkit.save(ours, tmp_path / "m.pt", "clip")
    arrays = torch.load(tmp_path / "m.pt", weights_only=True)
    assert arrays["token_embedding.weight"].shape == (VOCABULARY, 32)
    assert arrays["text_projection"].shape == (32, 24) and arrays["logit_scale"].shape == ()
    assert torch.equal(arrays["text_projection"].mT, model.text_projection.weight)
    assert torch.equal(arrays["transformer.resblocks.1.attn.in_proj_weight"].chunk(3)[1],
                       model.text_model.encoder.layers[1].self_attn.k_proj.weight)  # fmt: skip
    back = vitkit.load(tmp_path / "m.pt", heads=4, text=True)
    check_equal(back, model, some_tokens())
    vitkit.save(back, tmp_path / "n.pt", "clip")
    again = torch.load(tmp_path / "n.pt", weights_only=True)
    assert arrays.keys() == again.keys() and all(torch.equal(arrays[n], again[n]) for n in arrays)
    below = {  # newer models of open_clip
        n if n.startswith(("visual.", "logit")) else f"text.{n}": a for n, a in arrays.items()
    }
    torch.save(below, tmp_path / "custom.pt")
    check_equal(vitkit.load(tmp_path / "custom.pt", heads=4, text=True), model, some_tokens())


def test_siglip_in_the_names_of_open_clip(tmp_path):
    """The image tower in timm's names below visual.trunk, the text tower in open_clip's below text."""
    model = theirs("siglip")
    model.save_pretrained(tmp_path / "m")
    ours = vitkit.load(tmp_path / "m", text=True)
    vitkit.save(ours, tmp_path / "vision.pth", "timm")
    vision = torch.load(tmp_path / "vision.pth", weights_only=True)
    assert not [name for name in vision if name.startswith("text")]
    arrays = {f"visual.trunk.{n}": a for n, a in vision.items()}
    text = model.text_model
    arrays |= {"text.token_embedding.weight": text.embeddings.token_embedding.weight,
               "text.positional_embedding": text.embeddings.position_embedding.weight,
               "logit_scale": model.logit_scale[0], "logit_bias": model.logit_bias[0]}  # fmt: skip
    for i, layer in enumerate(text.encoder.layers):
        to, attention = f"text.transformer.resblocks.{i}.", layer.self_attn
        three = [getattr(attention, f"{n}_proj") for n in "qkv"]
        arrays |= {f"{to}attn.in_proj_{part}": torch.cat([getattr(p, part) for p in three])
                   for part in ("weight", "bias")}  # fmt: skip
        parts = {"ln_1": layer.layer_norm1, "ln_2": layer.layer_norm2, "attn.out_proj": attention.out_proj,
                 "mlp.c_fc": layer.mlp.fc1, "mlp.c_proj": layer.mlp.fc2}  # fmt: skip
        for name, module in parts.items():
            arrays |= {f"{to}{name}.weight": module.weight, f"{to}{name}.bias": module.bias}
    for name, module in {"ln_final": text.final_layer_norm, "text_projection": text.head}.items():
        arrays |= {f"text.{name}.weight": module.weight, f"text.{name}.bias": module.bias}
    torch.save({n: a.detach() for n, a in arrays.items()}, tmp_path / "open_clip.pt")
    check_equal(vitkit.load(tmp_path / "open_clip.pt", heads=4, text=True), model, some_tokens())


@pytest.mark.parametrize("stacked", [False, True])
def test_siglip_in_the_names_of_big_vision(tmp_path, stacked):
    model = theirs("siglip")
    model.save_pretrained(tmp_path / "m")
    ours = vitkit.load(tmp_path / "m", text=True)
    vitkit.save(ours, tmp_path / "vision.npz", "official")
    text, width, heads = model.text_model, 32, 4
    arrays = {f"params/img/{n}": a for n, a in np.load(tmp_path / "vision.npz").items()}
    arrays |= {"params/txt/Embed_0/embedding": text.embeddings.token_embedding.weight,
               "params/txt/pos_embedding": text.embeddings.position_embedding.weight[None],
               "params/txt/Encoder_0/encoder_norm/scale": text.final_layer_norm.weight,
               "params/txt/Encoder_0/encoder_norm/bias": text.final_layer_norm.bias,
               "params/txt/head/kernel": text.head.weight.mT, "params/txt/head/bias": text.head.bias,
               "params/t": model.logit_scale, "params/b": model.logit_bias}  # fmt: skip
    layers = []
    for layer in text.encoder.layers:
        own, attention = {}, "MultiHeadDotProductAttention_0/"
        for name in ("query", "key", "value"):
            part = getattr(layer.self_attn, f"{name[0]}_proj")
            own[f"{attention}{name}/kernel"] = part.weight.mT.reshape(width, heads, -1)
            own[f"{attention}{name}/bias"] = part.bias.reshape(heads, -1)
        out = layer.self_attn.out_proj
        own |= {f"{attention}out/kernel": out.weight.mT.reshape(heads, -1, width),
                f"{attention}out/bias": out.bias}  # fmt: skip
        for i, (norm, dense) in enumerate(((layer.layer_norm1, layer.mlp.fc1),
                                           (layer.layer_norm2, layer.mlp.fc2))):  # fmt: skip
            own |= {f"LayerNorm_{i}/scale": norm.weight, f"LayerNorm_{i}/bias": norm.bias,
                    f"MlpBlock_0/Dense_{i}/kernel": dense.weight.mT,
                    f"MlpBlock_0/Dense_{i}/bias": dense.bias}  # fmt: skip
        layers.append(own)
    for name in layers[0]:
        if stacked:
            arrays[f"params/txt/Encoder_0/encoderblock/{name}"] = torch.stack([own[name] for own in layers])
        else:
            arrays |= {f"params/txt/Encoder_0/encoderblock_{i}/{name}": own[name]
                       for i, own in enumerate(layers)}  # fmt: skip
    np.savez(tmp_path / "m.npz", **{n: np.asarray(torch.as_tensor(a).detach()) for n, a in arrays.items()})
    check_equal(vitkit.load(tmp_path / "m.npz", text=True), model, some_tokens())
    assert vitkit.load(tmp_path / "m.npz").text is None


def test_our_own_file_keeps_both_towers(tmp_path):
    model = theirs("siglip")
    model.save_pretrained(tmp_path / "m")
    vitkit.save(vitkit.load(tmp_path / "m", text=True), tmp_path / "m.safetensors")
    back = vitkit.load(tmp_path / "m.safetensors", text=True)
    check_equal(back, model, some_tokens())
    alone = vitkit.load(tmp_path / "m.safetensors")
    assert alone.text is None and alone.config.text is None
    assert torch.equal(alone.pool.probe, back.pool.probe)


@pytest.mark.parametrize(
    ("width", "depth", "hidden", "heads"),
    [(512, 12, 2048, 8), (1024, 24, 4096, 16), (1280, 32, 5120, 20), (1152, 27, 4304, 16)],
)  # fmt: skip
def test_heads_of_the_published_text_towers(width, depth, hidden, heads):
    """CLIP G has the sizes of ViT-H with other heads."""
    from vitkit.weights.formats.layout import Hints
    from vitkit.weights.formats.text_rows import clip_text

    layer = "text.transformer.resblocks.{}."
    shapes = {"text.token_embedding.weight": (90, width), "text.positional_embedding": (77, width),
              "text.text_projection": (width, 640)}  # fmt: skip
    for i in range(depth):
        shapes |= {
            f"{layer.format(i)}ln_1.weight": (width,),
            f"{layer.format(i)}mlp.c_fc.weight": (hidden, width),
        }
    assert clip_text(shapes, Hints(heads=16)).heads == heads
