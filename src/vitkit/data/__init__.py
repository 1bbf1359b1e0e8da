"""Files to batches. Imports no other room of ours."""
