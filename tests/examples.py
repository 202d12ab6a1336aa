"""How many examples a property draws: the profile says so (tests/conftest.py). Here are the two reasons to differ."""

from __future__ import annotations

from hypothesis import settings

# The same examples at every run, for tests in which a tie of floats that one draw in a million brings is no failure.
fixed = settings(derandomize=True, database=None)


def at_most(count: int, base: settings | None = None) -> settings:
    """Draw `count` examples, for tests in which each one is expensive, or as many as the profile if those are fewer."""
    return settings(base, max_examples=min(count, settings().max_examples))
