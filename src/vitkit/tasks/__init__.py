"""Tasks: what a model is trained for, one file each."""
