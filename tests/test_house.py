"""The house rules, checked on every run: floors, sizes, first lines, and a README that shows the tree."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from make_tree import tree_page

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "vitkit"
FILES = sorted(SRC.rglob("*.py"))
FLOORS = {
    "errors": 0, "telemetry": 0, "listing": 0,
    "io": 1, "options": 1, "flat_recipe": 1, "ops": 1, "metrics": 1,
    "models": 2, "runtime": 2,
    "data": 3, "weights": 3, "inspection": 3, "report": 3,
    "datasets": 4, "tasks": 4,
    "training": 5, "inference": 5,
    "recipes": 6,
    "runs": 7,
    "planning": 8, "server": 8,
    "studies": 9, "commands": 9,
    "api": 10,
    "cli": 11,
}  # fmt: skip
SAME_IDEA = {  # one idea on two floors
    "attention.py": "the layer, and the maps of it",
    "bias.py": "the images of the probe, and the verb",
    "bulk.py": "the computation, and the verb",
    "card.py": "the fields of a card, and its JSON",
    "cost.py": "the formulas, and the verb",
    "dino.py": "the layout of its files, and the task",
    "doctor.py": "the examination, and the verb",
    "export.py": "the files, and the verb",
    "finetune.py": "the recipes, and the verb",
    "folder.py": "of a run, and of a study",
    "http.py": "as a client, and as a server",
    "masked.py": "the model, and the task",
    "multilabel.py": "the metrics, and the task",
    "predict.py": "the function, and the verb",
    "published.py": "data sets, and weights",
    "ranges.py": "of models, and of recipes",
    "study.py": "the values, and the verb",
}
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
        parts = path.relative_to(SRC).with_suffix("").parts
        module = ".".join(("vitkit", *(parts[:-1] if parts[-1] == "__init__" else parts)))
        graph[module] = imported(ast.parse(path.read_text())) if module != "vitkit" else set()
    edges = {module: {nearest(name, graph) for name in names} - {None} for module, names in graph.items()}
    while edges:
        leaves = {module for module, others in edges.items() if not (others - {module}) & set(edges)}
        assert leaves, f"a circle among {sorted(edges)}"
        edges = {module: others for module, others in edges.items() if module not in leaves}


def nearest(name: str, modules: dict[str, set[str]]) -> str | None:
    """The module of a name that is imported: the name itself, or the module that holds it."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_only_one_file_names_the_peers():
    naming = {p.name for p in FILES if {n.split(".")[0] for n in imported(ast.parse(p.read_text()))} & PEERS}
    assert naming == {"convert.py"}


def test_nothing_that_runs_code_out_of_files_is_used():
    banned = r"pickle\.load|weights_only=False|allow_pickle=True|yaml\.load|shell=True|extractall|mktemp\("
    banned += r"|(?<![\w.])eval\(|(?<![\w.])exec\(|MAX_IMAGE_PIXELS = None"
    hits = [f"{p.name}: {m[0]}" for p in FILES for m in re.finditer(banned, p.read_text())]
    assert not hits


def test_the_tree_of_the_docs_is_current():
    assert (ROOT / "docs" / "contributing" / "tree.md").read_text() == tree_page(), (
        "run python tests/make_tree.py"
    )


def test_no_two_rooms_have_a_file_of_the_same_name():
    names = [path.name for path in FILES if path.name != "__init__.py"]
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= set(SAME_IDEA), f"the same name for two ideas: {sorted(twice - set(SAME_IDEA))}"


PRIVATE = {
    "told", "found", "plain", "bare", "judged", "settled", "begun", "spread", "tell", "crew", "desk", "shelf",
    "aim", "supply",
}  # fmt: skip


def test_names_are_those_of_the_field():
    """Variables and functions say what they hold or do; docs/reference/glossary.md has our own words."""
    used = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", None) or getattr(node, "arg", None)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = node.name
            if name in PRIVATE:
                used.append(f"{path.relative_to(SRC)}: {name}")
    assert not used


LINUX_ONLY = {"inference/builders.py"}  # reads /proc/cpuinfo
TEXT_MODE = re.compile("[rwaxt+]+")
BINARY_OPENERS = {"os", "gzip", "tarfile", "Image"}  # their open() is another, or binary by default


def without_encoding(tree: ast.Module) -> list[int]:
    """The lines that read or write text in the encoding of the system, on Windows not UTF-8."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        method = isinstance(node.func, ast.Attribute)
        name, args = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args
        if name == "open" and not (method and ast.unparse(node.func.value) in BINARY_OPENERS):
            given = args if method else args[1:]
            mode = next((k.value for k in node.keywords if k.arg == "mode"), given[0] if given else None)
            text = mode is None or TEXT_MODE.fullmatch(str(getattr(mode, "value", "b")))
        else:
            text = len(args) < {"read_text": 1, "write_text": 2}.get(name, 0)
        if text:
            lines.append(node.lineno)
    return lines


def test_text_has_an_encoding_of_its_own():
    wrong = {str(path.relative_to(SRC)): lines for path in FILES
             if (lines := without_encoding(ast.parse(path.read_text(encoding="utf-8"))))}  # fmt: skip
    assert wrong.keys() <= LINUX_ONLY, wrong
    bad = 'p.read_text()\np.write_text(x)\np.open()\np.open("a+")\nopen(p)\nopen(p, mode="w", newline="")\n'
    good = 'p.read_text("utf-8")\np.open("rb")\nopen(p, "wb")\nos.open(p, 0)\nzip.open(x)\n'
    assert without_encoding(ast.parse(bad + good)) == [1, 2, 3, 4, 5, 6], "the control"


def test_the_lock_file_has_every_package_that_the_tests_ask_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, wanted, todo = project["optional-dependencies"], set(project["dependencies"]), ["test", "peers"]
    while todo:
        for line in extras[todo.pop()]:
            own = re.match(r"vitkit\[(.*)\]", line)
            todo += own[1].split(",") if own else []
            wanted |= set() if own else {line}
    lock = (ROOT / "requirements-test.lock").read_text(encoding="utf-8")
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.M))
    names = {re.match(r"[A-Za-z0-9_-]+", line)[0].lower().replace("_", "-") for line in wanted}
    assert names <= locked and {"torch", "nbclient", "uvicorn", "timm"} <= names, "see SECURITY.md"
