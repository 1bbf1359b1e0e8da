"""A weight format in one file: dropped into weights/formats/ it is read, written, converted and listed."""

import importlib
import sys

import pytest
import torch

import vitkit
from vitkit.commands import catalogue
from vitkit.weights import formats as package
from vitkit.weights.convert import convert
from vitkit.weights.formats import formats, layouts, register

TOY = '''
"""A toy format: our names in upper case, dense kernels transposed."""

from vitkit.models.variants import skeleton
from vitkit.models.vit import ViTConfig
from vitkit.weights.formats.layout import DENSE, SAME, Entry, Format, Layout, ModelSpec, count, required_shape


def infer(shapes, hints):
    width, _, patch, _ = required_shape(shapes, "PROJECT.WEIGHT", 4)
    return ModelSpec(
        ViTConfig(
            width=width,
            depth=count(shapes, "ENCODER.BLOCKS.{}.NORM1.WEIGHT"),
            heads=hints.heads or 2,
            hidden=required_shape(shapes, "ENCODER.BLOCKS.0.MLP.UP.WEIGHT", 2)[0],
            patch=patch,
            image_size=hints.image_size or (32, 32),
            classes=required_shape(shapes, "HEAD.WEIGHT", 2)[1],
        ),
        notes=("read by the toy",),
    )


def entries(config):
    names = skeleton(config).state_dict()
    return [Entry(name, (name.upper(),), DENSE if name == "head.weight" else SAME) for name in names]


LAYOUT = Layout(
    name="toy",
    recognises=lambda shapes: "PROJECT.WEIGHT" in shapes,
    infer=infer,
    entries=entries,
    unsupported=lambda config: "" if isinstance(config, ViTConfig) else "toys are ViTs",
    native=lambda config: config,
)
FORMAT = Format(
    name="toy",
    description="a toy",
    layouts=(LAYOUT,),
    endings=(".toy", ".npz", ""),
    default_ending=".toy",
)
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The toy's file in a folder that belongs to the package vitkit.weights.formats."""
    folder = tmp_path / "formats"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield
    sys.modules.pop(f"{package.__name__}.toy", None)
    vars(package).pop("toy", None)


def equal(one, other):
    return all(torch.equal(a, other.state_dict()[name]) for name, a in one.state_dict().items())


def test_formats_and_layouts_are_in_a_fixed_order():
    assert list(formats()) == [
        "vitkit", "official", "yolos", "dino", "eomt", "timm", "clip", "hf", "rf-detr", "torchvision",
    ]  # fmt: skip
    assert [layout.name for layout in layouts()] == [
        "vitkit", "official", "official-bit", "big_vision-bit", "yolos", "dinov3", "dinov2", "eomt",
        "timm-eva", "timm", "open_clip", "timm-bit", "clip", "hf-eomt", "hf-yolos", "hf-dinov3", "hf-dinov2",
        "hf-clip", "hf-siglip", "hf", "rf-detr", "torchvision",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["m.toy", "m.npz", "m"])
def test_a_dropped_in_format_saves_and_loads(toy, small, tmp_path, name):
    model = small()
    vitkit.save(model, tmp_path / name, None if name == "m.toy" else "toy")
    back = vitkit.load(tmp_path / name)
    assert equal(model, back) and back.origin.format == "toy" and back.config == model.config
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(model.eval()(images), back(images))


def test_a_dropped_in_format_is_recognised_without_a_card(toy, small, tmp_path):
    vitkit.save(model := small(), tmp_path / "m.toy")  # this ending has no place for a card
    back = vitkit.load(tmp_path / "m.toy", heads=model.config.heads)
    assert "read by the toy" in back.origin.notes and equal(model, back)


def test_a_dropped_in_format_converts_to_and_from_others(toy, small, tmp_path):
    vitkit.save(model := small(gelu="erf"), tmp_path / "m.safetensors")
    there = convert(tmp_path / "m.safetensors", tmp_path / "m.npz", format="toy")
    assert there.ok and there.format == "toy" and there.parity is None
    back = convert(tmp_path / "m.npz", tmp_path / "m.pth", format="timm")
    assert back.ok and equal(model, vitkit.load(tmp_path / "m.pth", heads=model.config.heads))


def test_a_dropped_in_format_is_listed_last_and_refuses_what_it_cannot_store(toy, small_resnet, tmp_path):
    assert list(formats())[-1] == "toy"
    row = {"format": "toy", "what": "read, write", "files": ".toy .npz folder", "holds": "a toy"}
    assert catalogue.formats()[-1] == row
    with pytest.raises(vitkit.WeightsError, match="toys are ViTs") as caught:
        vitkit.save(small_resnet(), tmp_path / "m.toy")
    assert caught.value.code == "weights.unsupported"


def test_a_format_can_be_registered_from_another_package(small, tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(package, "REGISTERED", {})
    register(importlib.import_module("elsewhere").FORMAT)
    vitkit.save(model := small(), tmp_path / "m.toy")
    assert equal(model, vitkit.load(tmp_path / "m.toy"))
