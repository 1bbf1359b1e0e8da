"""The formula against the counter, Table 6's exaFLOPs, Table 2's core-days, and the ledger of a run."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vitkit.metrics import speed
from vitkit.metrics.cost import flops, forward_flops, ledger, parameters, peak_flops, tpu_v3_core_days
from vitkit.metrics.speed import Meter, busy_reader
from vitkit.models.resnet import StemConfig
from vitkit.models.variants import NAMED, configure, skeleton, variant
from vitkit.models.vit import ViTConfig

JFT = 303e6  # images; the number that reproduces the table

# model, epochs, exaFLOPs as printed
TABLE_6 = [
    ("ViT-B/32", 7, 55), ("ViT-B/16", 7, 224), ("ViT-L/32", 7, 196), ("ViT-L/16", 7, 783),
    ("ViT-L/16", 14, 1567), ("ViT-H/14", 14, 4262), ("BiT-R50x1", 7, 50), ("BiT-R50x2", 7, 199),
    ("BiT-R101x1", 7, 96), ("BiT-R152x1", 7, 141), ("BiT-R152x2", 7, 563), ("BiT-R152x2", 14, 1126),
    ("BiT-R200x3", 14, 3306), ("R50x1+ViT-B/32", 7, 106), ("R50x1+ViT-B/16", 7, 274),
    ("R50x1+ViT-L/32", 7, 246), ("R50x1+ViT-L/16", 7, 859), ("R50x1+ViT-L/16", 14, 1668),
]  # fmt: skip
EXCEPTIONS = {  # ours / printed - 1, for rows that are more than 1 % away
    ("ViT-B/32", 7): 0.020,  # 56.1; all other ViTs are within 0.3 %
    ("R50x1+ViT-L/16", 7): -0.031,  # 832.5; the printed one is not half of its own 14 epochs, 1668
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NAMED))
def test_the_formula_is_the_counters_number_for_every_named_model(name):
    """Exactly; at 384 pixels, or the next size that fits patches of 14."""
    config = variant(name)
    stride = config.stride if isinstance(config, ViTConfig) else 1
    for pixels in (224, -(-384 // stride) * stride):
        sized = replace(config, image_size=(pixels, pixels))
        assert forward_flops(config, (pixels, pixels)) == flops(skeleton(sized), (pixels, pixels))


@pytest.mark.parametrize(
    "options",
    [
        {"head": "gap"}, {"head": "map"}, {"head": "map", "class_token": True}, {"positions": "relative"},
        {"positions": "sincos2d", "injection": "shared"}, {"representation": 40}, {"classes": 0},
        {"attention": "axial", "head": "gap", "image_size": (32, 48)}, {"channels": 1},
        {"attention": "axial", "head": "map", "positions": "relative", "image_size": (32, 48)},
        {"registers": 4, "mlp": "swiglu"}, {"distilled": True}, {"head": "map", "mlp": "swiglu"},
        {"head": "token+gap"},
        {"rope": "dinov3", "positions": "none", "qk_norm": True, "key_bias": False},
        {"input_norm": True, "representation": 24, "representation_kind": "linear", "classes": 0},
        {"stem": StemConfig(blocks=(1, 2), width=32), "patch": 1, "image_size": (40, 56)},
        {"stem": StemConfig(blocks=(), width=32), "patch": 2, "image_size": (40, 56)},
    ],
)  # fmt: skip
def test_so_it_is_with_every_choice(options):
    sizes = {
        "width": 32,
        "depth": 2,
        "heads": 2,
        "hidden": 48,
        "patch": 8,
        "image_size": (32, 32),
        "classes": 5,
    }
    config = configure("ViT-Ti/8", **(sizes | options))
    assert forward_flops(config) == flops(skeleton(config), config.image_size, config.channels)


@pytest.mark.parametrize("size", [(64, 64), (61, 47), (7, 1)])
def test_so_it_is_with_resnets_of_odd_sizes(size):
    config = configure("BiT-R50x1", blocks=(1, 2, 1), width=32, image_size=size, classes=3)
    assert forward_flops(config) == flops(skeleton(config), size)
    assert forward_flops(config, padding=False) < forward_flops(config)


@pytest.mark.parametrize("size", [(64, 64), (61, 47), (33, 8)])
def test_and_with_axial_resnets(size):
    sizes = {"blocks": (1, 2, 1), "width": 32, "image_size": size, "classes": 3}
    config = configure("AxialResNet-50", **sizes)
    assert forward_flops(config) == flops(skeleton(config), size)
    assert forward_flops(config) == forward_flops(replace(config, heads=1))


@pytest.mark.parametrize(("name", "epochs", "printed"), TABLE_6)
def test_table_6_is_reproduced_within_a_percent_with_two_exceptions(name, epochs, printed):
    forward = forward_flops(variant(name), padding=False)
    result = ledger(parameters=0, images_seen=round(JFT * epochs), forward=forward, device_seconds=1).exaFLOPs
    away = EXCEPTIONS.get((name, epochs))
    if away is None:
        assert result == pytest.approx(printed, rel=0.01)
    else:
        assert result / printed - 1 == pytest.approx(away, abs=0.001)


def test_products_with_padding_are_what_puts_resnets_above_table_6():
    for name, epochs, printed in TABLE_6[6:13]:
        result = 3 * JFT * epochs * forward_flops(variant(name)) / 1e18
        assert 1.03 < result / printed < 1.042


@pytest.mark.parametrize(
    ("name", "images", "printed", "away"),
    [
        ("ViT-L/16", 90 * 14.2e6, 230, -0.01),
        ("ViT-L/16", 14 * JFT, 680, 0.112),
        ("ViT-H/14", 14 * JFT, 2500, -0.178),
    ],
)
def test_core_days_are_as_far_from_table_2_as_is_said(name, images, printed, away):
    result = tpu_v3_core_days(3 * images * forward_flops(variant(name)))
    assert result / printed - 1 == pytest.approx(away, abs=0.001)


def test_a_ledger_adds_up():
    result = ledger(
        parameters=7, images_seen=10**9, forward=10**10, device_seconds=7200.0, joules=7.2e6,
        price_per_hour=2.5, peak=1e16,
    )  # fmt: skip
    assert result.training_FLOPs == 3 * 10**19 and result.exaFLOPs == 30 and result.device_hours == 2
    assert result.energy_kWh == 2 and result.price == 5
    assert abs(result.MFU - 3e19 / 7200 / 1e16) < 1e-12
    assert result.tpu_v3_core_days == pytest.approx(3e19 / (24e12 * 86400), rel=1e-3)
    bare = ledger(parameters=7, images_seen=0, forward=1, device_seconds=0.0, peak=1.0).to_json()
    assert bare["energy_kWh"] is bare["price"] is bare["MFU"] is None and bare["training_FLOPs"] == 0


def test_peaks_are_known_by_name_and_precision():
    assert peak_flops("NVIDIA H200", "bf16") == peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12 and peak_flops("NVIDIA L4", "bf16") == 121e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA L40S", "bf16") == 362e12
    for unknown in ("NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA L40", "x86_64"):
        assert peak_flops(unknown, "bf16") is None
    assert peak_flops("NVIDIA H200", "fp32") is None


class Nvml:
    """A driver's library whose device uses two joules between looks."""

    def __init__(self, fails: str = ""):
        self.fails, self.millijoules = fails, 5000

    def __getattr__(self, name):
        def call(*args):
            if name == "nvmlDeviceGetHandleByUUID":
                assert args[0] == b"GPU-abc"
            if name == "nvmlDeviceGetUtilizationRates":
                args[1][0], args[1][1] = 87, 20  # percent: of the computing units, and of the memory
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                self.millijoules += 2000
                args[1]._obj.value = self.millijoules
            return int(name == self.fails)

        return call


def test_energy_is_told_between_looks_where_a_device_reports_it(monkeypatch):
    assert Meter("cpu").lap() is None
    monkeypatch.setattr(speed.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    meter = Meter("cuda")
    assert [meter.lap(), meter.lap()] == [2.0, 2.0]
    for fails in ("nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, fails=fails: Nvml(fails))
        assert Meter("cuda:1").lap() is None

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert Meter("cuda").lap() is None


def test_a_gpu_is_busy_as_its_driver_reports(monkeypatch):
    assert busy_reader("cpu")() is None
    monkeypatch.setattr(speed.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    assert busy_reader("cuda:1")() == 0.87
    for fails in ("nvmlInit_v2", "nvmlDeviceGetUtilizationRates"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, fails=fails: Nvml(fails))
        assert busy_reader("cuda")() is None


def test_parameters_are_counted():
    assert parameters(skeleton(variant("ViT-B/16"))) == 86_567_656
