"""VTAB-1k: the files of its data sets, as they are published, to the splits of its 19 tasks."""

from vitkit.data.vtab.portions import Opened, open_place, read_task
from vitkit.data.vtab.tasks import TASKS, Task, find_task

__all__ = ["TASKS", "Opened", "Task", "find_task", "open_place", "read_task"]
