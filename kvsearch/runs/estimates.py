"""Means and paired differences with their intervals, as results record them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, Strict

from kvsearch.core.fields import End
from kvsearch.core.printed import pluralize

LEAST_USEFUL = 0.1  # a full cache that scores less cannot tell methods apart
FEW_CONTEXTS = (
    8  # on fewer contexts one may score nothing by chance: a third right in the long run, nothing right on 7 in 6%
)


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval over `contexts`, whose ends are NaN where these are too few.

    A share of a gap does not say how many contexts there were.
    """

    mean: Annotated[float, Strict()]  # in a file no text stands for a number, such as "nan"
    low: End
    high: End
    contexts: Annotated[int | None, Field(exclude_if=lambda count: count is None)] = field(default=None, kw_only=True)


def find_doubt(full: Estimate) -> str | None:
    """Return why scores mean little if the full cache scores `full` near zero; None if they are meaningful."""
    if full.mean >= LEAST_USEFUL:
        return None
    if full.contexts is not None and full.contexts < FEW_CONTEXTS:
        return (
            f"the full cache itself scores {full.mean:.2f}, but on {pluralize(full.contexts, 'context')} that may be "
            f"chance: ask about {FEW_CONTEXTS} or more with --samples, or ask others with --tasks"
        )
    return (
        f"the full cache itself scores {full.mean:.2f}: these questions cannot tell methods apart on this model, ask "
        "others with --tasks"
    )


@dataclass(frozen=True)
class Difference(Estimate):
    """A mean paired difference with its interval, and on how many questions it is above, at and below zero."""

    wins: int
    ties: int
    losses: int


@dataclass(frozen=True)
class TextLoss:
    """What a method loses on teacher-forced tokens, in nats per token: lower is better.

    `loss` is its mean negative log-likelihood, `excess` how far that is above the full cache's, paired and without the
    bounds that scores have. `difference` is the excess minus the subject's (None: it is the subject, or there is none).
    All have 95% intervals by Student's t over contexts.
    """

    loss: Estimate
    excess: Estimate
    difference: Estimate | None
