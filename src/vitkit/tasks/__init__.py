"""What the verbs do: choose, say what was chosen, run, and tell the result."""
