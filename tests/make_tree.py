"""Write docs/contributing/tree.md: every room and file of the package with its first line."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "vitkit"
PAGE = ROOT / "docs" / "contributing" / "tree.md"
HEAD = """# The tree

Every folder and file of `src/vitkit`, with the first line of its docstring. Rooms import only rooms on lower
floors; [architecture.md](architecture.md) says why. Written by `python tests/make_tree.py`.

```
"""


def caption(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


def lines(folder: Path, depth: int = 0) -> list[str]:
    """A folder's files, then its folders, each with its caption."""
    pad = "  " * depth
    files = sorted(p for p in folder.glob("*.py") if p.name != "__init__.py")
    rows = [f"{pad}{p.name:<{24 - len(pad)}}  {caption(p)}" for p in files]
    for inner in sorted(p.parent for p in folder.glob("*/__init__.py")):
        rows.append(f"{pad}{inner.name + '/':<{24 - len(pad)}}  {caption(inner / '__init__.py')}")
        rows += lines(inner, depth + 1)
    return rows


def tree_page() -> str:
    return HEAD + "\n".join(lines(SRC)) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(tree_page())
