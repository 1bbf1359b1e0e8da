"""The wheel: everything that the package reads at run time travels with it."""

from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")


def test_a_wheel_holds_every_file_of_the_package(tmp_path):
    (built,) = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    held = {name for name in ZipFile(built).namelist() if name.startswith("vitkit/")}
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/vitkit").rglob("*")
             if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    assert held == files
    read = {"report/page.css", "report/templates/page.html", "server/templates/docs.html",
            "server/web/index.html", "listing.json", "py.typed"}  # fmt: skip
    assert {f"vitkit/{name}" for name in read} <= held
