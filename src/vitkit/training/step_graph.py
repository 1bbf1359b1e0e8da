"""Training steps replayed from a CUDA graph, so that small models do not wait for kernel launches."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitkit.ops.cuda_graph import WARMUP_CALLS, CudaGraph, Signature, signature
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.task import Batch
from vitkit.training.optimizer import supports_found_inf

StepNumbers = tuple[list[str], Tensor]  # names of metrics, and their values, (names,), on the device


class StepGraph:
    """Decides which steps are captured and replayed.

    A step can be if it has one process, one micro-batch, and an optimizer that checks gradients by itself.
    """

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer, log: Callable[[str], None]):
        single_gpu = runtime.world == 1 and runtime.device.startswith("cuda")
        # recomputed activations need the state of the random generator, which a CUDA graph does not have
        self.enabled = (
            runtime.cuda_graph and single_gpu and not runtime.recompute and supports_found_inf(optimizer)
        )
        self.optimizer, self.log = optimizer, log
        self.graph: CudaGraph | None = None
        self.signature: Signature = {}
        self.repeats = 0  # batches of the same signature in a row

    def can_replay(self, batches: list[Batch]) -> bool:
        """Whether a step on these can be replayed; the first few of a signature are warm-up."""
        if not self.enabled or len(batches) != 1:
            return False
        if self.graph is not None:
            return self.graph.fits(batches[0])
        current = signature(batches[0])
        self.repeats = self.repeats + 1 if current == self.signature else 1
        self.signature = current
        return self.repeats > WARMUP_CALLS

    def replay(self, step: Callable[[Batch], StepNumbers], batch: Batch) -> StepNumbers | None:
        """The step on this batch, captured first if it is not yet; None if it cannot be captured."""
        if self.graph is None:
            try:
                self.graph = CudaGraph(step, batch)
            except RuntimeError as error:  # out of memory, too
                self.enabled = False
                self.optimizer.zero_grad()  # gradients that were never computed
                reason = " ".join(str(error).split())[:120]
                self.log(f"steps run without a CUDA graph, which is slower: {reason}")
                return None
        return self.graph.replay(batch)

    def release(self) -> bool:
        """Free the graph's memory for good; whether there was one."""
        had_graph, self.graph, self.enabled = self.graph is not None, None, False
        return had_graph
