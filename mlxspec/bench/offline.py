"""What `mlxspec bench` can say without a model: replayed recordings, and the controller alone."""

from pathlib import Path

from rich.console import Console

from mlxspec import blas


def run(recording: Path | None, acceptance: float | None, row_cost: float, draft_cost: float) -> None:
    """Print the table of each that is asked for. Raises ConfigError."""
    blas.load()  # the drafters import mlx
    from mlxspec.bench.replay import replay
    from mlxspec.bench.synthetic import synthetic

    console = Console()
    if recording:
        replay(recording, row_cost, console)
    if acceptance is not None:
        synthetic(acceptance, row_cost, draft_cost, console)
