"""vitkit cost: what a recipe costs by formula, and images a second and the largest batch, measured."""

import json
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from test_cli import run

import vitkit
from vitkit.commands.cost import device_days
from vitkit.metrics import speed
from vitkit.metrics.speed import images_per_second, largest_that_fits


def cost(capsys, *words, code: int = 0) -> dict:
    assert run("cost", *words, "--json", "--device", "cpu") == code
    return json.loads(capsys.readouterr().out)


def test_the_papers_numbers_follow_from_the_recipe(capsys):
    """Table 6: 783 exaFLOPs for ViT-L/16 and 7 epochs of JFT; Table 2: 0.23k core-days on ImageNet-21k."""
    result = cost(capsys, "ViT-L/16", "ViT-B/16", "--recipe", "jft.ViT-L/16", "--no-measure")
    large, base = result["models"]
    assert [row["exaFLOPs"] for row in (large, base)] == pytest.approx([783, 224], rel=0.01)
    assert large["GFLOPs"] == pytest.approx(2 * 61.6, rel=0.01) and large["device_days"] is None
    assert result["images_seen"] == 517822 * 4096
    of_384 = next(row for row in large["sizes"] if row["pixels"] == 384)
    assert of_384["GFLOPs"] == pytest.approx(2 * 191.07, rel=0.01) and of_384["images_per_second"] is None
    days = cost(capsys, "ViT-L/16", "--recipe", "i21k.ViT-L/16", "--no-measure")["models"][0]
    assert days["TPUv3_core_days"] == pytest.approx(230, rel=0.02)


def test_a_stated_rate_gives_device_days_and_a_file_is_a_model(capsys, small, tmp_path):
    vitkit.save(small(), tmp_path / "m.safetensors")
    words = [tmp_path / "m.safetensors", "--recipe", "pets", "--no-measure", "--rate", "100"]
    row = cost(capsys, *words)["models"][0]
    assert row["device_days"] == pytest.approx(row["exaFLOPs"] * 1e18 / 1e14 / 86400)
    assert row["parameters"] > 0 and [at["pixels"] for at in row["sizes"]] == [64, 128, 224, 384, 512]


