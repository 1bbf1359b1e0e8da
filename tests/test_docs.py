"""The documents: their scripts and manifests can be read by what runs them, their tables are the code's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitkit.runs.folder import MAY_CHANGE

ROOT = Path(__file__).parent.parent
DOCS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
SCALE = (ROOT / "docs" / "guides" / "many-gpus.md").read_text()


def blocks(language: str) -> list:
    """Every fenced block of a language, with where it stands."""
    return [
        pytest.param(text, id=f"{path.name}:{number}")
        for path in DOCS
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S))
    ]


@pytest.mark.parametrize("script", blocks("bash"))
def test_every_shell_script_can_be_parsed(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("manifest", blocks("yaml"))
def test_every_manifest_can_be_parsed_and_says_what_it_is(manifest):
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(manifest):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)


def test_the_options_in_scripts_are_options_of_ours():
    from dataclasses import fields

    from vitkit.options import Training

    known = {f"--{field.name.replace('_', '-')}" for field in fields(Training)}
    yaml_words = {
        word for block in blocks("yaml") for word in re.findall(r"(--[a-z-]+)[,\]]", block.values[0])
    }
    shell = " ".join(block.values[0].replace("\\\n", " ") for block in blocks("bash"))
    shell_words = {
        word for line in re.findall(r"-m vitkit ([^\n]*)", shell) for word in re.findall(r"--[a-z-]+", line)
    }
    assert yaml_words and shell_words and yaml_words | shell_words <= known


def test_the_fields_that_may_change_are_listed_as_they_are():
    for name, why in MAY_CHANGE.items():
        assert f"| `{name}` | {why} |" in SCALE


@pytest.mark.slow
def test_the_table_of_memory_is_what_the_formula_says():
    sys.path.insert(0, str(ROOT / "bench"))
    from memory_table import table

    for line in table(["ViT-B/16", "ViT-G/14"], 4096, [8, 32, 128, 512], 80.0).splitlines():
        assert line in SCALE, "run bench/memory_table.py and put its table into docs/guides/many-gpus.md"
