"""`vitkit demo shapes`: both models learn far above chance, and the pictures are written."""

import pytest
from PIL import Image

from vitkit.commands import demo_shapes

PICTURES = ("picture.png", "boxes.png", "masks.png")


@pytest.mark.slow
def test_a_short_demo_writes_its_pictures_and_says_that_it_has_not_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_shapes, "STEPS", {"detect": 1, "segment": 1})
    result = {}
    assert not demo_shapes.run_shapes(result.update, tmp_path)
    assert set(result) == {"detect", "segment", "ok"} and not result["ok"]
    sizes = [Image.open(tmp_path / name).size for name in PICTURES]
    assert sizes[0] == (96, 96) and sizes[1][0] == sizes[2][0] == 2 * 3 * 96 + 12
    assert all((tmp_path / task / "report.html").exists() for task in ("detect", "segment"))


@pytest.mark.slow
def test_the_demo_finds_and_segments_the_shapes(tmp_path):
    result = {}
    assert demo_shapes.run_shapes(result.update, tmp_path)
    assert result["detect"]["ap50"] >= demo_shapes.MIN_AP50
    assert result["segment"]["miou"] >= demo_shapes.MIN_MIOU
    assert result["segment"]["pixel_accuracy"] >= 0.9
