"""docs/research/paper.md says where each equation, table and figure stands in the code, and is right."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "research" / "paper.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| `(vitkit[\w.]+)`", TEXT, re.M)


def find(name: str):
    """The object behind a dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            result = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            result = getattr(result, part)
        return result
    raise AssertionError(name)


@pytest.mark.parametrize(("place", "name"), ROWS)
def test_what_the_map_names_exists(place, name):
    assert find(name) is not None


@pytest.mark.parametrize(("place", "name"), [row for row in ROWS if row[0].startswith("Eq. ")])
def test_an_equation_is_marked_in_the_code_that_holds_it(place, name):
    source = inspect.getsource(find(name))
    first, last = re.findall(r"\d", place)[0], re.findall(r"\d", place)[-1]
    marked = {int(n) for m in re.findall(r"Eq\. (\d(?:-\d)?)", source) for n in span(m)}
    assert set(range(int(first), int(last) + 1)) <= marked


def span(text: str) -> range:
    return range(int(text[0]), int(text[-1]) + 1)


def test_every_equation_and_the_model_table_are_on_the_map():
    places = " ".join(place for place, _ in ROWS)
    for item in (
        "Eq. 1",
        "Eq. 2",
        "Eq. 3",
        "Eq. 4",
        "Eq. 5",
        "Eq. 6",
        "Eq. 7-8",
        "Table 1",
        "Sec. 3.2",
        "App. D.4",
    ):
        assert item in places
