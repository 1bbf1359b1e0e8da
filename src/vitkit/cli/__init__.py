"""The command-line interface."""

from vitkit.cli.bytecode import cache_bytecode

cache_bytecode()  # before any large library is imported

from vitkit.cli.verbs import VERBS, main  # noqa: E402

__all__ = ["VERBS", "main"]
