"""Data parallelism over CPU cores: each core runs the whole model on its own images of a batch.

PyTorch parallelizes each operation over all cores and synchronizes them after it. Here they synchronize once
per batch, and activations stay in the cache of one core.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor, nn

CHUNK = 4 * 224 * 224  # pixels for one core at a time
MINIMUM = 224 * 224  # pixels; below it the overhead of calling operations outweighs their work
starting = threading.Lock()  # while the pool starts, a new thread would read a thread count of 1


def per_core(run: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor) -> Tensor:
    """run(images) for images (B, 3, h, w), split into chunks over all cores where that is faster."""
    with starting:
        threads = torch.get_num_threads()
    pixels = images.shape[-2] * images.shape[-1]
    chunk = min(max(1, CHUNK // pixels), len(images) // (2 * threads))
    if threads < 2 or chunk * pixels < MINIMUM or not is_thread_safe(model):
        return run(images)
    with starting:
        pool = thread_pool(threads)
    return torch.cat([*pool.map(run, images.split(chunk))])


def is_thread_safe(model: nn.Module) -> bool:
    """Whether threads may call a model: on the CPU, not sharded, and no autocast in this thread."""
    first = next(model.parameters())
    sharded = type(first) is not nn.Parameter  # processes must call a sharded model in the same order
    return first.device.type == "cpu" and not sharded and not torch.is_autocast_enabled("cpu")


@cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """A pool of threads that compute on one core each; PyTorch's thread count is set per thread."""
    ready = threading.Barrier(threads + 1)

    def initialize() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # otherwise this thread would later adopt the main thread's count
        ready.wait()

    pool = ThreadPoolExecutor(threads, "images", initialize)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(threads)
    return pool
