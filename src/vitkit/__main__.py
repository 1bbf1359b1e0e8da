"""`python -m vitkit` runs the vitkit command."""

from vitkit.cli.verbs import main

if __name__ == "__main__":
    main()
