"""Errors: every raise has a code, every code is used and documented, and errors cross processes."""

import ast
import errno
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import make_errors_page
import pytest

import vitkit
from vitkit import errors
from vitkit.data.decode import BadImage, read
from vitkit.data.loader import TooManyBad
from vitkit.errors import CODES, Error, WrongType, code_of
from vitkit.training.step import Diverged, OutOfMemory

SRC = Path(vitkit.__file__).parent
TREES = {str(path.relative_to(SRC)): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}
CODE = re.compile("[a-z]+\\.[a-z-]+")
NOT_OURS = {  # exceptions other than Error that may be raised, and why
    "AssertionError": "a bug, which no user can fix",
    "AttributeError": "Python looks up a name in a module",
    "BlockingIOError": "part of the socket interface",
    "ChildProcessError": "a worker process has died",
    "ClientDisconnect": "Starlette's, for a client that has disconnected",
    "HTTPException": "Starlette's",
    "Interrupted": "a KeyboardInterrupt",
    "KeyboardInterrupt": "Python's, with what was kept",
    "NotImplementedError": "Python's, for an interface",
    "OSError": "the system's, with the name of its file",
    "RemoteProtocolError": "h11's",
    "RetryableError": "a failed try of a download, caught in the same file",
    "Stopped": "a KeyboardInterrupt",
    "TimeoutError": "the system's",
}
WITHOUT_CODE = {  # files that still raise other errors to their users, and which
    "ops/cublaslt.py": "RuntimeError of a GPU library, which no user can fix",
    "training/optimizer.py": "ValueError, which code_of reports as request.value",
}
INTERNAL = {  # folders with files whose callers catch such errors, and report them with a code
    "datasets": "matlab tfrecord",
    "recipes": "recipe values",
    "report": "html",
    "server": "inputs",
    "studies": "study",
    "commands": "export",
    "training": "logging",
    "weights": "untrusted card",
}  # fmt: skip
CAUGHT = {f"{folder}/{name}.py" for folder, names in INTERNAL.items() for name in names.split()}


def ours() -> set[str]:
    """The names of Error and of the classes below it."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    actual = {"Error"}
    while more := {name for name, above in bases.items() if above & actual} - actual:
        actual |= more
    return actual


OURS = ours()
MAKERS = {  # functions that return an error of ours
    node.name
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) in OURS
}


def raised(node: ast.expr) -> Iterator[str]:
    """The names of what a raise may raise; nothing for a caught error that is raised again."""
    if isinstance(node, ast.IfExp):
        yield from (*raised(node.body), *raised(node.orelse))
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from raised(value)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) != "type(error)":
        yield ast.unparse(node.func).rpartition(".")[2]
    elif isinstance(node, ast.Name) and node.id[0].isupper():
        yield node.id


def raises(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc:
            yield from ((node.lineno, name) for name in raised(node.exc))


def test_every_raise_is_an_error_with_a_code():
    known, others = OURS | MAKERS | set(NOT_OURS), {}
    for file, tree in TREES.items():
        if lines := [f"line {line}: {name}" for line, name in raises(tree) if name not in known]:
            others[file] = lines
    listed = CAUGHT | set(WITHOUT_CODE)
    new = {file: lines for file, lines in others.items() if file not in listed}
    assert not new, "raise vitkit.errors.Error with a code"
    done = sorted(listed - set(others))
    assert not done, "all errors of these have codes now: delete them from INTERNAL or WITHOUT_CODE"


def test_the_list_of_other_errors_is_no_longer_than_it_must_be():
    used = {name for tree in TREES.values() for _, name in raises(tree)}
    assert set(NOT_OURS) <= used and not set(NOT_OURS) & OURS
    assert set(TREES) >= CAUGHT and CAUGHT.isdisjoint(WITHOUT_CODE)


def strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def given(tree: ast.Module) -> Iterator[str]:
    """The codes that a file gives to errors."""
    for node in ast.walk(tree):
        named = node.arg if isinstance(node, ast.keyword) else ""
        if isinstance(node, ast.Assign):
            named = ast.unparse(node.targets[0])
        if named == "code":
            yield from strings(node.value)


def test_every_code_that_is_given_is_known():
    codes = {code for tree in TREES.values() for code in given(tree) if CODE.fullmatch(code)}
    assert len(codes) > 20 and codes <= set(CODES)


def test_every_code_is_used():
    used = set()
    for file, tree in TREES.items():
        for node in tree.body:
            table = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CODES"
            used |= set() if file == "errors.py" and table else strings(node)
    assert set(CODES) - used == set(), "no error has these codes"


def test_the_page_lists_every_code():
    assert make_errors_page.PAGE.read_text() == make_errors_page.page(), (
        "run: python tests/make_errors_page.py"
    )


def classes() -> list[type[Error]]:
    actual = [Error]
    for kind in actual:
        actual += kind.__subclasses__()
    return actual


def test_the_codes_of_classes_are_known_and_they_are_value_errors():
    for kind in classes():
        assert kind.code in CODES and issubclass(kind, ValueError), kind


EXAMPLES = [
    Error("no 3", code="data.empty"),
    WrongType("not a list", code="request.value"),
    BadImage("truncated", "JPEG: cut off before its end"),
    BadImage("too-many-pixels", "9 x 9 pixels"),
    TooManyBad("3 of 4"),
    OutOfMemory("one image"),
    vitkit.WeightsError("x.npz: no array", code="weights.names"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: f"{type(error).__name__} {error.code}")
def test_an_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.code == error.code
    assert getattr(copy, "reason", None) == getattr(error, "reason", None)


def test_an_error_crosses_processes(tmp_path):
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        with pytest.raises(BadImage) as caught:
            pool.submit(read, tmp_path).result()
        assert caught.value.reason == "not-a-file" and caught.value.code == "image.unreadable"
        with pytest.raises(Error) as caught:
            pool.submit(fail, "data.empty").result()
        assert caught.value.code == "data.empty"


def fail(code: str) -> None:
    raise Error("in another process", code=code)


def test_images_that_are_too_large_have_a_code_of_their_own():
    assert BadImage("too-large", "").code == BadImage("too-many-pixels", "").code == "image.too-large"
    assert BadImage("damaged", "").code == "image.unreadable"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "no", "x"), "file.not-found"),
        (OSError(errno.ENOSPC, "no", "x"), "disk.full"),
        (OSError(errno.EROFS, "no", "x"), "file.not-writable"),
        (PermissionError(errno.EACCES, "no", "x"), "file.permission"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), "network.unreachable"),
        (ChildProcessError("a worker died"), "system.failed"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), "request.value"),
        (SystemExit("data.nonsense"), "request.value"),
        (Error("no", code="data.empty"), "data.empty"),
        (Diverged("the loss is nan", 3), "training.diverged"),
        (OutOfMemory("one image"), "training.out-of-memory"),
    ],
)
def test_every_error_has_a_code(error, code):
    assert code_of(error) == code
    weak = code in ("request.value", "system.failed")
    assert code_of(error, "data.corrupt") == ("data.corrupt" if weak else code)


def test_the_codes_of_the_system_are_known():
    assert set(errors.SYSTEM.values()) <= set(CODES)
