"""A batch on all cores of a CPU, each core with images of its own, from the first layer to the last.

PyTorch by itself lets all cores share each operation and wait for the slowest of them before the next. Here
they wait once, at the end of the batch, and what lies between two layers stays near the core that made it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor, nn

PIECE = 4 * 224 * 224  # pixels that a core takes at a time
LEAST = 224 * 224  # below which calling the operations takes as long as computing them
making = threading.Lock()  # a thread that first asks PyTorch for its number meanwhile would get a worker's


def abreast(run: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor) -> Tensor:
    """What `run` says of images (B, 3, h, w) by a model: of pieces at once, where that is quicker."""
    with making:
        threads = torch.get_num_threads()
    pixels = images.shape[-2] * images.shape[-1]
    piece = min(max(1, PIECE // pixels), len(images) // (2 * threads))
    if threads < 2 or piece * pixels < LEAST or not free(model):
        return run(images)
    with making:
        workers = crew(threads)
    return torch.cat([*workers.map(run, images.split(piece))])


def free(model: nn.Module) -> bool:
    """Whether threads may call a model: it is whole, on the CPU, and nothing is set for this thread alone."""
    first = next(model.parameters())
    spread = type(first) is not nn.Parameter  # over processes, which must call it in the same order
    return first.device.type == "cpu" and not spread and not torch.is_autocast_enabled("cpu")


@cache
def crew(threads: int) -> ThreadPoolExecutor:
    """Threads that compute each by itself. PyTorch's setting is for a thread and those that begin later."""
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread that never asked would later take over the others'
        ready.wait()

    workers = ThreadPoolExecutor(threads, "images", begin)
    for _ in range(threads):
        workers.submit(int)
    ready.wait()
    torch.set_num_threads(threads)
    return workers
