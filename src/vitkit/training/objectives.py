"""What the loop knows of a task: batches, and a callable from a module and a batch to losses."""
