"""The house rules, checked on every run: floors, sizes, first lines, and a README that shows the tree."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "vitkit"
FILES = sorted(SRC.rglob("*.py"))
FLOORS = {
    "errors": -1,
    "io": 0, "proportions": 0,
    "models": 1, "data": 1, "evaluation": 1, "report": 1, "options": 1,
    "layouts": 2, "objectives": 2,
    "weights": 3,
    "training": 4, "inspection": 4, "serving": 4,
    "recipes": 5,
    "experiment": 6, "catalogue": 6,
    "studies": 7, "tasks": 7, "service": 7,
    "demo": 8, "api": 8,
    "cli": 9,
}  # fmt: skip
PEERS = {"timm", "transformers", "torchvision"}


def room(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def imported(tree: ast.Module) -> set[str]:
    """The modules that a file names, wherever the import stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "import absolutely"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_every_file_has_a_caption_and_a_readable_size(path):
    text = path.read_text()
    tree = ast.parse(text)
    caption = ast.get_docstring(tree)
    assert caption and caption.splitlines()[0].endswith("."), "say in one line what this file is for"
    assert text.count("\n") <= 450
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{node.name} is too long"


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != SRC or room(p) in FLOORS], ids=str)
def test_every_import_points_down(path):
    names = imported(ast.parse(path.read_text()))
    ours = {name.split(".")[1] for name in names if name.startswith("vitkit.")} - {room(path)}
    for other in ours & set(FLOORS):
        assert FLOORS[other] < FLOORS[room(path)], f"{room(path)} may not import {other}"


def test_files_do_not_import_each_other_in_circles():
    graph = {}
    for path in FILES:
        if path.name != "__init__.py":
            module = ".".join(("vitkit", *path.relative_to(SRC).with_suffix("").parts))
            graph[module] = imported(ast.parse(path.read_text()))
    edges = {
        module: {other for other in graph if any(n == other or n.startswith(f"{other}.") for n in names)}
        for module, names in graph.items()
    }
    while edges:
        leaves = {module for module, others in edges.items() if not others & set(edges)}
        assert leaves, f"a circle among {sorted(edges)}"
        edges = {module: others for module, others in edges.items() if module not in leaves}


def test_only_one_file_names_the_peers():
    naming = {p.name for p in FILES if {n.split(".")[0] for n in imported(ast.parse(p.read_text()))} & PEERS}
    assert naming == {"peers.py"}


def test_nothing_that_runs_code_out_of_files_is_used():
    banned = r"pickle\.load|weights_only=False|allow_pickle=True|yaml\.load|shell=True|extractall|mktemp\("
    banned += r"|(?<![\w.])eval\(|(?<![\w.])exec\(|MAX_IMAGE_PIXELS = None"
    hits = [f"{p.name}: {m[0]}" for p in FILES for m in re.finditer(banned, p.read_text())]
    assert not hits


def test_the_readme_shows_every_file_with_one_line():
    readme = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"^\s*([\w/]+\.(?:py|tsv))\s{2,}\S", readme, re.M))
    files = {p.name for p in SRC.rglob("*") if p.suffix in (".py", ".tsv") and p.name != "__init__.py"}
    assert files <= shown, f"missing in README's tree: {sorted(files - shown)}"
    assert shown <= files | {"__init__.py"}, f"in README's tree but not there: {sorted(shown - files)}"
