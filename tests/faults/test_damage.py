"""A5, A6, C2, C3: longer fuzzing of images and weight files, and what must fail where nothing guards."""

import os
import pickle
import re
import subprocess
import sys
import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import test_decode
import test_fuzz as fuzzing
import test_shards
from harness import scaled
from PIL import Image

from vitkit.data import archives
from vitkit.data.index import INDEX
from vitkit.data.tars import index_shards

pytestmark = pytest.mark.faults


@pytest.mark.filterwarnings("ignore")
def test_A5_damaged_images_raise_nothing_but_bad_image(monkeypatch, tally):
    outcomes, slowest, grown = test_decode.fuzzed(monkeypatch, most=10**7, seconds=scaled(10, 60))
    assert len(outcomes) > 300 and slowest < 2 and grown < 300
    tally(images=len(outcomes))


@pytest.mark.filterwarnings("ignore")
def test_A5_control_plain_pillow_lets_other_errors_through(monkeypatch):
    leaks = set()

    def plain(data, max_pixels):
        try:
            with warnings.catch_warnings(action="ignore"):
                return np.array(Image.open(BytesIO(data)).convert("RGB"))
        except OSError:
            raise test_decode.BadImage("damaged", "as told") from None
        except Exception as error:
            leaks.add(type(error).__name__)
            return np.zeros((1, 1, 3), np.uint8)

    test_decode.fuzzed(monkeypatch, most=3000, seconds=20, decode=plain)
    assert leaks


def test_A6_control_without_the_check_of_names_a_shard_leads_out_of_itself(tmp_path, monkeypatch):
    test_shards.tar(tmp_path / "x.tar", [("../a.jpg", test_shards.picture(1)), ("../a.cls", b"0")])
    with pytest.raises(ValueError, match="leads out"):
        index_shards(tmp_path)
    monkeypatch.setattr(archives, "check_name", lambda path, name: None)
    index_shards(tmp_path)
    assert (tmp_path / INDEX).exists()


def test_A6_control_the_code_in_those_shards_does_run_where_it_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(test_shards.CODE)
    assert os.path.exists("owned")


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_C2_damaged_weight_files_load_or_are_refused(name, tmp_path, tally):
    tries = scaled(300, 2000)
    outcomes, leaks = fuzzing.fuzzed(tmp_path, name, tries)
    assert not leaks and outcomes["refused"] > tries / 2, "\n".join(leaks)
    tally(files=tries)


def test_C2_control_a_loader_that_guards_nothing_leaks_its_libraries_errors(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr(fuzzing.vitkit, "load", lambda path, **_: load_file(path))
    assert fuzzing.fuzzed(tmp_path, "own.safetensors", 50)[1]


BAD = {
    "S301": "import pickle\npickle.load(open('x', 'rb'))\n", "S307": "eval(input())\n",
    "S202": "import tarfile\ntarfile.open('x').extractall()\n",
    "S602": "import subprocess\nsubprocess.run('ls', shell=True)\n",
    "S306": "import tempfile\ntempfile.mktemp()\n",
}  # fmt: skip


@pytest.mark.parametrize("rule", BAD)
def test_C3_control_the_style_check_refuses_code_that_runs_files(rule, tally):
    root = Path(__file__).parent.parent.parent
    words = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--stdin-filename",
        "src/vitkit/x.py",
        "--output-format=concise",
        "-",
    ]
    done = subprocess.run(words, input=BAD[rule], capture_output=True, text=True, cwd=root)
    assert done.returncode == 1 and rule in done.stdout
    tally(rules=1)


def test_C3_control_the_house_rule_finds_what_it_bans(monkeypatch, tmp_path):
    import test_house

    test_house.test_nothing_that_runs_code_out_of_files_is_used()
    more = ["import torch\ntorch.load('x', weights_only=False)\n", "np.load('x', allow_pickle=True)\n"]
    for number, code in enumerate([*BAD.values(), *more]):
        path = tmp_path / f"{number}.py"
        path.write_text(code)
        monkeypatch.setattr(test_house, "FILES", [path])
        with pytest.raises(AssertionError, match=re.escape(path.name)):
            test_house.test_nothing_that_runs_code_out_of_files_is_used()
