"""What the loop knows of a task: batches, and a callable from a module and a batch to losses."""

from vitkit.objectives.task import Batch as Batch
from vitkit.objectives.task import Objective as Objective