@pytest.mark.slow
def test_speed_and_batch_are_measured_and_drawn(capsys, small, small_resnet, tmp_path):
    vitkit.save(small(), tmp_path / "vit.safetensors")
    vitkit.save(small_resnet(), tmp_path / "resnet.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in ("vit", "resnet")]
    words = [*files, "--recipe", "pets", "--sizes", "6", "64", "384", "--seconds", "0.02"]
    result = cost(capsys, *words, "--out", tmp_path / "new" / "cost.png")
    vit, resnet = result["models"]
    odd, even, _ = vit["sizes"]
    assert odd["images_per_second"] is None and "6" in odd["why"], "6 pixels hold no patch of 8"
    assert even["images_per_second"] > 0 and even["batch"] >= 1 and even["largest_batch"] > 1
    assert resnet["sizes"][0]["images_per_second"] > 0 and vit["device_days"] > 0
    assert even["largest_batch"] > vit["sizes"][2]["largest_batch"] > 0
    assert Image.open(tmp_path / "new" / "cost.png").size[0] > 800
    assert run("cost", *words, "--device", "cpu", "--out", tmp_path / "cost.svg") == 0
    output = capsys.readouterr().out
    assert "images per second" in output and "by the memory formula" in output
    assert ElementTree.parse(tmp_path / "cost.svg")


@pytest.mark.parametrize(
    "words, said",
    [
        (["ViT-Q/16", "--recipe", "pets"], "no model 'ViT-Q/16'"),
        (["ViT-B/16", "--recipe", "nothing"], "no recipe 'nothing'"),
        (["ViT-B/16", "--recipe", "scratch"], "--images"),
        (["ViT-B/16", "--recipe", "pets", "--sizes", "0"], "--sizes 0"),
        (["ViT-B/16", "--recipe", "pets", "--seconds", "nan"], "--seconds nan"),
        (["ViT-B/16", "--recipe", "pets", "--rate", "-1"], "--rate -1"),
        (["ViT-B/16", "--recipe", "pets", "--out", "cost.pdf"], "cost.pdf"),
        (["ViT-B/16", "--recipe", "pets", "--out", "cost.png", "--no-measure"], "--no-measure"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_measured(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("cost", *words) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 37, 1000])
def test_the_largest_that_fits_is_found_to_a_sixteenth(limit):
    result = largest_that_fits(lambda n: n <= limit, seconds=10)
    assert limit - max(0, limit // 16) <= result <= limit
    assert largest_that_fits(lambda n: True, seconds=10, most=64) == 64


def test_the_best_batch_wins_and_what_does_not_fit_ends_the_search(monkeypatch):
    """By a clock of its own: a batch takes 4 ms, however many images it has."""
    clock = [0.0]
    monkeypatch.setattr(speed.time, "monotonic", lambda: clock[0])

    def run(count):
        if count > 4:
            raise torch.OutOfMemoryError
        clock[0] += 0.004

    assert images_per_second(run, 1.0) == (pytest.approx(1000), 4)
    assert images_per_second(run, 0.001) == (pytest.approx(250), 1), "one batch is timed whatever it takes"
    assert images_per_second(lambda count: run(9), 1.0) is None

    def slow(count):
        clock[0] += 0.004 * count

    assert images_per_second(slow, 1.0)[0] == pytest.approx(250), "no larger batch once it brings nothing"
    assert clock[0] < 1.0


class Device:
    """By a clock of its own: a batch takes `fixed` seconds and `each` for every image.

    load: what the first run of each size takes besides. disturbed: sizes that take four times as long.
    """

    def __init__(self, monkeypatch, *, fixed=0.0, each=0.0, load=0.0, disturbed=()):
        self.fixed, self.each, self.load, self.disturbed = fixed, each, load, disturbed
        self.now, self.sizes = 0.0, []
        monkeypatch.setattr(speed.time, "monotonic", lambda: self.now)

    def run(self, count):
        if count not in self.sizes:
            self.sizes.append(count)
            self.now += self.load
        self.now += (self.fixed + self.each * count) * (4 if count in self.disturbed else 1)


def test_kernels_that_are_loaded_for_each_size_do_not_hide_the_best_batch(monkeypatch):
    """As ViT-B/16 on an H200: 0.3 s for the first run of a size, then 8 ms and 0.09 ms an image."""
    device = Device(monkeypatch, fixed=0.008, each=9e-5, load=0.3)
    rate, batch = images_per_second(device.run, 2.0)
    assert rate > 10_000 and batch >= 1024
    assert device.now < 2.0 + len(device.sizes) * 0.3 + 2.0, "and no size is repeated for long"


def test_every_size_is_within_the_time_where_each_is_faster(monkeypatch):
    device = Device(monkeypatch, fixed=0.004, load=0.3)
    assert images_per_second(device.run, 2.0) == (pytest.approx(2**16 / 0.004), 2**16)
    assert len(device.sizes) == 17


@pytest.mark.parametrize("disturbed", [2, 16, 64])
def test_one_disturbed_size_does_not_end_the_search(monkeypatch, disturbed):
    quiet = Device(monkeypatch, fixed=0.008, each=9e-5)
    best = images_per_second(quiet.run, 2.0)
    device = Device(monkeypatch, fixed=0.008, each=9e-5, disturbed=(disturbed,))
    assert images_per_second(device.run, 2.0)[0] == pytest.approx(best[0], rel=0.03)


def test_two_sizes_that_are_no_faster_end_it(monkeypatch):
    device = Device(monkeypatch, each=0.001)
    assert images_per_second(device.run, 2.0)[0] == pytest.approx(1000)
    assert device.sizes == [1, 2, 4]


@pytest.mark.parametrize(("each", "sizes"), [(5.0, [1]), (1.5, [1]), (0.5, [1, 2]), (0.1, [1, 2, 4])])
def test_a_slow_device_is_left_soon(monkeypatch, each, sizes):
    device = Device(monkeypatch, each=each)
    assert images_per_second(device.run, 2.0)[0] == pytest.approx(1 / each)
    assert device.sizes == sizes and device.now <= max(4.0, 2 * each)


def test_device_days_are_three_forward_passes_at_the_measured_pace():
    row = {"exaFLOPs": 2.0, "sizes": [{"pixels": 224, "images_per_second": 9.0},
                                      {"pixels": 384, "images_per_second": 1000.0}]}  # fmt: skip
    assert device_days(row, 10_240_000, (384, 384), None) == pytest.approx(3 * 10_240_000 / 1000 / 86_400)
    assert device_days(row, 10_240_000, (384, 384), 100.0) == pytest.approx(2e18 / 100e12 / 86_400)
    assert device_days(row, 10_240_000, (512, 512), None) is None, "nothing was measured at the recipe's size"
    row["sizes"][1]["images_per_second"] = None
    assert device_days(row, 10_240_000, (384, 384), None) is None, "nor where not one image fits"
