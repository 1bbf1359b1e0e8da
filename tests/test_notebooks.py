"""The notebooks: they run from top to bottom, and what is stored in them is a whole run without traces."""

import base64
import json
import re
from typing import Any

import pytest
from make_notebooks import FOLDER, executed

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.:/<])/(?:home|root|tmp|Users|work|opt|usr|var|mnt|private)/|[A-Z]:\\\\")
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def kinds(cell: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What the outputs of a cell are: streams by name, and displayed values by their forms."""
    return [(output["output_type"], sorted(output.get("data", [output.get("name", "")])))
            for output in cell["outputs"]]  # fmt: skip


def words(cell: dict[str, Any]) -> str:
    """All text in the outputs of a cell, without pictures."""
    parts = [text(part) for output in cell["outputs"]
             for form, part in {**output.get("data", {}), "text": output.get("text", "")}.items()
             if not form.startswith("image/")]  # fmt: skip
    return re.sub(r"base64,[\w+/=]+", "", "\n".join(parts))


def test_there_are_three():
    assert {path.stem for path in NOTEBOOKS} == {"your_photos", "look_inside_a_vit", "reproduce_a_figure"}


@by_name
def test_what_is_stored_is_one_whole_run(path):
    assert path.stat().st_size < 500_000
    cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs), "a warning is no output to show"
    pictures = [data["image/png"] for output in outputs if "image/png" in (data := output.get("data", {}))]
    assert pictures
    assert all(base64.b64decode(text(picture)).startswith(b"\x89PNG") for picture in pictures)


@by_name
def test_no_path_of_a_machine_is_stored(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert not [
        line for cell in code_cells(notebook) for line in words(cell).splitlines() if ABSOLUTE.search(line)
    ]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert (
        ABSOLUTE.search("wrote /home/ada/runs")
        and ABSOLUTE.search("C:\\\\Users")
        and not ABSOLUTE.search("a/tmp/b")
    )


@by_name
def test_the_first_cell_is_for_the_readers_own_data(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    first = text(code_cells(notebook)[0]["source"])
    assert re.match(r"[A-Z]+ = .*  # (your folder|for example|or your folder)", first)
    prose = [text(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    for target in re.findall(r"\]\((\.\./[^)#]+)", "\n".join(prose)):
        assert (path.parent / target).is_file(), target


@pytest.mark.slow
@by_name
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "here").mkdir()
    stored = json.loads(path.read_text(encoding="utf-8"))
    new = executed(path, tmp_path / "here")
    assert [kinds(cell) for cell in code_cells(new)] == [kinds(cell) for cell in code_cells(stored)]
