"""A batch on all cores of a CPU, each core with images of its own, from the first layer to the last.

PyTorch by itself lets all cores share each operation and synchronizes them after it. Here they synchronize
once, at the end of the batch, and the activations between two layers stay in the cache of one core.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor, nn

CHUNK = 4 * 224 * 224  # pixels for one core at a time
MINIMUM = 224 * 224  # pixels below which calling the operations takes as long as computing them
starting = threading.Lock()  # a thread that first asks for its number of threads meanwhile would get 1


def per_core(run: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor) -> Tensor:
    """run(images) for images (B, 3, h, w), computed in chunks on all cores at once where that is faster."""
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
    """Whether threads may call a model: it is on the CPU, not sharded, and this thread has no autocast."""
    first = next(model.parameters())
    sharded = type(first) is not nn.Parameter  # processes must call a sharded model in the same order
    return first.device.type == "cpu" and not sharded and not torch.is_autocast_enabled("cpu")


@cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Threads that each compute on one core; PyTorch's setting holds for a thread and those it starts."""
    ready = threading.Barrier(threads + 1)

    def initialize() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread that never asked would later adopt the main thread's number
        ready.wait()

    pool = ThreadPoolExecutor(threads, "images", initialize)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(threads)
    return pool
