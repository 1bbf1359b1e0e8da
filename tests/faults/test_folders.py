"""A3: folders of every shape: read as they are meant, or refused by name."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from harness import scaled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sources import labelled, picture, write

from vitkit.data.decode import BadImage
from vitkit.data.loader import BadFiles, evaluation_batches
from vitkit.data.names import SPLITS
from vitkit.data.splits import complete
from vitkit.data.views import View
from vitkit.datasets.opening import open_data

pytestmark = pytest.mark.faults


@dataclass(frozen=True)
class Shape:
    """Files of a folder (or how to make it), the classes that it has, or the words that refuse it."""

    make: tuple[str, ...] | Callable[[Path], None]
    classes: tuple[str, ...] = ()
    refused: str = ""
    skipped: int = 0
    unreadable: int = 0


def with_files(*names: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def both(act: Callable[[Path], None]) -> Callable[[Path], None]:
        def make(root: Path) -> None:
            write(root, names)
            act(root)

        return make

    return both


TWO = ("cat/a.png", "dog/b.png")


def linked(where: str, target: str) -> Callable[[Path], None]:
    return with_files(*TWO)(lambda root: (root / where).symlink_to(target.format(root=root)))


def outside(root: Path) -> None:
    write(root.parent / "elsewhere", ["c.png"])
    (root / "cat" / "c.png").symlink_to(root.parent / "elsewhere" / "c.png")


def raw_name(root: Path) -> None:
    """A name that is no UTF-8."""
    folder = os.fsencode(root) + b"/caf\xe9"
    os.mkdir(folder)
    with open(folder + b"/\xff.png", "wb") as file:
        file.write(picture(1))


def long_name(root: Path) -> None:
    write(root, ["c" * 255 + "/" + "f" * 251 + ".png"])


CASES = {
    "two classes": Shape(TWO, ("cat", "dog")),
    "empty class folder": Shape(with_files(*TWO)(lambda root: (root / "owl").mkdir()), ("cat", "dog")),
    "hidden folder": Shape((*TWO, ".ipynb_checkpoints/a.png"), ("cat", "dog")),
    "hidden file": Shape((*TWO, "cat/.DS_Store"), ("cat", "dog")),
    "thumbnails": Shape((*TWO, "cat/._a.png"), ("cat", "dog")),
    "other files": Shape((*TWO, "cat/notes.txt", "Thumbs.db"), ("cat", "dog"), skipped=2),
    "nested classes": Shape(("a/x/1.png", "a/y/1.png", "b/1.png"), ("a/x", "a/y", "b")),
    "numbers as names": Shape(("1/a.png", "10/a.png", "2/a.png"), ("1", "10", "2")),
    "upper-case ending": Shape(("cat/A.JPG", "dog/b.PnG"), ("cat", "dog")),
    "one class": Shape(("cat/a.png", "cat/b.png"), ("cat",)),
    "no image": Shape(("cat/a.txt",), refused="no images"),
    "nothing at all": Shape((), refused="no images"),
    "image beside the classes": Shape((*TWO, "c.png"), refused="1 images are in no class folder"),
    "splits": Shape(("train/cat/1.png", "val/cat/2.png"), ("cat",)),
    "class only in val": Shape(
        ("train/cat/1.png", "val/dog/2.png", "test/cat/3.png"), refused="val: classes 'dog' are unknown"
    ),
    "class missing in val": Shape(
        ("train/cat/1.png", "train/dog/2.png", "val/dog/3.png", "test/dog/3.png"), ("cat", "dog")
    ),
    "space": Shape(("a b/x y.png", "c/x.png"), ("a b", "c")),
    "newline": Shape(("a\nb/x.png", "c/x\n.png"), ("a\nb", "c")),
    "quotes": Shape(("a'b/x\".png", 'c"/x.png'), ("a'b", 'c"')),
    "option-like": Shape(("-rf/--help.png", "c/x.png"), ("-rf", "c")),
    "markup": Shape(("<img src=x onerror=alert(1)>/x.png", "c/x.png"), ("<img src=x onerror=alert(1)>", "c")),
    "emoji": Shape(("🦉/🦉.png", "c/x.png"), ("c", "🦉")),
    "twins": Shape(("caf\u00e9/x.png", "cafe\u0301/x.png"), ("cafe\u0301", "caf\u00e9")),
    "255 bytes": Shape(long_name, ("c" * 255,)),
    "no UTF-8": Shape(raw_name, ("caf\udce9",)),
    "semicolon, dollar, backslash": Shape(("a;b/$(x).png", "c\\d/x.png"), ("a;b", "c\\d")),
    "broken link": Shape(linked("cat/c.png", "nothing"), ("cat", "dog"), unreadable=1),
    "link to itself": Shape(linked("cat/c.png", "c.png"), ("cat", "dog"), unreadable=1),
    "links in a circle": Shape(linked("cat/again", "{root}"), ("cat", "dog")),
    "link out of the folder": Shape(with_files(*TWO)(outside), ("cat", "dog")),
    "folder named like an image": Shape(
        with_files(*TWO)(lambda root: (root / "cat" / "x.png").mkdir()), ("cat", "dog")
    ),
    "pipe named like an image": Shape(
        with_files(*TWO)(lambda root: os.mkfifo(root / "cat" / "x.png")), ("cat", "dog"), unreadable=1
    ),
}  # fmt: skip


def outcome(root: Path) -> tuple[tuple[str, ...], int, int]:
    """Classes, files left out, files that cannot be read; a label must be the folder that a file lies in."""
    parts = open_data(root)
    parts = complete(parts) if "train" in parts else parts
    unreadable = 0
    for part in parts.values():
        for key, label in labelled(part).items():
            assert os.path.dirname(key) in (
                label,
                *(f"{split}/{label}" for split in ("train", "val", "test")),
            )
        for index in range(len(part)):
            try:
                part.fetch(index)
            except BadImage:
                unreadable += 1
    first = next(iter(parts.values()))
    return first.classes, len(first.skipped), unreadable


@pytest.mark.parametrize("name", CASES)
def test_A3_a_folder_is_what_it_looks_like(name, tmp_path, tally):
    root, case = tmp_path / "data", CASES[name]
    root.mkdir()
    try:
        case.make(root) if callable(case.make) else write(root, case.make)
    except OSError as error:
        pytest.skip(f"this file system has no such names: {error}")
    if case.refused:
        with pytest.raises(ValueError, match=case.refused):
            outcome(root)
    else:
        assert outcome(root) == (case.classes, case.skipped, case.unreadable)
    tally(shapes=1)


def test_A3_there_are_thirty_shapes():
    assert len(CASES) >= 30


@pytest.mark.parametrize("harm", ["removed", "replaced by text", "cut", "closed"])
def test_A3_a_file_that_changes_while_it_is_used_is_a_bad_file_and_no_more(harm, tmp_path, tally):
    write(tmp_path, [f"{c}/{i}.png" for c in "ab" for i in range(4)])
    source, bad = open_data(tmp_path)["all"], BadFiles(allowed=1.0)
    path = tmp_path / "b" / "2.png"
    made = evaluation_batches(source, View(size=(8, 8), crop="squash"), 2, bad=bad)
    next(made)
    harms = {
        "removed": path.unlink, "replaced by text": lambda: path.write_text("hello"),
        "cut": lambda: path.write_bytes(path.read_bytes()[:30]), "closed": lambda: path.chmod(0),
    }  # fmt: skip
    harms[harm]()
    user = os.geteuid()
    try:
        if harm == "closed" and not user:
            for folder in (tmp_path, *tmp_path.parents):
                if folder.stat().st_uid == user and "pytest" in str(folder):
                    folder.chmod(folder.stat().st_mode | 0o055)
            os.seteuid(65534)  # to root nothing is closed
        rest = [index for batch in made for index in batch["index"].tolist()]
    finally:
        os.seteuid(user)
    assert list(bad.reasons) == ["b/2.png"] and rest == [2, 3, 4, 5, 7]
    tally(changes=1)


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=scaled(25, 200), deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    st.sets(NAMES.filter(lambda n: not n.startswith(".") and len(n.encode()) < 200), min_size=2, max_size=6)
)
def test_A3_any_names_are_classes(tmp_path_factory, names):
    root = tmp_path_factory.mktemp("names")
    if {name.lower() for name in names} <= set(SPLITS):
        return
    write(root, [f"{name}/x.png" for name in names])
    result = open_data(root)["all"]
    assert result.classes == tuple(sorted(names))
    assert set(labelled(result).items()) == {(f"{name}/x.png", name) for name in names}


@pytest.mark.control("vitkit.data.sources.folders.walk")
def test_A3_control_hidden_folders_become_classes_where_nobody_looks(tmp_path, switched_off, tally):
    def careless(root, folders=None):
        return (str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())

    switched_off("vitkit.data.sources.folders.walk", careless)
    with pytest.raises(AssertionError):
        test_A3_a_folder_is_what_it_looks_like("hidden folder", tmp_path, tally)
    assert ".ipynb_checkpoints" in open_data(tmp_path / "data")["all"].classes


@pytest.mark.control("vitkit.data.splits.same_classes")
def test_A3_control_without_common_classes_a_missing_one_shifts_the_labels(tmp_path, switched_off, tally):
    case = CASES["class missing in val"].make
    write(tmp_path / "before", case)
    assert complete(open_data(tmp_path / "before"))["val"].labels.tolist() == [1]
    switched_off("vitkit.data.splits.same_classes", lambda source, classes, name="": source)
    assert complete(open_data(tmp_path / "before"))["val"].labels.tolist() == [0], "a dog is called a cat"
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_A3_a_folder_is_what_it_looks_like("class only in val", tmp_path, tally)


def test_A3_a_hundred_thousand_files_are_listed_in_seconds(tmp_path, tally):
    count = scaled(20_000, 100_000)
    for label in range(100):
        (tmp_path / f"{label:02d}").mkdir()
        for i in range(count // 100):
            os.close(os.open(tmp_path / f"{label:02d}" / f"{i}.jpg", os.O_CREAT | os.O_WRONLY))
    begun = time.monotonic()
    result = open_data(tmp_path)["all"]
    assert time.monotonic() - begun < 10 and len(result) == count
    assert np.bincount(result.labels).tolist() == [count // 100] * 100
    tally(listed=count)
