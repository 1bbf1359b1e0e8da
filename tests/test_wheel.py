"""The wheel: everything that the package reads at run time travels with it."""

import re
import subprocess
import sysconfig
import venv
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


@pytest.mark.slow
def test_a_wheel_trains_and_predicts_in_a_new_environment(tmp_path):
    """Dependencies come from this environment by a path file, which does not reach the editable vitkit."""
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    line = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(line, check=True)
    site = next((tmp_path / "env").rglob("site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = "import vitkit; print(vitkit.__file__)"
    loaded = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert loaded.stdout.startswith(str(tmp_path))
    command = [tmp_path / "env/bin/vitkit", "finetune", "digits", "--model", "ViT-Ti/4", "--image-size", "8"]
    command += ["--steps", "2", "--batch", "8", "--subset", "60", "--workers", "0", "--out", "run"]
    command += ["--set", "model_options=width=16,depth=1,heads=1,hidden=16"]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert (tmp_path / "run/model.safetensors").exists() and (tmp_path / "run/report.html").exists()


def test_the_version_is_written_in_one_place():
    import vitkit

    assert f'__version__ = "{vitkit.__version__}"' in (ROOT / "src/vitkit/__init__.py").read_text()
    assert re.search(r"^version", (ROOT / "pyproject.toml").read_text(), re.M) is None
    assert f"version: {vitkit.__version__}" in (ROOT / "CITATION.cff").read_text()
