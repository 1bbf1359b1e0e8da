"""Files that do not fit, names that do not exist, disks that cannot be written: clear errors, no loss."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

import vitkit


@pytest.fixture
def timm_file(small, tmp_path):
    """A file in timm's layout without our card, and its arrays."""
    model = small(gelu="erf", width=64, heads=1)
    vitkit.save(model, tmp_path / "m.pth", "timm")
    return tmp_path / "m.pth", torch.load(tmp_path / "m.pth")


def misfit(path, code, *values, **options):
    with refused(code, path.name, *values) as caught:
        vitkit.load(path, **options)
    assert isinstance(caught.value, vitkit.WeightsError)


def test_a_missing_array_is_named(timm_file):
    path, state = timm_file
    del state["blocks.1.mlp.fc2.bias"]
    torch.save(state, path)
    misfit(path, "weights.names", "missing: blocks.1.mlp.fc2.bias", "allow_missing")


def test_an_array_too_many_is_named(timm_file):
    path, state = timm_file
    torch.save(state | {"aux_token": torch.zeros(1, 1, 64), "head_aux.bias": torch.zeros(5)}, path)
    misfit(path, "weights.names", "unexpected: aux_token, head_aux.bias")


def test_an_array_of_another_shape_is_named_with_both_shapes(timm_file):
    path, state = timm_file
    state["blocks.0.mlp.fc2.weight"] = torch.zeros(64, 40)
    torch.save(state, path)
    misfit(path, "weights.shape", "blocks.0.mlp.fc2.weight", "(64, 40)", "(64, 48)")


def test_a_half_matching_file_is_never_loaded_in_part(timm_file):
    path, state = timm_file
    torch.save({n: t for n, t in state.items() if not n.startswith("blocks.1.attn")}, path)
    misfit(path, "weights.names", "unexpected: blocks.1")  # of what remains of the second block


def test_missing_parameters_can_be_allowed_by_name_and_start_fresh(timm_file):
    path, state = timm_file
    del state["head.bias"]
    torch.save(state, path)
    misfit(path, "weights.names", "missing: head.bias")
    misfit(path, "weights.names", "missing: head.bias", allow_missing=("encoder",))
    model = vitkit.load(path, allow_missing=("head",))
    assert (model.head.bias == 0).all() and torch.equal(model.head.weight, state["head.weight"])
    assert any("initialised" in note and "head.bias" in note for note in model.origin.notes)


def test_arrays_can_be_ignored_by_name(timm_file):
    path, state = timm_file
    torch.save(state | {"aux.weight": torch.zeros(3)}, path)
    assert any("aux.weight" in note for note in vitkit.load(path, ignore=("aux.",)).origin.notes)


