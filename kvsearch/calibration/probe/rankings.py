"""How rankings are chosen and reported, whatever they are made of: on contexts that none of them was fitted on.

Importance says which entries a head looks at, not that it needs them: the output of a head that looks everywhere is a
mean, and an even sample keeps a mean that the entries with most attention do not. Such heads get an even spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.convex import oracle_recall_curve, recall_curve
from kvsearch.calibration.options import COMPARED
from kvsearch.calibration.probe.context_pass import BUDGETS, ContextPass
from kvsearch.core.arrays import Floats

if TYPE_CHECKING:
    from kvsearch.calibration.steps import Arrays

LEVEL = 0.05  # of the sign-flip test
EXACT = 12  # contexts up to which all signs are tried
FLIPS = 9999
LEAST_ERROR = 1e-30  # of a head whose output does not move

Ranking = Callable[[ContextPass], Tensor]  # scores of the entries of a context that are ranked, [L, Hkv, T]
Measure = Callable[[ContextPass], Mapping[str, Tensor]]
Measured = Callable[[Measure], "Iterable[Arrays]"]  # what is measured of some contexts


class LeftOut(NamedTuple):
    """A kind of question, and the ranking that never saw it."""

    kind: str
    ranking: Ranking


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
        keeps = [
            context_pass.kept(scores, budget)
            for scores in (ranking(context_pass), context_pass.spread)
            for budget in BUDGETS
        ]
        errors = context_pass.head_errors(keeps).clamp(min=LEAST_ERROR).log()
        errors = errors.view(len(errors), 2, len(BUDGETS), *errors.shape[2:])
        less = (errors[:, 0] - errors[:, 1]).mean(1)
        targets = [continuation.target for continuation in context_pass.asked]
        return {name: less[torch.tensor([target == name for target in targets])] for name in dict.fromkeys(targets)}

    found: dict[str, list[Tensor]] = {}
    for measured in read(ratios):
        for target, rows in measured.items():
            found.setdefault(target, []).append(torch.from_numpy(rows))
    better = torch.stack([torch.cat(rows).mean(0) > 0 for rows in found.values()]).all(0)
    mixture = spread_where(better, ranking)
    both = read(lambda context_pass: {"loss": losses((ranking, mixture), context_pass).mean(-1)})
    # [questions, 2] of each context
    worse = [float((arrays["loss"][:, 1] - arrays["loss"][:, 0]).mean()) for arrays in both]
    return torch.zeros_like(better) if beyond_chance(worse) else better


def beyond_chance(losses: Sequence[float]) -> bool:
    """Tell whether the mean of what contexts lose is above zero beyond chance, by a sign-flip test.

    If nothing is lost, what a context loses is as likely to be of either sign: the chance is the share of signs under
    which the mean is as large. Contexts are the units, as questions of one context lose alike; below five of them
    nothing is beyond chance.
    """
    values = np.array(losses, dtype=np.float64)
    if len(values) <= EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=len(values))))
    else:
        drawn = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS, len(values)))
        signs = np.concatenate([np.ones((1, len(values))), drawn])
    means = signs @ values
    return bool(np.mean(means >= means[0] - 1e-12) <= LEVEL)


def losses(rankings: Sequence[Ranking], context_pass: ContextPass) -> Tensor:
    """Return how far replies move under each of several rankings, [questions, R, B]."""
    keeps = [context_pass.kept(ranking(context_pass), budget) for ranking in rankings for budget in BUDGETS]
    return context_pass.losses(keeps).view(-1, len(rankings), len(BUDGETS))


def gains(rankings: Sequence[Ranking], context_pass: ContextPass) -> Tensor:
    """Return the recall of several rankings, mean over budgets, [R, L, Hkv]."""
    return torch.from_numpy(
        _recalls(context_pass.largest, [order_of(ranking(context_pass)) for ranking in rankings]).mean(1)
    )


def reported(ranking: Ranking, read: Measured, held: LeftOut | None, first: int = 0) -> dict[str, Floats]:
    """Return recall [P, B, L, Hkv] and loss [P, B] of a ranking and of the policies that it is compared with.

    "kind_recall" and "kind_loss" are those for a kind that was left out, [P + 1, ...]: the ranking that never saw it is
    the first. The policies are those that contexts are read with, from the number `first` on.
    """

    def measure(context_pass: ContextPass) -> dict[str, Tensor]:
        fits = [ranking(context_pass)]
        rows = [held is not None and asked.kind == held.kind for asked in context_pass.judged]
        if held is not None and any(rows):
            fits.insert(0, held.ranking(context_pass))
        ranks = [context_pass.passed.ranks(first + number) for number in range(len(COMPARED))]
        keeps = [context_pass.kept(scores, budget) for scores in fits for budget in BUDGETS]
        keeps += [rank < max(1, round(budget * context_pass.length)) for rank in ranks for budget in BUDGETS]
        lost = context_pass.losses(keeps).view(len(rows), -1, len(BUDGETS)).numpy()
        orders = [order_of(scores) for scores in fits] + [rank[..., context_pass.free].argsort(-1) for rank in ranks]
        whole = len(fits) - 1
        measured = {"recall": _recalls(context_pass.largest, orders[whole:]), "loss": lost[:, whole:].mean(0)}
        if held is not None and any(rows):
            measured |= {
                "kind_recall": _recalls(context_pass.largest_of(held.kind), orders),
                "kind_loss": lost[rows].mean(0),
            }
        return {name: torch.from_numpy(values) for name, values in measured.items()}

    found: dict[str, list[Floats]] = {}
    for measured in read(measure):
        for name, values in measured.items():
            found.setdefault(name, []).append(values)
    return {name: np.mean(values, axis=0).astype(np.float32) for name, values in found.items()}


def order_of(scores: Tensor) -> Tensor:
    """Return the entries in the order of their scores [..., T], the best first."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def _recalls(importance: Tensor, orders: Sequence[Tensor]) -> Floats:
    """Return the recall of several orders [L, Hkv, T] of entries, [R, B, L, Hkv]."""
    return np.stack([recall_of(importance.gather(-1, order).numpy()) for order in orders])


def recall_of(importance: Floats) -> Floats:
    """Return the importance kept at each of `BUDGETS`, as a share of what the oracle keeps there, [B, ...].

    `importance` [..., T] is in the order of the ranking. A head without importance has nothing to lose: 1.
    """
    at = [max(1, round(budget * importance.shape[-1])) for budget in BUDGETS]
    kept, best = recall_curve(importance)[..., at], oracle_recall_curve(importance)[..., at]
    return np.moveaxis(kept / best, -1, 0)
