"""Plan, then run: a request to a plan, with everything decided, opened and built once."""
