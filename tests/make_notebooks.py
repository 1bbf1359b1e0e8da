"""Runs notebooks in an empty folder and stores their outputs: python tests/make_notebooks.py [NAME...]."""

import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"
KEPT = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def executed(path: Path, folder: str | Path) -> Any:
    """The notebook with the outputs of a run in that folder; nbclient.CellExecutionError if a cell fails."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()  # fmt: skip
    notebook.metadata = nbformat.from_dict(KEPT | {"language_info": {"name": "python"}})
    return notebook


def main() -> None:
    import nbformat

    for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, folder), path)
        print(f"wrote {path.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
