"""Batches fetched ahead by a thread: the same ones, their end and their errors; whoever leaves waits not."""

import time

import pytest

from vitkit.experiment.supply import ahead


def test_all_batches_come_in_order_and_then_an_end():
    assert list(ahead(iter([{"n": n} for n in range(7)]))) == [{"n": n} for n in range(7)]
    assert list(ahead(iter(()))) == []


def test_an_error_comes_after_the_batches_before_it():
    def batches():
        yield from ({"n": n} for n in range(3))
        raise ValueError("no more of them")

    found = ahead(batches())
    assert [next(found) for _ in range(3)] == [{"n": n} for n in range(3)]
    with pytest.raises(ValueError, match="no more of them"):
        next(found)


def leaving() -> float:
    """Seconds to leave while the thread waits for room."""
    taken = []
    batches = ahead(taken.append(n) or {"n": n} for n in range(100))
    next(batches)
    time.sleep(0.12)
    assert len(taken) == 4  # one is used, two are ready, one waits for room
    begun = time.perf_counter()
    batches.close()
    assert len(taken) == 4
    return time.perf_counter() - begun


def test_no_more_are_taken_than_there_is_room_for_and_to_leave_takes_no_time():
    """Which each run of a study would wait for at its end."""
    assert min(leaving() for _ in range(3)) < 0.05
