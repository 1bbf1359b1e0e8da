"""Metrics: accuracy, few-shot, cost and speed, computed from callables and tensors."""
