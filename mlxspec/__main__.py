"""`python -m mlxspec` is the `mlxspec` command."""

from mlxspec.cli import main

main()
