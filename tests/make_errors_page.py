"""Write docs/reference/errors.md from the table of error codes."""

from pathlib import Path

from vitkit.errors import CODES

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "errors.md"
AREAS = {
    "request": "Requests", "file": "Files and folders", "disk": "Files and folders",
    "system": "The system", "data": "Data sets", "image": "Images", "network": "Downloads and remote data",
    "weights": "Weights", "model": "Models", "recipe": "Recipes", "run": "Runs", "checkpoint": "Runs",
    "training": "Runs", "device": "Runs", "evaluation": "Evaluation", "inspection": "Inspection",
    "study": "Studies", "export": "Export and engines", "engine": "Export and engines", "server": "Server",
}  # fmt: skip
START = """# Errors

Every error that a user can fix has a stable code besides its message. Messages may change between versions,
so programs should compare codes.

In Python every such error is a `vitkit.Error`, which is also a `ValueError`:

```python
try:
    model = vitkit.load("ViT-B_16.npz")
except vitkit.Error as error:
    print(error.code, error)
```

On the command line a failing command prints one line to standard error. The exit code is 2 for an invalid
request, 1 for a failure while the command runs, and 128 plus the signal number for an interruption. With
`--json` the error is the JSON value on standard output:

```bash
vitkit evaluate runs/photos nowhere --json | jq -r .error.code   # data.not-found
```

```json
{"error": {"code": "data.not-found", "message": "no data at 'nowhere'; expected ..."}}
```

An interrupted run that can be resumed is reported in the same way, as `training.stopped`. This page is
written by `python tests/make_errors_page.py`.
"""


def page() -> str:
    """The content of the page: one row per code, grouped by area."""
    rows: dict[str, list[str]] = {}
    for code, meaning in CODES.items():
        rows.setdefault(AREAS[code.partition(".")[0]], []).append(f"| `{code}` | {meaning} |")
    tables = [
        "\n".join([f"\n## {area}\n", "| code | meaning |", "|---|---|", *lines])
        for area, lines in rows.items()
    ]
    return START + "\n".join(tables) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
