"""The README's commands do what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitkit.recipes import RECIPES
from vitkit.studies.scale import STUDIES
from vitkit.weights.published import PUBLISHED

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = [
    line[2:] for block in re.findall(r"```console\n(.*?)```", README, re.S) for line in block.splitlines()
]


def test_the_two_commands_are_targets_of_the_makefile():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    targets = [command.removeprefix("make ") for command in COMMANDS if command.startswith("make")]
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_numbers_of_recipes_studies_and_checkpoints_are_those_of_the_lists():
    assert f"{len(RECIPES)} recipes" in README and f"{len(PUBLISHED)} checkpoints" in README
    assert len(STUDIES) == 12 and "twelve studies" in README


@pytest.mark.slow
def test_the_readmes_python_and_then_its_commands_run(tmp_path):
    for code in PYTHON:
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    ours = [command for command in COMMANDS if command.startswith("vitkit")]
    assert len(ours) >= 5
    for command in ours:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip()
