"""Lets `python -m laoka.cli` do what `laoka` does."""

from laoka.cli.main import main

main()
