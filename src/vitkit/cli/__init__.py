"""The command-line interface."""

from vitkit.cli.verbs import VERBS, main

__all__ = ["VERBS", "main"]
