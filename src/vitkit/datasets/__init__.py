"""Public data sets as they are published: their official splits, and those of VTAB-1k's 19 tasks."""

from vitkit.datasets.opening import open_published, refuse_published
from vitkit.datasets.vtab import TASKS, Opened, Task, find_task, open_place, read_task

__all__ = [
    "TASKS",
    "Opened",
    "Task",
    "find_task",
    "open_place",
    "open_published",
    "read_task",
    "refuse_published",
]
