"""Messages that several verbs can print recommend only flags that each of them has, or name the verb."""

import ast
import re
from pathlib import Path

import pytest
from test_flag_ranges import listed_flags

SRC = Path(__file__).parent.parent / "src" / "vitkit"
LOADING = (
    "predict",
    "evaluate",
    "fewshot",
    "inspect",
    "export",
    "serve",
    "convert",
    "show",
    "finetune",
    "suite",
)
TRAINING = ("finetune", "pretrain", "suite")
REACHED = {  # the verbs that can print what a file has to say
    "weights/formats/layout.py": LOADING,
    "weights/load.py": LOADING,
    "training/step.py": TRAINING,
    "runtime/processes.py": TRAINING,
    "runs/batches.py": TRAINING,
    "runs/folder.py": TRAINING,
    "planning/automatic.py": TRAINING,
    "planning/plan.py": ("finetune", "pretrain"),
    "data/loader.py": ("finetune", "pretrain", "suite", "evaluate", "fewshot"),
    "data/doctor.py": (*TRAINING, "doctor"),
    "data/findings.py": ("doctor",),
    "commands/doctor.py": ("doctor",),
    "inference/engines.py": ("predict", "serve"),
    "inference/builders.py": ("predict", "serve"),
    "commands/fewshot.py": ("fewshot",),
    "commands/inspect.py": ("inspect",),
    "commands/export.py": ("export",),
    "inference/export.py": ("export",),
    "commands/suite.py": ("suite",),
    "commands/evaluate.py": ("evaluate",),
    "commands/predict.py": ("predict",),
    "inference/exported.py": ("export",),
    "server/settings.py": ("serve",),
    "weights/convert.py": ("convert",),
}
OTHERS = {"--shm-size", "--upgrade"}  # of docker and pip
ALONE = {"--weights", "--model"}  # of what only finetune prints, where nothing to start from was given


def messages(path: Path) -> list[str]:
    """Every text of a file, an f-string as one; no docstrings."""
    tree = ast.parse(path.read_text())
    inside = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    texts = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    texts += [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside
    ]  # fmt: skip
    documented = {
        ast.get_docstring(n, clean=False)
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.Module)
    }
    return [text for text in texts if "--" in text and text not in documented]


@pytest.fixture(scope="module")
def flags():
    known: dict[str, set[str]] = {}

    def of(verb: str, capsys) -> set[str]:
        if verb not in known:
            known[verb] = set(listed_flags(verb, capsys))
        return known[verb]

    return of


@pytest.mark.parametrize("file", REACHED)
def test_advice_is_about_flags_that_the_verb_has(file, flags, capsys):
    seen = 0
    for text in messages(SRC / file):
        named = [verb for verb in (*LOADING, *TRAINING, "doctor") if re.search(rf"\b{verb}\b", text)]
        for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - OTHERS - ALONE:
            seen += 1
            here = all(flag in flags(verb, capsys) for verb in REACHED[file])
            there = any(flag in flags(verb, capsys) for verb in named)
            assert here or there, f"{file}: {flag} in {text[:200]!r}"
    assert seen, f"{file} recommends no flag any more: take its row out"
