"""python -m vitkit is the vitkit command."""

from vitkit.cli import main

if __name__ == "__main__":
    main()
