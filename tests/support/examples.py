"""How many examples of hypothesis `make test` tries, and `make test-slow`."""

from hypothesis import settings


def examples(count: int) -> int:
    """So many examples of hypothesis in `make test-slow`, whose profile is another; a quarter of them
    in `make test`."""
    return count if settings.get_current_profile_name() == "random" else count // 4
