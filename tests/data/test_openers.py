"""A new data source is one module: it is discovered, opened, listed in messages and accepted by the CLI."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import vitkit.data.sources
from vitkit.data.sources.openers import find_openers
from vitkit.datasets.opening import PACKAGES, check_place, find_opener, is_data_file, open_data
from vitkit.errors import Error

MODULE = '''
"""Solid colours: colours:red,blue are two classes of four images each."""

import numpy as np

from vitkit.data.sources.openers import Opener
from vitkit.data.sources.source import from_arrays

VALUES = {"red": (255, 0, 0), "blue": (0, 0, 255)}


def open_colours(place):
    names = tuple(place.removeprefix("colours:").split(","))
    pixels = np.array([VALUES[name] for name in names for _ in range(4)], np.uint8)
    images = np.broadcast_to(pixels[:, None, None], (len(pixels), 8, 8, 3))
    return {"all": from_arrays("colours", images, np.repeat(np.arange(len(names)), 4), names)}


OPENER = Opener(
    description="colours:NAME,NAME",
    matches=lambda place: place.startswith("colours:"),
    open=lambda place, cache: open_colours(place),
)
'''


@pytest.fixture
def colours(tmp_path, monkeypatch):
    """A source module in a folder of its own, which becomes part of the package's search path."""
    folder = tmp_path / "more_sources"
    folder.mkdir()
    (folder / "colours.py").write_text(MODULE)
    monkeypatch.setattr(vitkit.data.sources, "__path__", [*vitkit.data.sources.__path__, str(folder)])
    yield
    sys.modules.pop("vitkit.data.sources.colours", None)


def test_a_module_dropped_into_the_package_opens_its_data(colours):
    check_place("colours:red,blue")
    source = open_data("colours:red,blue")["all"]
    assert source.classes == ("red", "blue") and source.labels.tolist() == [0] * 4 + [1] * 4
    assert source.fetch(7).tolist() == np.full((8, 8, 3), (0, 0, 255)).tolist()
    assert is_data_file("colours:red")
    with pytest.raises(Error, match="colours:NAME,NAME") as caught:
        open_data("nowhere")
    assert caught.value.code == "data.not-found"


def test_without_the_module_the_place_is_refused():
    with pytest.raises(Error) as caught:
        open_data("colours:red,blue")
    assert caught.value.code == "data.not-found" and "colours:NAME" not in str(caught.value)


def test_openers_have_one_order_and_a_description_each():
    openers = find_openers(*PACKAGES)
    assert openers == find_openers(*PACKAGES)
    assert [opener.order for opener in openers] == sorted(opener.order for opener in openers)
    descriptions = [opener.description for opener in openers]
    assert len(set(descriptions)) == len(descriptions) >= 9 and all(descriptions)


def test_a_folder_is_opened_by_its_most_specific_opener(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    (tmp_path / "x.zip").mkdir()  # a folder, whatever its name
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "index.vitkit").touch()
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a_1.jpg")
    expected = {
        "digits": "'digits'",
        "./digits": "a folder",
        "x.zip": "a folder",
        "shards": "a folder of shards",
        "http://127.0.0.1/x": "an http(s) address of shards",
        "vtab:dtd:root": "vtab:TASK:ROOT",
    }
    assert {place: find_opener(place).description for place in expected} == expected
    assert find_opener("missing.npz") is None and find_opener("images/a_1.jpg") is None


def test_discovery_imports_no_heavy_library():
    code = "import sys\nfrom vitkit.datasets.opening import check_place\ncheck_place('digits')\n"
    code += "print({'torch', 'urllib3', 'pyarrow', 'h5py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
