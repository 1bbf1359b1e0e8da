"""How fast a model runs and how large a batch fits, tried within a time: App. D.5."""

import time
from collections.abc import Callable
from functools import partial

import torch

MOST = 2**16  # images at a time that are tried at most
GAIN = 1.03  # a larger batch must be so much faster, or no larger one is tried
REPEATS = 0.1  # share of the time for which one batch size is repeated


def images_per_second(
    run: Callable[[int], None], seconds: float, most: int = MOST
) -> tuple[float, int] | None:
    """The best rate over batches of 1, 2, 4, ... images and that batch; None where not one image fits.

    `run` computes so many images and waits for them. Larger batches are tried within the time, and as long as
    they are faster; one batch is always timed, after one that is not.
    """
    end, best = time.monotonic() + seconds, (0.0, 0)
    images = 1
    while images <= most:
        try:
            run(images)
            rate = images / timed(partial(run, images), REPEATS * seconds)
        except torch.OutOfMemoryError:
            break
        faster = rate > GAIN * best[0]
        best = max(best, (rate, images))
        if not faster or time.monotonic() > end:
            break
        images *= 2
    return best if best[1] else None


def timed(work: Callable[[], None], seconds: float) -> float:
    """Seconds of one call, the mean of as many as fit into the time."""
    begun, calls = time.monotonic(), 0
    while not calls or time.monotonic() - begun < seconds:
        work()
        calls += 1
    return (time.monotonic() - begun) / calls


def largest_that_fits(fits: Callable[[int], bool], seconds: float, most: int = MOST) -> int:
    """The largest number for which `fits` is true, to 1/16 or as near as time allows; 0 for none."""
    end = time.monotonic() + seconds
    low, high = 0, 1
    while high <= most and time.monotonic() < end:
        if not fits(high):
            break
        low, high = high, 2 * high
    else:
        return low
    while high - low > max(1, low // 16) and time.monotonic() < end:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
