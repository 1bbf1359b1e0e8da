"""Every format out and in again, bit for bit; every dialect of the official arrays in."""

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

import vitkit
from vitkit.models.card import Preprocessing

LINEN = {
    "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
    "LayerNorm_2": "LayerNorm_1",
    "MlpBlock_3": "MlpBlock_0",
}


def equal(a, b) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and s.dtype == t.dtype and torch.equal(s, t) for (n, s), (m, t) in pairs)


def arrays_of(path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


FORMATS = [
    ("vitkit", "m.safetensors"), ("official", "m.npz"), ("timm", "m.safetensors"), ("timm", "m.pth"),
    ("hf", "folder"), ("torchvision", "m.pth"), ("torchvision", "m.safetensors"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "name"), FORMATS)
def test_a_vit_comes_back_bit_for_bit(small, tmp_path, format, name):
    model = small(gelu="erf", norm_eps=1e-6 if name.endswith("pth") else 1e-5)
    model.labels = ("a", "b", "c", "d", "e [bold]")
    vitkit.save(model, tmp_path / name, format)
    back = vitkit.load(tmp_path / name, heads=2)
    assert equal(back, model)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(back(images), model(images))
    if not name.endswith(".pth"):  # which holds arrays alone
        assert back.config == model.config and back.labels == model.labels


@pytest.mark.parametrize(
    ("format", "name"), [("vitkit", "m.safetensors"), ("official", "m.npz"), ("timm", "m.pth")]
)
def test_hybrids_and_resnets_come_back_bit_for_bit(small_hybrid, small_resnet, tmp_path, format, name):
    for model in (small_hybrid(gelu="erf"), small_hybrid(blocks=(), patch=4), small_resnet()):
        vitkit.save(model, tmp_path / name, format)
        assert equal(vitkit.load(tmp_path / name, heads=2), model)


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "2d"}, {"positions": "relative"}, {"positions": "none"}, {"positions": "sincos2d"},
        {"injection": "every"}, {"attention": "axial", "head": "gap"}, {"head": "map", "class_token": True},
        {"mask_token": True, "layer_scale": True, "qkv_bias": False}, {"image_size": (24, 40)},
        {"final_norm": "pooled", "head": "gap"}, {"dropout": 0.1, "stochastic_depth": 0.1}, {"classes": 0},
    ],
    ids=str,
)  # fmt: skip
def test_our_own_file_holds_every_choice(small, tmp_path, options):
    model = small(**options)
    model.preprocessing = Preprocessing(resize="crop", crop=0.875, mean=(0.1, 0.2, 0.3))
    vitkit.save(model, tmp_path / "m.safetensors")
    back = vitkit.load(tmp_path / "m.safetensors")
    assert equal(back, model) and back.config == model.config and back.preprocessing == model.preprocessing


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "m.pth", "m"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_every_precision_become_float32(small, tmp_path, name, dtype):
    if name == "m.npz" and dtype == torch.bfloat16:
        return  # numpy has no such type to write
    model = small(gelu="erf", width=64, heads=1, classes=3).to(dtype)
    vitkit.save(model, tmp_path / name, format="timm" if name.endswith(".pth") else None)
    back = vitkit.load(tmp_path / name)
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    assert torch.equal(back.head.weight, model.head.weight.float())
    label, chance = vitkit.predict(back, photo(tmp_path))[0]
    assert label and 0 < chance <= 1


def photo(folder) -> bytes:
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(folder / "p.png")
    return (folder / "p.png").read_bytes()


def test_a_number_that_float32_cannot_hold_is_refused(small, tmp_path):
    model = small().double()
    torch.nn.init.constant_(model.head.bias, 1e300)
    vitkit.save(model, tmp_path / "m.safetensors")
    with refused("weights.values", "m.safetensors", "head.bias"):
        vitkit.load(tmp_path / "m.safetensors")


def test_official_arrays_have_the_published_names_and_shapes(small, tmp_path):
    vitkit.save(small(representation=16), tmp_path / "m.npz")
    shapes = {name: a.shape for name, a in arrays_of(tmp_path / "m.npz").items()}
    block = "Transformer/encoderblock_1/"
    expected = {
        "embedding/kernel": (8, 8, 3, 32), "cls": (1, 1, 32), "pre_logits/kernel": (32, 16),
        "head/kernel": (16, 5),
        "Transformer/posembed_input/pos_embedding": (1, 17, 32), "Transformer/encoder_norm/scale": (32,),
        f"{block}LayerNorm_0/scale": (32,), f"{block}LayerNorm_2/bias": (32,),
        f"{block}MultiHeadDotProductAttention_1/query/kernel": (32, 2, 16),
        f"{block}MultiHeadDotProductAttention_1/query/bias": (2, 16),
        f"{block}MultiHeadDotProductAttention_1/out/kernel": (2, 16, 32),
        f"{block}MlpBlock_3/Dense_0/kernel": (32, 48), f"{block}MlpBlock_3/Dense_1/kernel": (48, 32),
    }  # fmt: skip
    assert expected.items() <= shapes.items()
    assert len(shapes) == 2 + 1 + 1 + 2 * 16 + 2 + 2 + 2


