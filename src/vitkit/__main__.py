"""python -m vitkit is the vitkit command."""

from vitkit.cli import main

main()
