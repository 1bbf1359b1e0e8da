"""What the loop knows of a task: batches, and a callable from a module and a batch to losses."""

from vitkit.tasks.task import Batch as Batch
from vitkit.tasks.task import Objective as Objective
