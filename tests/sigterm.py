"""Runs that get SIGTERM after a step, for tests that stop and resume them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vitkit.runs.run import Trainer


@contextmanager
def sigterm_at(step: int) -> Iterator[None]:
    """Within it, this process gets SIGTERM after that step of a run."""
    real = Trainer.watch

    def watch(self, state, metrics):
        if state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, state, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "watch", watch)
        yield
