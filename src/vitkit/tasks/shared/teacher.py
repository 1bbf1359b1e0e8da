"""A student and its teacher, whose weights are an average of the student's (DINO, iBOT, MoCo v3)."""

import copy
import math

import torch
from torch import Tensor, nn

from vitkit.runtime.runtime import local_shard


class StudentTeacher(nn.Module):
    """The trained module of a task with a teacher. State-dict names: student.*, teacher.*, step.

    The teacher starts as a copy of the student and gets no gradients. `step` counts the updates; it is on the
    device and in checkpoints, so that schedules are right in CUDA graphs and after a restart.
    """

    step: Tensor

    def __init__(self, student: nn.Module):
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.steps = 1  # of the run, set by `Task.begin`

    def cosine(self, first: float, last: float, ahead: int = 0) -> Tensor:
        """The value at this step of a cosine schedule over the run, which would reach `last` at its end.

        ahead: so many steps later.
        """
        progress = ((self.step + ahead) / self.steps).clamp(max=1)
        return last + 0.5 * (first - last) * (1 + torch.cos(math.pi * progress))

    def linear(self, first: float, last: float, steps: float) -> Tensor:
        """The value at this step of a linear schedule over so many steps, and `last` afterwards."""
        return first + (last - first) * (self.step / max(1, steps)).clamp(max=1)

    @torch.no_grad()
    def update_teacher(self, momentum: Tensor) -> None:
        """teacher = momentum * teacher + (1 - momentum) * student, for all parameters; then count the step.

        The momentum is a tensor on the device. Buffers, such as running statistics, are not averaged.
        """
        teacher = [local_shard(p) for p in self.teacher.parameters()]
        student = [local_shard(p.detach()) for p in self.student.parameters()]
        torch._foreach_mul_(teacher, momentum)
        torch._foreach_add_(teacher, torch._foreach_mul(student, 1 - momentum))
        self.step += 1
