"""Tensors to tensors: every model of the paper. Imports torch and nothing else of ours."""
