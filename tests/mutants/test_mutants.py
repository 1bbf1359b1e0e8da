"""The mutants of `make mutants`: many, different, valid code, each with tests that exist."""

import ast
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutants import ROOT, WHY, all_trials
from mutations import Mutant, Sites, generated
from scope import BY_HAND, LEFT_OUT, SCOPE

SOURCE = """
def area(width, height=2):
    if width < 0 or height < 0:
        raise ValueError(f"not {width + 1}")
    return max(1, round((width + 1) * height, ndigits=3, mode=None))
"""


@pytest.mark.slow
def test_there_are_enough_each_changes_valid_code_and_has_tests():
    trials = all_trials()
    assert len(trials) >= 120 and len({trial.mutant.name for trial in trials}) == len(trials)
    for trial in trials:
        source = (Path(__file__).parents[2] / trial.mutant.file).read_text()
        assert ast.dump(ast.parse(trial.mutated())) != ast.dump(ast.parse(source)), trial.mutant.name
        assert trial.tests, trial.mutant.name


def test_constants_comparisons_operators_branches_and_keywords_change_and_messages_do_not():
    found = {(old, new) for _, _, old, new in Sites(SOURCE).found}
    assert found == {
        ("2", "3"), ("<", "<="), ("0", "1"), ("or", "and"), ("width < 0 or height < 0", "False"), ("1", "2"),
        ("+", "-"), ("*", "/"), ("3", "4"), ("ndigits=3,", ""),
    }  # fmt: skip


def test_a_choice_is_the_same_for_the_same_seed():
    first, again, other = (list(generated("a.py", SOURCE, 5, seed)) for seed in (1, 1, 2))
    assert first == again and first != other and len({m.name for m in first}) == 5
    assert first[0].applied(SOURCE) != SOURCE
    with pytest.raises(AssertionError, match="has changed"):
        Mutant("a.py", "late", 0, "not there", "").applied(SOURCE)


def test_the_audits_survivors_are_among_them():
    names = " ".join(name for name, *_ in BY_HAND)
    for word in ("MLP dropout", "Table 4", "CIFAR", "0.06", "best", "rate times 10", "512", "AugReg", "SGD",
                 "sigmoid", "9.1"):  # fmt: skip
        assert word in names


def test_the_files_and_tests_that_are_named_exist():
    named = {test for *_, tests in BY_HAND for test in tests} | {
        t for _, tests in SCOPE.values() for t in tests
    }
    for test in named:
        pattern, _, name = test.partition("::")
        files = list(ROOT.glob(pattern))
        assert files, test
        assert not name or f"def {name}(" in files[0].read_text(encoding="utf-8"), test
    for files in LEFT_OUT:
        assert all((ROOT / "src/vitkit" / name).is_file() for name in files.split(", ")), files
    for name in json.loads(WHY.read_text(encoding="utf-8")):
        assert (ROOT / name.partition(":")[0]).is_file(), name