def test_official_arrays_come_back_bit_for_bit(small, tmp_path):
    """From a file of another's making: arrays to model to arrays."""
    vitkit.save(small(), tmp_path / "m.npz")
    arrays = arrays_of(tmp_path / "m.npz")
    np.savez(tmp_path / "plain.npz", **arrays)  # as numpy writes it, without our card
    vitkit.save(vitkit.load(tmp_path / "plain.npz"), tmp_path / "again.npz")
    again = arrays_of(tmp_path / "again.npz")
    assert arrays.keys() == again.keys()
    assert all(np.array_equal(a, again[name]) and a.dtype == again[name].dtype for name, a in arrays.items())


def dialect_linen(arrays):
    for old, new in LINEN.items():
        arrays = {name.replace(old, new): a for name, a in arrays.items()}
    return arrays


def dialect_big_vision(arrays):
    arrays = dialect_linen(arrays)
    positions = arrays.pop("Transformer/posembed_input/pos_embedding")
    return {f"params/{n}": a for n, a in arrays.items()} | {"params/pos_embedding": positions}


def dialect_stacked(arrays):
    arrays = dialect_big_vision(arrays)
    prefix = "params/Transformer/encoderblock_0/"
    rests = [n.removeprefix(prefix) for n in arrays if n.startswith(prefix)]
    for rest in rests:
        layers = [arrays.pop(f"params/Transformer/encoderblock_{i}/{rest}") for i in range(2)]
        arrays[f"params/Transformer/encoderblock/{rest}"] = np.stack(layers)
    return arrays


DIALECTS = {
    "published": lambda arrays: arrays,
    "linen": dialect_linen,
    "optimizer": lambda arrays: (
        {f"opt/target/{n}": a for n, a in arrays.items()} | {"opt/state/step": np.ones(1)}
    ),
    "params": lambda arrays: {f"params/{n}": a for n, a in dialect_linen(arrays).items()},
    "big_vision": dialect_big_vision,
    "stacked": dialect_stacked,
    "image tower": lambda arrays: {f"params/img/{n}": a for n, a in dialect_linen(arrays).items()},
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "options", [{}, {"representation": 16}, {"head": "gap"}, {"head": "map"}, {"classes": 0}], ids=str
)
def test_every_dialect_of_the_official_arrays_is_read(small, tmp_path, dialect, options):
    model = small(**options)
    vitkit.save(model, tmp_path / "m.npz")
    np.savez(tmp_path / "dialect.npz", **DIALECTS[dialect](arrays_of(tmp_path / "m.npz")))
    back = vitkit.load(tmp_path / "dialect.npz")
    assert equal(back, model) and back.config == model.config


def test_a_table_without_the_class_entry_gives_the_class_token_no_position(small, tmp_path):
    """FlexiViT's files; the same outputs as with an entry of zeros, and the same arrays when written back."""
    model = small()
    vitkit.save(model, tmp_path / "m.npz")
    arrays = dialect_big_vision(arrays_of(tmp_path / "m.npz"))
    arrays["params/pos_embedding"] = arrays["params/pos_embedding"][:, 1:]
    np.savez(tmp_path / "n.npz", **arrays)
    back = vitkit.load(tmp_path / "n.npz")
    assert torch.equal(back.positions.table, model.positions.table[:, 1:]) and not back.config.class_position
    model.positions.table.data[:, 0] = 0
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(back(images), model(images))
    vitkit.save(back, tmp_path / "again.npz")
    written = arrays_of(tmp_path / "again.npz")["Transformer/posembed_input/pos_embedding"]
    assert (written == arrays["params/pos_embedding"]).all()


def test_fixed_positions_are_known_by_their_absence(small, tmp_path):
    model = small(positions="sincos2d", head="gap", representation=32)
    vitkit.save(model, tmp_path / "m.npz")
    np.savez(tmp_path / "plain.npz", **arrays_of(tmp_path / "m.npz"))
    back = vitkit.load(tmp_path / "plain.npz", image_size=32)
    assert equal(back, model) and back.config == model.config
    assert any("sincos2d" in note for note in back.origin.notes)


