"""Caches have an end: what was not used for the longest time goes, in the presence of other processes."""

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from vitkit.io.cache import GONE, measure, remove, touch, trim


def put(path: Path, hours: float, size: int = 100) -> Path:
    """A file of a size, last used so many hours ago; the folders above are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return aged(path, hours)


def aged(path: Path, hours: float) -> Path:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then), follow_symlinks=False)
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def four(tmp_path):
    """Two files and two folders of 100 bytes each, a the oldest, d the youngest."""
    put(tmp_path / "d", 2)
    put(tmp_path / "b", 4)
    for name, hours in (("a", 5), ("c", 3)):
        put(tmp_path / name / "deep" / "file", 0.5)
        aged(tmp_path / name, hours)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "left"), [(400, "abcd"), (399, "bcd"), (300, "bcd"), (299, "cd"), (100, "d"), (0, "")]
)
def test_the_oldest_go_until_the_rest_fits(four, limit, left):
    trim(four, limit)
    assert names(four) == set(left)


def test_use_makes_young(four):
    touch(four / "a")
    touch(four / "b")
    touch(four / "missing")
    trim(four, 200)
    assert names(four) == {"a", "b"}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_limit_of_nothing_leaves_the_one_in_use(four, name):
    trim(four, 0, using=four / name)
    assert names(four) == {name}


def test_one_in_use_that_is_larger_than_all_stays(four):
    put(four / "large", 9, 10_000)
    trim(four, 1000, using=four / "large")
    assert names(four) == {"large"}


@pytest.mark.parametrize("name", [".making-x", ".b.safetensors.x.partial"])
def test_what_is_being_made_is_left_alone_for_an_hour(tmp_path, name):
    put(tmp_path / name, 0.9)
    put(tmp_path / "within" / name, 0.9)
    aged(tmp_path / "within", 9)
    put(tmp_path / "other", 0)
    trim(tmp_path, 0)
    assert names(tmp_path) == {name, "within"}
    aged(tmp_path / name, 1.1)
    aged(tmp_path / "within" / name, 1.1)
    aged(tmp_path / "within", 9)
    trim(tmp_path, 0)
    assert names(tmp_path) == set()


def test_links_lead_nowhere(tmp_path):
    cache, outside = tmp_path / "cache", put(tmp_path / "outside" / "file", 9, 10_000).parent
    put(cache / "old" / "own", 5)
    (cache / "old" / "link").symlink_to(outside)
    (cache / "old" / "file").symlink_to(outside / "file")
    aged(cache / "old", 5)
    for name, target in (("folder", outside), ("file", outside / "file"), ("lost", tmp_path / "nowhere")):
        (cache / name).symlink_to(target)
        aged(cache / name, 9)
    trim(cache, 100)
    assert "old" in names(cache), "what a link leads to is not counted"
    trim(cache, 0)
    assert names(cache) == {"folder", "file", "lost"} and (outside / "file").stat().st_size == 10_000


def test_the_folder_itself_may_be_a_link(four, tmp_path_factory):
    link = tmp_path_factory.mktemp("home") / "engines"
    link.symlink_to(four)
    trim(link, 100, using=link / "a")
    assert names(four) == {"a"}


def test_a_folder_that_is_not_there_is_nothing_to_do(tmp_path):
    trim(tmp_path / "missing", 0)
    trim(put(tmp_path / "file", 0), 0)
    assert names(tmp_path) == {"file"}


def test_what_vanished_or_was_used_since_it_was_measured(four):
    gone, used = measure(four / "a"), measure(four / "c")
    shutil.rmtree(four / "a")
    touch(four / "c")
    assert remove(gone) and measure(four / "a") is None
    assert not remove(used) and (four / "c" / "deep" / "file").exists()


def test_what_another_process_did_not_finish_to_remove_goes_at_once(four):
    put(four / f"{GONE}x" / "file", 0, 10_000)
    trim(four, 400)
    assert names(four) == set("abcd")


def taking_turns(folder: Path, start, limit: int) -> None:
    start.wait(20)
    trim(folder, limit)


def test_processes_that_trim_at_once_remove_no_more_than_one_would(tmp_path):
    fork = multiprocessing.get_context("fork")
    for turn in range(5):
        folder = tmp_path / str(turn)
        for number in range(60):
            put(folder / f"{number:02}" / "file", 0)
            aged(folder / f"{number:02}", 100 - number)
        start = fork.Barrier(3)
        crew = [fork.Process(target=taking_turns, args=(folder, start, 2000)) for _ in range(3)]
        for process in crew:
            process.start()
        for process in crew:
            process.join(30)
        assert [process.exitcode for process in crew] == [0, 0, 0]
        assert names(folder) == {f"{number:02}" for number in range(40, 60)}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everything")
def test_what_cannot_be_removed_costs_no_other_entry(four):
    shut = put(four / "a" / "deep" / "other", 0, 1000).parent
    aged(four / "a", 5)
    shut.chmod(0o500)
    try:
        trim(four, 300)
        assert {"b", "c", "d"} <= names(four)
        trim(four, 300)
    finally:
        for path in [*four.glob("*/deep"), *four.glob(".*/deep")]:
            path.chmod(0o700)
