"""docs/errors.md out of the table of codes: python tests/make_errors_page.py writes it."""

from pathlib import Path

from vitkit.errors import CODES

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
AREAS = {
    "request": "What was asked for", "file": "Files and folders", "disk": "Files and folders",
    "system": "The system", "data": "Data sets", "image": "Images", "network": "Downloads and remote data",
    "weights": "Weights", "model": "Models", "recipe": "Recipes", "run": "Runs", "checkpoint": "Runs",
    "training": "Runs", "device": "Runs", "evaluation": "Evaluation", "inspection": "Inspection",
    "study": "Studies", "export": "Export and engines", "engine": "Export and engines", "server": "Server",
}  # fmt: skip
START = """# Errors

Every error that a user can put right has a stable code beside its message. Codes stay; the wording of a
message may improve from version to version, so programs should compare codes.

In Python every such error is a `vitkit.Error`, which is a `ValueError` too:

```python
try:
    model = vitkit.load("ViT-B_16.npz")
except vitkit.Error as error:
    print(error.code, error)
```

In a shell a failing command prints one line on standard error. Its exit code is 2 where the request cannot
be met, 1 where it failed on the way, and 128 plus the number of the signal where it was interrupted. With
`--json` its one value on standard output is the error:

```bash
vitkit evaluate runs/photos nowhere --json | jq -r .error.code   # data.not-found
```

```json
{"error": {"code": "data.not-found", "message": "no data at 'nowhere'; give ..."}}
```

An interrupted run that can go on is reported in the same way, as `training.stopped`. This page is made by
`python tests/make_errors_page.py`.
"""


def page() -> str:
    """What the file must hold: one line for each code, by area."""
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
