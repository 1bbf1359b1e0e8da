"""Kernels, and for each one rule that decides where it runs; everywhere else the PyTorch version runs."""
