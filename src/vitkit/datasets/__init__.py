"""Public data sets in their published layouts, with official splits, and the 19 tasks of VTAB-1k."""

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
