"""Experiments as frozen values: complete, comparable, JSON and back."""
