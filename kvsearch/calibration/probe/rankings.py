"""How rankings are chosen and reported, whatever they are made of: on contexts that none of them was fitted on.

Importance says which entries a head looks at, not that it needs them: the output of a head that looks everywhere is a
mean, and an even sample keeps a mean that the entries with most attention do not. Such heads get an even spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.convex import oracle_recall_curve, recall_curve
from kvsearch.calibration.options import COMPARED
from kvsearch.calibration.probe.context_pass import BUDGETS, ContextPass
from kvsearch.core.arrays import Floats
from kvsearch.core.sign_flips import compute_chances
from kvsearch.tasks.splits import group_by_text

if TYPE_CHECKING:
    from kvsearch.calibration.steps import Arrays

LEVEL = 0.05  # of the sign-flip test
LEAST_ERROR = 1e-30  # of a head whose output does not move

Ranking = Callable[[ContextPass], Tensor]  # scores of the entries of a context that are ranked, [L, Hkv, T]
Measure = Callable[[ContextPass], Mapping[str, Tensor]]
Measured = Callable[[Measure], "Iterable[Arrays]"]  # what is measured of some contexts


def by_policy(number: int) -> Ranking:
    """Return the ranking by the policy of that number among those that contexts are read with."""
    return lambda context_pass: -context_pass.passed.ranks(number)[..., context_pass.free].float()


def spread_where(heads: Tensor, ranking: Ranking) -> Ranking:
    """Return the ranking with an even spread in `heads` [L, Hkv] bool."""
    return lambda context_pass: torch.where(heads[..., None], context_pass.spread, ranking(context_pass))


def prefers_spread(ranking: Ranking, read: Measured) -> Tensor:
    """Mark heads whose output an even spread moves less, [L, Hkv] bool.

    It must move a head less for each target: by answers alone what no question needs, by reconstruction alone what is
    needed once, would not count. Every question counts the same, however large its errors are. No head is marked if
    replies move more with the spread, beyond chance: heads are judged one by one, and lose together.
    """

    def ratios(context_pass: ContextPass) -> dict[str, Tensor]:
        """Return by target how much less the spread moves every head, log [questions, L, Hkv]."""
        keeps = [*context_pass.kept(ranking(context_pass)), *context_pass.kept(context_pass.spread)]
        less = {}
        for target, asked in context_pass.asked.items():
            errors = context_pass.head_errors(asked, keeps).clamp(min=LEAST_ERROR).log()
            errors = errors.view(len(errors), 2, len(BUDGETS), *errors.shape[2:])
            less[target] = (errors[:, 0] - errors[:, 1]).mean(1)
        return less

    found: dict[str, list[Tensor]] = {}
    for measured in read(ratios):
        for target, rows in measured.items():
            found.setdefault(target, []).append(torch.from_numpy(rows))
    better = torch.stack([torch.cat(rows).mean(0) > 0 for rows in found.values()]).all(0)
    mixture = spread_where(better, ranking)

    def compared(context_pass: ContextPass) -> dict[str, Tensor]:
        """Return how far replies move under the ranking and under the mixture, [questions, 2]."""
        return {"loss": losses((ranking(context_pass), mixture(context_pass)), context_pass).mean(-1)}

    worse = [float((arrays["loss"][:, 1] - arrays["loss"][:, 0]).mean()) for arrays in read(compared)]
    (chance,) = compute_chances(np.array([worse]))  # of contexts, as questions of one context lose alike
    return torch.zeros_like(better) if chance <= LEVEL else better


def losses(scores: Sequence[Tensor], context_pass: ContextPass) -> Tensor:
    """Return how far replies move under several rankings' scores [L, Hkv, T], [questions, R, B]."""
    keeps = [keep for ranked in scores for keep in context_pass.kept(ranked)]
    return context_pass.losses(keeps).view(-1, len(scores), len(BUDGETS))


def recalls(scores: Sequence[Tensor], context_pass: ContextPass) -> Tensor:
    """Return the recall of several rankings by their scores [L, Hkv, T], [R, B, L, Hkv]."""
    device = context_pass.passed.model.device
    orders = [ranked.to(device).argsort(dim=-1, descending=True, stable=True).cpu() for ranked in scores]
    return torch.from_numpy(np.stack([recall_of(context_pass.largest.gather(-1, order).numpy()) for order in orders]))


def reported(fit: Ranking, read: Measured, first: int = 0) -> dict[str, Floats]:
    """Return "recall" [P, B, L, Hkv] of a fit and of the policies that it is compared with, and losses.

    "text_loss" [N, P, B] has a row of every text. The policies are those that contexts are read with, from the number
    `first` on; all protect the same entries.
    """
    rankings = [fit, *(by_policy(first + number) for number in range(len(COMPARED)))]

    def measure(context_pass: ContextPass) -> dict[str, Tensor]:
        scores = [ranking(context_pass) for ranking in rankings]
        return {
            "text": torch.tensor([context_pass.prompt.text]),
            "recall": recalls(scores, context_pass),
            "loss": losses(scores, context_pass).mean(0),
        }

    contexts = [dict(arrays) for arrays in read(measure)]
    texts = group_by_text(arrays["text"].item() for arrays in contexts)
    text_losses = [np.mean([contexts[number]["loss"] for number in text], axis=0) for text in texts]
    return {
        "text_loss": np.stack(text_losses).astype(np.float32),
        "recall": np.mean([arrays["recall"] for arrays in contexts], axis=0).astype(np.float32),
    }


def recall_of(importance: Floats) -> Floats:
    """Return the importance kept at each of `BUDGETS`, as a share of what the oracle keeps there, [B, ...].

    `importance` [..., T] is in the order of the ranking. A head without importance has nothing to lose: 1.
    """
    at = [max(1, round(budget * importance.shape[-1])) for budget in BUDGETS]
    kept, best = recall_curve(importance)[..., at], oracle_recall_curve(importance)[..., at]
    return np.moveaxis(kept / best, -1, 0)
