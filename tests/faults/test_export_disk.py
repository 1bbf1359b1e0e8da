"""An export to a full disk: one line with the file and the reason, code 1, and nothing half-written."""

import json

import pytest
from test_cli import run
from test_disks import leave

import vitkit

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("kind", ["onnx", "pt2", "xml"])
@pytest.mark.parametrize("lies", [False, True], ids=["known", "found-out"])
def test_an_export_to_a_full_disk_is_one_line(kind, lies, small, small_disk, tmp_path, monkeypatch, capsys):
    """found-out: another program takes the space after we have asked how much there is."""
    if lies:
        monkeypatch.setattr("vitkit.commands.export.LEAST_BYTES", {"fp32": 0})
    vitkit.save(small(classes=3, width=96, depth=4), tmp_path / "m.safetensors")
    disk = small_disk(8 * 2**20)
    (disk / f"m.{kind}").write_text("of before")
    leave(disk, 300_000)
    before = sorted(path.name for path in disk.iterdir())
    words = ("--overwrite", "--device", "cpu", "--json")
    assert run("export", tmp_path / "m.safetensors", disk / f"m.{kind}", *words) == 1
    output = capsys.readouterr()
    assert (
        json.loads(output.out)["error"]["code"] == "disk.full"
        and str(disk / f"m.{kind}") in output.err
        and "No space left" in output.err
    )
    assert output.err.count("\n") == 1, output.err
    assert sorted(path.name for path in disk.iterdir()) == before
    assert (disk / f"m.{kind}").read_text() == "of before"
