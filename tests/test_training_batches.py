"""Batches fetched ahead by a thread: the same ones, their end and their errors; whoever leaves waits not."""

from threading import Event
from threading import enumerate as enumerate_threads

import pytest

from vitkit.runs.batches import prefetched


def test_all_batches_come_in_order_and_then_an_end():
    assert list(prefetched(iter([{"n": n} for n in range(7)]))) == [{"n": n} for n in range(7)]
    assert list(prefetched(iter(()))) == []


def test_an_error_comes_after_the_batches_before_it():
    def batches():
        yield from ({"n": n} for n in range(3))
        raise ValueError("no more of them")

    result = prefetched(batches())
    assert [next(result) for _ in range(3)] == [{"n": n} for n in range(3)]
    with pytest.raises(ValueError, match="no more of them"):
        next(result)


def test_no_more_are_taken_than_there_is_room_for_and_whoever_leaves_waits_for_none():
    """Which each run of a study would wait for at its end."""
    taken, before = [Event() for _ in range(100)], set(enumerate_threads())
    used = prefetched(event.set() or {"n": n} for n, event in enumerate(taken))
    for n in range(3):
        assert next(used) == {"n": n}
        assert taken[n + 3].wait(60)  # one is used, two are ready, one waits for room
        assert not taken[n + 4].wait(0.1)
    (thread,) = set(enumerate_threads()) - before
    used.close()
    assert not thread.is_alive() and not taken[6].is_set()
