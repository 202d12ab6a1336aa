"""The score where answers are teacher-forced: nothing is replied, and how well the answer is predicted counts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvsearch.core.errors import assert_present

# Nats per token of a text that is no longer predicted: what one look-up of three tokens that fails costs 64 tokens.
# Were it more, leads of useful plans would be too small a part of the scale for bets and intervals.
MOST_LOST = 0.25
_LOSSES = re.compile(r"([\d.]+) nats per token, ([\d.]+) under the full cache")


def format_losses(loss: float, full: float) -> str:
    """Format the mean loss of the answer's tokens, and the full cache's, to be stored in place of a reply."""
    return f"{loss:.6f} nats per token, {full:.6f} under the full cache"


def read_losses(text: str) -> tuple[float, float] | None:
    """Return the losses that `format_losses` says; None where it says something else."""
    losses = _LOSSES.fullmatch(text)
    return None if losses is None else (float(losses[1]), float(losses[2]))


def read_loss(text: str) -> float:
    """Read the loss back that `format_losses` wrote, in nats per token."""
    return assert_present(read_losses(text), "what stands in place of a reply says no loss")[0]


def likelihood(reply: str, answers: Sequence[str]) -> float:  # noqa: ARG001 - they were predicted already
    """Score a loss against the full cache's: 1 at the same loss, falling linearly to 0 at MOST_LOST nats more.

    A lower loss than the full cache's scores 1, too. `reply` is the text of `format_losses`; any other scores 0.
    """
    losses = read_losses(reply)
    if losses is None:
        return 0.0
    loss, full = losses
    return min(max(1 - (loss - full) / MOST_LOST, 0.0), 1.0)


FORCED = likelihood.__name__  # the metric of tasks whose answers are teacher-forced
