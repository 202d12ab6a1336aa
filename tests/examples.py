"""How many examples a property draws: as many as the profile says, but for the reasons given here.

`--hypothesis-profile` chooses the profile; tests/conftest.py imports this file before pytest reads its options.
"""

from __future__ import annotations

from hypothesis import settings

PROFILES = {"default": 8, "ci": 50}

for _name, _examples in PROFILES.items():  # no deadlines: how fast a machine is says nothing about the code
    settings.register_profile(_name, max_examples=_examples, deadline=None)
# One commit, one verdict: CI draws the same examples at every run; the default goes on looking for new ones.
settings.register_profile("ci", settings.get_profile("ci"), derandomize=True, database=None)
settings.load_profile("default")


def fixed(count: int | None = None) -> settings:
    """Draw the same examples at every run, where floats that tie in one draw of a million would be no failure."""
    return settings(at_most(count) if count else None, derandomize=True, database=None)


def at_most(count: int) -> settings:
    """Draw `count` examples, for tests in which each one is expensive, or as many as the profile if those are fewer."""
    return settings(max_examples=min(count, settings().max_examples))