def test_group_norms_of_old_hybrids_are_squeezed(small_hybrid, tmp_path):
    model = small_hybrid()
    vitkit.save(model, tmp_path / "m.npz")
    arrays = arrays_of(tmp_path / "m.npz")
    old = {
        n: a.reshape(1, 1, 1, -1) if "/gn" in n or n.startswith("gn_root") else a for n, a in arrays.items()
    }
    np.savez(tmp_path / "old.npz", **old)
    assert equal(vitkit.load(tmp_path / "old.npz"), model)


def test_bfloat16_arrays_of_jax_are_read(small, tmp_path):
    model = small()
    vitkit.save(model, tmp_path / "m.npz")
    arrays = {n: torch.from_numpy(a).bfloat16() for n, a in arrays_of(tmp_path / "m.npz").items()}
    np.savez(tmp_path / "h.npz", **{n: t.view(torch.int16).numpy().view("V2") for n, t in arrays.items()})
    back = vitkit.load(tmp_path / "h.npz")
    assert torch.equal(back.head.weight, model.head.weight.bfloat16().float())


@pytest.mark.parametrize("wrap", ["model", "state_dict", "teacher", "module.", "_orig_mod.", "backbone."])
def test_training_checkpoints_are_unwrapped(small, tmp_path, wrap):
    model = small(gelu="erf")
    vitkit.save(model, tmp_path / "m.pth", "timm")
    state = torch.load(tmp_path / "m.pth")
    state = {f"{wrap}{n}": t for n, t in state.items()} if wrap.endswith(".") else {wrap: state, "epoch": 3}
    torch.save(state, tmp_path / "w.pth")
    back = vitkit.load(tmp_path / "w.pth", heads=2)
    assert equal(back, model) and any(wrap in note for note in back.origin.notes)


def test_a_masked_autoencoder_gives_its_encoder(small, tmp_path):
    model = small(gelu="erf", classes=0)
    vitkit.save(model, tmp_path / "m.pth", "timm")
    state = torch.load(tmp_path / "m.pth")
    extra = {"mask_token": torch.zeros(1, 1, 16), "decoder_pred.weight": torch.zeros(2, 16)}
    torch.save({"model": state | extra}, tmp_path / "mae.pth")
    back = vitkit.load(tmp_path / "mae.pth", heads=2)
    assert equal(back, model) and any("skipped 2 arrays" in note for note in back.origin.notes)


def test_a_sharded_folder_is_read_whole(small, tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    model = small(gelu="erf")
    folder = tmp_path / "folder"
    vitkit.save(model, folder)
    arrays = load_file(folder / "model.safetensors")
    names = sorted(arrays)
    where = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for shard in set(where.values()):
        save_file({n: arrays[n] for n in names if where[n] == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert equal(vitkit.load(folder), model)


def test_saving_twice_gives_the_same_bytes(small, tmp_path):
    model = small()
    for name in ("a.safetensors", "a.npz"):
        vitkit.save(model, tmp_path / name)
        vitkit.save(model, tmp_path / name.replace("a", "b", 1))
        assert (tmp_path / name).read_bytes() == (tmp_path / name.replace("a", "b", 1)).read_bytes()


def test_npz_arrays_of_another_byte_or_axis_order_are_read(small, tmp_path):
    model = small()
    vitkit.save(model, tmp_path / "m.npz")
    odd = {
        name: np.asfortranarray(array.astype(">f4")) for name, array in arrays_of(tmp_path / "m.npz").items()
    }
    np.savez(tmp_path / "odd.npz", **odd)
    assert equal(vitkit.load(tmp_path / "odd.npz"), model)


@pytest.mark.parametrize(("head", "noted"), [("gap", True), ("token", False)])
@pytest.mark.parametrize(
    "eva", [{}, {"rope": "eva02", "mlp": "swiglu", "key_bias": False}], ids=["vit", "eva"]
)
def test_a_pooling_that_the_arrays_do_not_show_is_noted(small, tmp_path, head, noted, eva):
    model = small(head=head, class_token=True, gelu="erf", **eva)
    assert any("head=gap" in note for note in vitkit.save(model, tmp_path / "m.pth", "timm")) == noted
    assert not any("head=gap" in note for note in vitkit.save(model, tmp_path / "m", "timm"))
    assert vitkit.load(tmp_path / "m").config.head == head  # config.json of a folder says it
