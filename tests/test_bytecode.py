"""Commands keep compiled Python files in the user's cache where the installation has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from vitkit.cli.bytecode import cache_bytecode
sys.dont_write_bytecode, sys.pycache_prefix = {dont_write}, None
cache_bytecode("large_package")
import large_package
print(sys.pycache_prefix)
"""


def run(folder: Path, *, dont_write: bool) -> Path | None:
    """Import a package in a new process; returns the folder of compiled files that the command has chosen."""
    place = folder / "site" / "large_package"
    place.mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text("number = 1\n")
    paths = [str(folder / "site"), *filter(None, sys.path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(folder / "cache")}
    line = [sys.executable, "-c", CODE.format(dont_write=dont_write)]
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=True)
    chosen = done.stdout.strip()
    return None if chosen == "None" else Path(chosen)


def compiled(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.pyc") if "large_package" in str(path)]


def test_files_are_compiled_once_where_python_would_write_none(tmp_path):
    chosen = run(tmp_path, dont_write=True)
    assert chosen == tmp_path / "cache" / "vitkit" / "bytecode"
    assert len(compiled(chosen)) == 1 and not compiled(tmp_path / "site")
    assert chosen.stat().st_mode & 0o777 == 0o700


def test_an_installation_with_compiled_files_is_left_alone(tmp_path):
    assert run(tmp_path, dont_write=False) is None  # Python compiles beside the sources itself
    assert len(compiled(tmp_path / "site")) == 1
    assert run(tmp_path, dont_write=True) is None


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path):
    folder = tmp_path / "cache" / "vitkit" / "bytecode"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert run(tmp_path, dont_write=True) is None
    folder.chmod(0o700)
    assert run(tmp_path, dont_write=True) == folder
