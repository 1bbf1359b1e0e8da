"""Training steps on a GPU played from a recording, where they are alike: small models wait for no launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitkit.models.recorded import WARM, Form, Recorded, form
from vitkit.training.objectives import Batch
from vitkit.training.optimizer import moves_unseen
from vitkit.training.runtime import Runtime

Found = tuple[list[str], Tensor]  # names of numbers, and the numbers, (names,), on the device


class Recorder:
    """Decides which steps are recorded or played; one process, one piece, an optimizer that needs no look."""

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer, tell: Callable[[str], None]):
        alone = runtime.world == 1 and runtime.device.startswith("cuda")
        # activations that are computed again want the state of the generator, which a recording has not
        self.able = runtime.record and alone and not runtime.recompute and moves_unseen(optimizer)
        self.optimizer, self.tell = optimizer, tell
        self.recorded: Recorded | None = None
        self.form: Form = {}
        self.alike = 0

    def takes(self, batches: list[Batch]) -> bool:
        """Whether a step of these is to be played; the first few of a form are not."""
        if not self.able or len(batches) != 1:
            return False
        if self.recorded is not None:
            return self.recorded.fits(batches[0])
        found = form(batches[0])
        self.alike = self.alike + 1 if found == self.form else 1
        self.form = found
        return self.alike > WARM

    def play(self, step: Callable[[Batch], Found], batch: Batch) -> Found | None:
        """The step on this batch, recorded if it is not yet; None if that cannot be done."""
        if self.recorded is None:
            try:
                self.recorded = Recorded(step, batch)
            except RuntimeError as error:  # also for want of memory
                self.able = False
                self.optimizer.zero_grad()  # gradients that were never computed
                self.tell(f"steps are not recorded, only slower for it: {' '.join(str(error).split())[:120]}")
                return None
        return self.recorded(batch)

    def forget(self) -> bool:
        """Give back the memory of a recording, for good; whether there was one."""
        held, self.recorded, self.able = self.recorded is not None, None, False
        return held
