"""`python -m kvsearch` is the `kvsearch` command."""

from kvsearch.cli import main

main()