@pytest.mark.parametrize("shape", [(5, 64), (5, 40)], ids=str)
def test_an_array_that_is_ignored_and_may_be_missing_starts_fresh(timm_file, shape):
    path, state = timm_file
    torch.save(state | {"head.weight": torch.ones(shape)}, path)
    model = vitkit.load(path, allow_missing=("head",), ignore=("head.w",))
    assert (model.head.weight == 0).all() and torch.equal(model.head.bias, state["head.bias"])
    assert [
        note for note in model.origin.notes if note.startswith("skipped 1 arrays") and "head.weight" in note
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(timm_file, bad):
    path, state = timm_file
    state["norm.bias"][3] = bad
    torch.save(state, path)
    with refused("weights.values", path, "norm.bias", "1 values") as caught:
        vitkit.load(path)
    assert isinstance(caught.value, vitkit.UntrustedCheckpoint)


def test_another_architecture_is_refused_with_what_was_found(tmp_path):
    save_file(
        {"conv1.weight": torch.zeros(8, 3, 7, 7), "fc.bias": torch.zeros(2)}, tmp_path / "r.safetensors"
    )
    misfit(tmp_path / "r.safetensors", "weights.format", "2 arrays", "conv1.weight")


def test_a_table_on_no_square_grid_asks_for_the_size(small, tmp_path):
    model = small(gelu="erf", image_size=(24, 56), width=64, heads=1)
    vitkit.save(model, tmp_path / "m.pth", "timm")
    misfit(tmp_path / "m.pth", "request.missing", "22 positions", "image_size", "--image-size")
    back = vitkit.load(tmp_path / "m.pth", image_size=(24, 56))
    assert back.config.image_size == (24, 56)
    misfit(tmp_path / "m.pth", "weights.shape", "24x24", "3x3", "22", image_size=(24, 24))


def test_a_table_that_may_lack_the_class_entry_is_told_and_can_be_corrected(small, tmp_path):
    """3x5 patches and a class token make 16 positions, which a 4x4 grid without that entry has too."""
    model = small(gelu="erf", image_size=(24, 40), width=64, heads=1)
    vitkit.save(model, tmp_path / "m.pth", "timm")
    notes = vitkit.load(tmp_path / "m.pth").origin.notes
    assert any("16 positions: a 4x4 grid" in note for note in notes)
    back = vitkit.load(tmp_path / "m.pth", image_size=(24, 40))
    assert torch.equal(back.positions.table, model.positions.table)


def test_a_joined_qkv_asks_for_the_heads_where_nothing_tells(small, tmp_path):
    vitkit.save(small(gelu="erf"), tmp_path / "m.pth", "timm")
    misfit(tmp_path / "m.pth", "request.missing", "width 32", "heads=", "--heads")
    assert vitkit.load(tmp_path / "m.pth", heads=2).config.heads == 2


def test_assumptions_are_told(timm_file):
    assert any("1 heads of width 64" in note for note in vitkit.load(timm_file[0]).origin.notes)


def test_labels_must_be_as_many_as_classes(timm_file):
    assert vitkit.load(timm_file[0], labels="abcde").labels == tuple("abcde")
    with refused("data.labels", "4 labels", "5 classes"):
        vitkit.load(timm_file[0], labels="abcd")


def test_a_file_that_is_not_there_is_named_with_near_names():
    with refused("weights.not-found", "nowhere.npz"):
        vitkit.load("nowhere.npz")
    with refused("weights.not-found", "ViT-B/16.i21k"):
        vitkit.load("ViT-B/16")


def test_a_file_written_by_a_newer_version_says_so(small, tmp_path):
    path = tmp_path / "m.safetensors"
    vitkit.save(small(), path)
    path.write_bytes(path.read_bytes().replace(b'\\"version\\": 1', b'\\"version\\": 2'))
    misfit(path, "weights.format", "newer vitkit")


@pytest.mark.parametrize(
    ("options", "format", "words"),
    [
        ({"positions": "relative"}, "official", "positions='relative'"),
        ({"attention": "axial", "head": "gap"}, "timm", "attention='axial'"),
        ({"head": "gap"}, "torchvision", "erf GELU"),
        ({"head": "gap", "gelu": "erf"}, "torchvision", "head='gap'"),
        ({"representation": 8}, "hf", "tanh layer"),
        ({"image_size": (24, 40)}, "hf", "square"),
        ({"head": "gap", "class_token": True}, "official", "class token"),
        ({"representation": 8}, "timm", "representation=8"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(
    small, tmp_path, options, format, words
):
    name = {"official": "m.npz", "timm": "m.pth", "torchvision": "m.pth", "hf": "m"}[format]
    with pytest.raises(vitkit.WeightsError) as caught:
        vitkit.save(small(**options), tmp_path / name, format)
    assert caught.value.code == "weights.unsupported" and words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_resnets_are_refused_where_only_vits_live(small_resnet, tmp_path):
    with pytest.raises(vitkit.WeightsError) as caught:
        vitkit.save(small_resnet(), tmp_path / "m.pth", "torchvision")
    assert caught.value.code == "weights.unsupported" and "torchvision" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "format", "code", "words"),
    [
        ("m.pth", None, "request.missing", "format="),
        ("m.npz", "timm", "request.conflict", ".safetensors, .pth"),
        ("m.npz", "keras", "request.unknown", "'keras'"),
    ],
)
def test_names_and_formats_that_do_not_go_together_are_refused(small, tmp_path, name, format, code, words):
    with pytest.raises(vitkit.WeightsError) as caught:
        vitkit.save(small(), tmp_path / name, format)
    assert caught.value.code == code and words in str(caught.value)


def test_a_failed_save_leaves_the_old_file_and_no_litter(small, tmp_path, monkeypatch):
    path = tmp_path / "m.npz"
    vitkit.save(small(), path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(vitkit.WeightsError) as caught:
        vitkit.save(small(), path)
    assert caught.value.code == "disk.full" and str(path) in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_named(small, tmp_path):
    with pytest.raises(vitkit.WeightsError) as caught:
        vitkit.save(small(), tmp_path / "nowhere" / "m.npz")
    assert caught.value.code == "file.not-found" and str(tmp_path / "nowhere") in str(caught.value)


def test_a_loaded_model_does_not_hang_on_its_file(small, tmp_path):
    path = tmp_path / "m.safetensors"
    vitkit.save(model := small(), path)
    back = vitkit.load(path)
    path.write_bytes(b"")
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(back(images), model(images))


PEAK = """
import resource, sys, vitkit
vitkit.load(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = vitkit.load(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"), [("m.safetensors", "vitkit"), ("m.npz", "official"), ("m.pth", "timm")]
)
def test_loading_holds_no_more_than_the_file_and_one_model(small, tmp_path, name, format):
    vitkit.save(small(gelu="erf", width=64, heads=1), tmp_path / f"small-{name}", format)
    vitkit.save(vitkit.build("ViT-B/32", gelu="erf"), tmp_path / name, format)  # 353 MB
    arguments = [sys.executable, "-c", PEAK, tmp_path / f"small-{name}", tmp_path / name]
    growth = int(subprocess.run(arguments, capture_output=True, check=True, text=True).stdout) * 1024
    size = (tmp_path / name).stat().st_size
    assert growth <= 2 * size + 60e6


def test_safetensors_of_timm_carry_no_obstacle_for_others(small, tmp_path):
    vitkit.save(model := small(gelu="erf"), tmp_path / "m.safetensors", "timm")
    arrays = load_file(tmp_path / "m.safetensors")
    assert torch.equal(arrays["blocks.0.attn.qkv.weight"], model.encoder.blocks[0].attention.qkv.weight)


@pytest.mark.parametrize(
    ("format", "name"), [("timm", "m.pth"), ("timm", "m.safetensors"), ("torchvision", "m.pth")]
)
def test_a_head_count_that_the_arrays_do_not_hold_is_told(small, tmp_path, format, name, capsys):
    from test_cli import run

    vitkit.save(small(gelu="erf", width=64, heads=4), tmp_path / "own.safetensors")
    assert run("convert", tmp_path / "own.safetensors", tmp_path / name, "--format", format) == 0
    messages = " ".join(capsys.readouterr().out.split())
    assert "heads=4" in messages and "guess 1" in messages and "num_heads=4" in messages
    if name.endswith(".pth"):  # the remedy that is told does work
        assert "vitkit convert FILE OUT.safetensors --heads 4" in messages
        assert run("convert", tmp_path / name, tmp_path / "back.safetensors", "--heads", 4) == 0
        assert vitkit.load(tmp_path / "back.safetensors").config.heads == 4
    else:
        assert vitkit.load(tmp_path / name).config.heads == 4


def test_a_grid_that_the_arrays_do_not_hold_is_told(small, tmp_path):
    model = small(gelu="erf", width=64, heads=1, image_size=(24, 40))
    notes = " ".join(vitkit.save(model, tmp_path / "m.pth", format="timm"))
    assert "image_size=24x40" in notes and "--image-size 24x40" in notes and "heads" not in notes


def test_what_every_reader_guesses_rightly_is_not_told(small, tmp_path):
    model = small(gelu="erf", width=64, heads=1)
    notes = (*vitkit.save(model, tmp_path / "m.pth", format="timm"), *vitkit.save(model, tmp_path / "m.npz"))
    assert not [note for note in notes if "guess" in note]


def test_heads_given_to_load_outrank_the_card(small, tmp_path):
    vitkit.save(small(heads=4), tmp_path / "m.safetensors")
    assert vitkit.load(tmp_path / "m.safetensors", heads=2).config.heads == 2
