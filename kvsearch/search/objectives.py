"""What a search can be judged by, and the losses of teacher-forced answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.search.settings import ObjectiveName

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Objective:
    """One way to judge a candidate on a sample. `free_running`: on its own reply, else on a teacher-forced answer."""

    name: ObjectiveName
    description: str
    higher_is_better: bool = False
    free_running: bool = False
    needs_full: bool = False  # of every sample, what the full cache says


OBJECTIVES: Final[dict[str, Objective]] = {
    objective.name: objective
    for objective in (
        Objective("nll", "mean negative log-likelihood of the right answer's tokens, in nats"),
        Objective(
            "kl",
            "mean divergence KL(full cache || candidate) of the next-token distributions over the right answer's "
            "tokens, in nats",
            needs_full=True,
        ),
        Objective("metric", "the task's metric of the greedy reply, 0 to 1", higher_is_better=True, free_running=True),
    )
}


def find_objective(name: str) -> Objective:
    """The objective of that name; UsageError if there is none."""
    if name not in OBJECTIVES:
        raise UsageError(f"unknown objective {name!r}{suggest(name, get_args(ObjectiveName))}")
    return OBJECTIVES[name]


def answer_nll(logits: Tensor, answers: Tensor) -> Floats:
    """Negative log-likelihoods of answers, the sums over their tokens in nats, [S].

    Logits are [S, R, V], in the rows that predict the answers [S, R]; -1 where there is no token.
    """
    scores, answers = logits.float(), answers.to(logits.device)
    picked = scores.gather(-1, answers.clamp(min=0)[..., None])[..., 0]
    return _sums(scores.logsumexp(-1) - picked, answers >= 0)


def answer_kl(logits: Tensor, full: Tensor, answers: Tensor) -> Floats:
    """KL(full || logits), the sums over the rows that predict answers, [S]; `full` [S, R, V] are log-probabilities."""
    full = full.to(logits.device)
    apart = full.exp() * (full - logits.float().log_softmax(-1))
    return _sums(apart.sum(-1), answers.to(logits.device) >= 0)


def _sums(losses: Tensor, counted: Tensor) -> Floats:
    """Sums of losses [S, R] where they are counted."""
    sums: Floats = losses.double().masked_fill(~counted, 0.0).sum(-1).cpu().numpy()
    return sums
