"""Batches in pieces that fit into memory."""

from collections.abc import Callable
from dataclasses import dataclass

from vitkit.training.objectives import Batch

CAREFUL = 2  # first steps of a process, after which what fitted into memory is taken to fit for good


class OutOfMemory(ValueError):
    """Images do not fit into memory, even where they are cut into smaller pieces; the remedy is told."""


@dataclass
class Room:
    """Into how many pieces each micro-batch is cut so that it fits into memory: as many on every process."""

    tell: Callable[[str], None] = lambda text: None
    release: Callable[[], bool] = lambda: (
        False
    )  # gives back what is only kept for speed; whether there was any
    pieces: int = 1
    steps: int = 0  # that have fitted

    def cut(self, micro_batches: list[Batch]) -> list[Batch]:
        if self.pieces == 1:
            return micro_batches
        cuts = [
            {name: tensor.tensor_split(self.pieces) for name, tensor in batch.items()}
            for batch in micro_batches
        ]
        return [{name: parts[i] for name, parts in cut.items()} for cut in cuts for i in range(self.pieces)]

    def shrink(self, step: int, images: int) -> None:
        """Twice as many pieces, of which the largest has had so many images."""
        if images <= 1:
            raise OutOfMemory(
                f"step {step}: not even one image at a time fits into memory; give a smaller "
                "--image-size or a smaller model; finetune and pretrain also have --recompute"
            )
        self.pieces *= 2
        left = -(-images // 2)
        self.tell(
            f"step {step}: out of memory; from here on {left} images at a time, the same batch in all "
            f"(--set micro_batch={left} saves the attempt)"
        )
