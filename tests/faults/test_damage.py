"""A5, A6, C2, C3: longer fuzzing of images and weight files, and what must fail where nothing guards."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import test_decode
import test_fuzz as fuzzing
import test_shards
from harness import scaled

from vitkit.data.sources.index import INDEX
from vitkit.data.sources.shards import write_shards
from vitkit.data.sources.source import from_rows

pytestmark = pytest.mark.faults


@pytest.mark.filterwarnings("ignore")
def test_A5_damaged_images_raise_nothing_but_bad_image(monkeypatch, tally):
    outcomes, slowest, grown = test_decode.fuzzed(monkeypatch, most=10**7, seconds=scaled(10, 60))
    assert len(outcomes) > 300 and slowest < 2 and grown < 300
    tally(images=len(outcomes))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.control("vitkit.data.decode._bad_image")
def test_A5_control_an_error_of_pillow_that_is_passed_on_is_another(monkeypatch, switched_off):
    switched_off("vitkit.data.decode._bad_image", lambda kind, error: error)
    with pytest.raises(Exception) as caught:
        test_decode.fuzzed(monkeypatch, most=3000, seconds=60)
    assert not isinstance(caught.value, test_decode.BadImage)


def used(folder: Path, members: list, code: str) -> None:
    """Members for which a shard is to be refused are in an index."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_shards.test_tars_that_are_not_as_they_should_be_are_refused_by_member(
            folder, members, code, "x.tar"
        )
    assert (folder / INDEX).exists()


@pytest.mark.control("vitkit.data.sources.archives.check_name")
def test_A6_control_without_the_check_of_names_a_shard_leads_out_of_itself(tmp_path, switched_off):
    switched_off("vitkit.data.sources.archives.check_name", lambda path, name: None)
    used(tmp_path, [("../a.jpg", test_shards.picture(1)), ("../a.cls", b"0")], "data.unsafe")


@pytest.mark.control("vitkit.data.sources.shard_folders.check_member")
def test_A6_control_without_the_check_of_members_a_shard_may_hold_links(tmp_path, switched_off):
    switched_off("vitkit.data.sources.shard_folders.check_member", lambda where, member: None)
    link = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
    used(tmp_path, [("a.jpg", link), ("a.cls", b"0")], "data.unsafe")


@pytest.mark.control("vitkit.data.sources.index.check_shards")
def test_A6_control_without_the_check_of_its_shards_an_index_leads_out_of_its_folder(tmp_path, switched_off):
    rows = [(str(i), "c") for i in range(14)]
    source = from_rows("x", rows, lambda key: test_shards.picture(int(key)))
    write_shards({"train": source}, tmp_path / "shards", images=7)
    (tmp_path / "shards" / "train-000000.tar").rename(tmp_path / "x.tar")

    def elsewhere(header):
        header["splits"]["train"]["shards"][0][0] = "../x.tar"

    switched_off("vitkit.data.sources.index.check_shards", lambda shards, numbers: list(numbers))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_shards.test_an_index_that_contradicts_itself_is_refused(
            tmp_path / "shards", elsewhere, "data.corrupt", ()
        )


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_C2_damaged_weight_files_load_or_are_refused(name, tmp_path, tally):
    tries = scaled(300, 2000)
    outcomes, leaks = fuzzing.fuzzed(tmp_path, name, tries)
    assert not leaks and outcomes["refused"] > tries / 2, "\n".join(leaks)
    tally(files=tries)


@pytest.mark.control("vitkit.weights.untrusted.malformed")
@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_C2_control_errors_of_libraries_that_are_passed_on_are_others(name, tmp_path, switched_off):
    switched_off("vitkit.weights.untrusted.malformed", lambda path, error: error)
    assert fuzzing.fuzzed(tmp_path, name, 50)[1]


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
