"""Every number and name that a model file may say of itself: it loads, or one error names the field."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, fields

import pytest
import safetensors.torch
import torch
from hostile import parts, safe
from refusals import refused

import vitkit
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.resnet import ResNetConfig, StemConfig
from vitkit.models.text_tower import TextConfig
from vitkit.models.vit import ViTConfig
from vitkit.weights.limits import RANGES

ODD = [
    -1, 0, 1, 0.5, 10**9, 2**63, 10**400, 1e-9, 1e308, math.nan, math.inf, True, None, "", "x" * 10**5, [],
    [1], [10**9] * 2, [math.nan] * 3, [1] * 10**4, {"a": 1},
]  # fmt: skip
# Runs in a process of its own, whose memory is limited: [path, what came of it] for each.
DRIVER = """
import json, resource, sys
import torch, vitkit
from vitkit.inference.predict import logits, pixels
paths = json.load(sys.stdin)
vitkit.load(paths[0])
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**30,) * 2)
for path in paths:
    try:
        vitkit.load(path)
        print(json.dumps([path, "loaded", ""]))
    except vitkit.WeightsError as error:
        print(json.dumps([path, error.code, str(error)]))
"""


def outcomes(paths: list) -> dict[str, tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([str(p) for p in paths]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {path: (kind, message) for path, kind, message in map(json.loads, done.stdout.splitlines())}


def with_card(data: bytes, *keys: str, value) -> bytes:
    """A file of ours with one entry of its card changed."""
    header, body = parts(data)
    card = json.loads(header["__metadata__"]["vitkit"])
    inner = card
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    header["__metadata__"]["vitkit"] = json.dumps(card)
    return safe(header, body)


def verdict(path, kind: str, message: str, field: str) -> str:
    """What is wrong with how a file was answered."""
    if kind == "loaded":
        return ""
    if kind.partition(".")[0] not in ("weights", "model", "request", "data"):
        return f"{kind}: {message}"
    if str(path) not in message:
        return f"does not name the file: {message}"
    return "" if len(message) < 2000 else f"a message of {len(message)} characters"


TEXT = {"vocabulary": 8, "length": 4, "width": 8, "depth": 1, "heads": 1, "hidden": 8, "output": 32}


def sample(small, small_hybrid, small_resnet) -> dict[str, tuple]:
    """A model that has every field of each kind of configuration, and where its fields stand in a card."""
    return {
        "ViTConfig": (small(depth=1), ViTConfig, ("config",)),
        "sincos": (small(depth=1, positions="sincos2d", injection="shared"), ViTConfig, ("config",)),
        "TextConfig": (small(depth=1, text=TextConfig(**TEXT)), TextConfig, ("config", "text")),
        "StemConfig": (small_hybrid(blocks=(1,), depth=1), StemConfig, ("config", "stem")),
        "ResNetConfig": (small_resnet(blocks=(1,)), ResNetConfig, ("config",)),
        "Preprocessing": (small(depth=1), Preprocessing, ("preprocessing",)),
        "Origin": (small(depth=1), Origin, ("origin",)),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by the system")
def test_every_field_of_a_card_loads_or_is_refused(small, small_hybrid, small_resnet, tmp_path):
    files = {}
    for kind, (model, dataclass, place) in sample(small, small_hybrid, small_resnet).items():
        vitkit.save(model, tmp_path / "good.safetensors")
        good = (tmp_path / "good.safetensors").read_bytes()
        names = [f.name for f in fields(dataclass)]
        for field in ["image_size", "patch", "width"] if kind == "sincos" else [*names, "unknown"]:
            for n, value in enumerate(ODD):
                path = tmp_path / f"{kind}-{field}-{n}.safetensors"
                path.write_bytes(with_card(good, *place, field, value=value))
                files[path] = field
        for key in (
            ("labels", "multilabel", "layout", "kind", "version", *place) if kind == "StemConfig" else ()
        ):
            for n, value in enumerate(ODD):
                path = tmp_path / f"{kind}-top-{key}-{n}.safetensors"
                path.write_bytes(with_card(good, key, value=value))
                files[path] = key
    result = outcomes([tmp_path / "good.safetensors", *files])
    wrong = [w for path, field in files.items() if (w := verdict(path, *result[str(path)], field))]
    assert not wrong, "\n".join(wrong[:10])
    loaded = sum(kind == "loaded" for kind, _ in result.values())
    assert len(files) > 900 and loaded > 50


def test_every_number_of_every_configuration_has_a_range():
    for kind in (ViTConfig, TextConfig, StemConfig, ResNetConfig, Preprocessing):
        for field in fields(kind):
            default = field.default[0] if isinstance(field.default, tuple) else field.default
            if type(default) in (int, float):
                low, high = RANGES[field.name]
                assert low <= default <= high


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("preprocessing", "crop"), 1e-9, ("crop", "1e-09", "0.05")),
        (("preprocessing", "std"), [0.5, 1e-30, 0.5], ("std", "1e-30", "0.0001")),
        (("preprocessing", "std"), [0.5, -0.5, 0.5], ("std", "-0.5", "0.0001")),
        (("preprocessing", "mean"), [1e30] * 3, ("mean", "1e+30", "10000")),
        (("preprocessing", "mean"), [0.5], ("0.5",)),
        (("config", "image_size"), [2**20] * 2, ("image_size", "1048576", "8192")),
        (("config", "image_size"), [8192] * 2, ("image_size is 8192x8192", "patches")),
        (("config", "classes"), 2**30, ("classes", "1073741824", "16777216")),
        (("labels",), ["x" * 20_000] + list("bcde"), ("labels", "20000", "10000")),
    ],
)
def test_the_error_names_file_field_value_and_range(small, tmp_path, keys, value, words):
    vitkit.save(small(positions="sincos2d", patch=1, width=8, heads=1), tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "bad.safetensors").write_bytes(with_card(data, *keys, value=value))
    with refused("weights.format", "bad.safetensors", *words):
        vitkit.load(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": (8192, 8192), "patch": 1, "positions": "none", "width": 1, "heads": 1},
        {"image_size": (4096, 4096), "patch": 16, "positions": "2d", "width": 8, "hidden": 2**16},
        {"image_size": (1024, 1024), "patch": 4, "positions": "relative"},
        {"image_size": (2048, 2048), "patch": 8, "positions": "sincos2d", "width": 2**13, "depth": 0},
    ],
)
def test_sizes_that_only_together_fill_the_memory_are_refused(options):
    from vitkit.weights.limits import check_model

    config = ViTConfig(**({"width": 32, "depth": 1, "heads": 1, "hidden": 32, "classes": 0} | options))
    height, width = options["image_size"]
    with refused("model.config", f"image_size is {height}x{width}"):
        check_model(config, Preprocessing(), ())


@pytest.mark.parametrize("name", ["ViT-H/14", "ViT-G/14", "ViT-B/8", "R50+ViT-L/32", "BiT-R152x4"])
def test_published_models_are_within_their_ranges_at_high_resolution(name):
    from vitkit.models.variants import configure
    from vitkit.weights.limits import check_model

    side = 1008 if name.endswith("14") else 1024
    check_model(
        configure(name, image_size=(side, side), classes=21_843), Preprocessing(resize="crop", crop=0.875), ()
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by the system")
def test_every_entry_of_foreign_side_files_loads_or_is_refused(small, tmp_path):
    model = small(gelu="erf", width=64, heads=1, depth=1)
    vitkit.save(model, tmp_path / "good")
    vitkit.save(model, tmp_path / "timm.pth", format="timm")
    state = torch.load(tmp_path / "timm.pth", weights_only=True)
    safetensors.torch.save_file(state, tmp_path / "timm.safetensors")
    header, body = parts((tmp_path / "good" / "model.safetensors").read_bytes())
    del header["__metadata__"]
    (tmp_path / "good" / "model.safetensors").write_bytes(safe(header, body))
    names = ("config.json", "preprocessor_config.json")
    good = {name: json.loads((tmp_path / "good" / name).read_text()) for name in names}
    good["preprocessor_config.json"] |= {
        "do_center_crop": True,
        "crop_size": 32,
        "size": {"shortest_edge": 36},
    }
    shown = {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "crop_mode": "center",
    }
    timm = {"pretrained_cfg": shown, "model_args": {"num_heads": 1}, "label_names": list("abcde")}
    read = {
        "config.json": (
            "model_type",
            "hidden_act",
            "num_attention_heads",
            "image_size",
            "layer_norm_eps",
            "id2label",
        ),
        "preprocessor_config.json": tuple(good["preprocessor_config.json"]),
    }
    changes = [(name, key, good[name] | {key: v}) for name in names for key in read[name] for v in ODD]
    changes += [("timm", key, timm | {key: value}) for key in timm for value in ODD]
    changes += [("timm", key, timm | {"pretrained_cfg": shown | {key: v}}) for key in shown for v in ODD]
    changes += [("timm", "num_heads", timm | {"model_args": {"num_heads": v}}) for v in ODD]
    files = {}
    for n, (name, key, content) in enumerate(changes):
        folder = tmp_path / f"{n}"
        folder.mkdir()
        if name == "timm":
            (folder / "model.safetensors").hardlink_to(tmp_path / "timm.safetensors")
        else:
            (folder / "model.safetensors").hardlink_to(tmp_path / "good" / "model.safetensors")
            for other in set(names) - {name}:
                (folder / other).write_text(json.dumps(good[other]))
        (folder / ("config.json" if name == "timm" else name)).write_text(json.dumps(content))
        files[folder] = key
    result = outcomes([tmp_path / "good", *files])
    wrong = [f"{key}: {w}" for path, key in files.items() if (w := verdict(path, *result[str(path)], key))]
    assert not wrong, "\n".join(wrong[:10])
    assert result[str(tmp_path / "good")][0] == "loaded"
    refused = [message for kind, message in result.values() if kind != "loaded"]
    assert len(refused) > 100
    named = ("config.json", "positions", "heads", "image_size", "labels", "norm_eps", "preprocessing", "mean")
    assert not [m for m in refused if not any(word in m for word in named)]


def test_our_own_models_never_leave_the_ranges(small, tmp_path):
    """What build() makes and save() writes, load() reads."""
    model = small(dropout=0.5, stochastic_depth=0.9, norm_eps=0.5)
    model.labels = ("é" * 255, "b", "c", "d", "e")
    vitkit.save(model, tmp_path / "m.safetensors")
    assert asdict(vitkit.load(tmp_path / "m.safetensors").config) == asdict(model.config)
