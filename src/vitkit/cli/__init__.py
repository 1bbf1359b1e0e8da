"""The command line."""

from vitkit.cli.verbs import VERBS, main

__all__ = ["VERBS", "main"]
