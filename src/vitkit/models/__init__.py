"""Tensors to tensors: every model of the paper."""
