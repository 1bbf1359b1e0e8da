"""A function on a GPU as recorded kernels: launched as one instead of one by one (a CUDA graph)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM = 3  # calls before one is recorded, in which libraries choose their kernels

Form = dict[str, tuple[torch.Size, torch.dtype]]


class Recorded:
    """What one call of a function has launched; called again, the same with other numbers.

    The function must have been called before, so that libraries have chosen their kernels, and must not look
    at a number: nothing is computed while it is recorded. One that does is a RuntimeError, of which nothing
    remains. Whatever it gives back is overwritten by each call.
    """

    def __init__(self, function: Callable[[dict[str, Tensor]], Any], given: dict[str, Tensor]):
        self.given = {name: tensor.clone() for name, tensor in given.items()}
        self.graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:  # other threads may go on bringing data to the device meanwhile
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.found = function(self.given)
        except BaseException:
            torch.cuda.synchronize()
            generator.graphsafe_set_state(before)  # the old one waits for the end of a recording for ever
            raise

    def fits(self, given: dict[str, Tensor]) -> bool:
        return form(given) == form(self.given)

    def __call__(self, given: dict[str, Tensor]) -> Any:
        """The first rows of each tensor may be given alone; the others stay as they were."""
        for name, tensor in given.items():
            self.given[name][: len(tensor)].copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.found


def form(batch: dict[str, Tensor]) -> Form:
    """All that must be alike for two batches to go through the same kernels."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()}
