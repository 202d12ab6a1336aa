"""How rankings are chosen and reported, whatever they are made of: on contexts that none of them was fitted on.

Importance says which entries a head looks at, not that it needs them: the output of a head that looks everywhere is a
mean, and an even sample keeps a mean that the entries with most attention do not. Such heads get an even spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.budgets.curves import oracle_recall_curve, recall_curve
from kvsearch.calibration.options import COMPARED
from kvsearch.calibration.probe.chance import beyond_chance
from kvsearch.calibration.probe.reading import BUDGETS, Reading
from kvsearch.calibration.steps import Arrays

LEAST_ERROR = 1e-30  # of a head whose output does not move

Ranking = Callable[[Reading], Tensor]  # scores of the entries of a context that are ranked, [L, Hkv, T]
Measure = Callable[[Reading], Mapping[str, Tensor]]
Measured = Callable[[Measure], Iterable[Arrays]]  # what is measured of some contexts


class LeftOut(NamedTuple):
    """A kind of question, and the ranking that never saw it."""

    kind: str
    ranking: Ranking


def by_policy(number: int) -> Ranking:
    """Return the ranking by the policy of that number among those that contexts are read with."""
    return lambda reading: -reading.passed.ranks(number)[..., reading.free].float()


def spread_where(heads: Tensor, ranking: Ranking) -> Ranking:
    """Return the ranking with an even spread in `heads` [L, Hkv] bool."""
    return lambda reading: torch.where(heads[..., None], reading.spread, ranking(reading))


def prefers_spread(ranking: Ranking, read: Measured) -> Tensor:
    """Mark heads whose output an even spread moves less, [L, Hkv] bool.

    It must move a head less for each target: by answers alone what no question needs, by reconstruction alone what is
    needed once, would not count. Every question counts the same, however large its errors are. No head is marked if
    replies move more with the spread, beyond chance: heads are judged one by one, and lose together.
    """

    def ratios(one: Reading) -> dict[str, Tensor]:
        """Return by target how much less the spread moves every head, log [questions, L, Hkv]."""
        keeps = [one.kept(scores, budget) for scores in (ranking(one), one.spread) for budget in BUDGETS]
        errors = one.head_errors(keeps).clamp(min=LEAST_ERROR).log()
        errors = errors.view(len(errors), 2, len(BUDGETS), *errors.shape[2:])
        less, targets = (errors[:, 0] - errors[:, 1]).mean(1), [asked.target for asked in one.asked]
        return {name: less[torch.tensor([target == name for target in targets])] for name in dict.fromkeys(targets)}

    found: dict[str, list[Tensor]] = {}
    for measured in read(ratios):
        for target, rows in measured.items():
            found.setdefault(target, []).append(torch.from_numpy(rows))
    better = torch.stack([torch.cat(rows).mean(0) > 0 for rows in found.values()]).all(0)
    mixture = spread_where(better, ranking)
    both = read(lambda one: {"loss": losses((ranking, mixture), one).mean(-1)})
    worse = [float((one["loss"][:, 1] - one["loss"][:, 0]).mean()) for one in both]  # [questions, 2] of each context
    return torch.zeros_like(better) if beyond_chance(worse) else better


def losses(rankings: Sequence[Ranking], reading: Reading) -> Tensor:
    """Return how far replies move under each of several rankings, [questions, R, B]."""
    keeps = [reading.kept(ranking(reading), budget) for ranking in rankings for budget in BUDGETS]
    return reading.losses(keeps).view(-1, len(rankings), len(BUDGETS))


def gains(rankings: Sequence[Ranking], reading: Reading) -> Tensor:
    """Return the recall of several rankings, mean over budgets, [R, L, Hkv]."""
    return torch.from_numpy(_recalls(reading.largest, [order_of(ranking(reading)) for ranking in rankings]).mean(1))


def reported(ranking: Ranking, read: Measured, held: LeftOut | None, first: int = 0) -> dict[str, Floats]:
    """Return recall [P, B, L, Hkv] and loss [P, B] of a ranking and of the policies that it is compared with.

    "kind_recall" and "kind_loss" are those for a kind that was left out, [P + 1, ...]: the ranking that never saw it is
    the first. The policies are those that contexts are read with, from the number `first` on.
    """

    def measure(one: Reading) -> dict[str, Tensor]:
        fits, rows = [ranking(one)], [held is not None and asked.kind == held.kind for asked in one.judged]
        if held is not None and any(rows):
            fits.insert(0, held.ranking(one))
        ranks = [one.passed.ranks(first + number) for number in range(len(COMPARED))]
        keeps = [one.kept(scores, budget) for scores in fits for budget in BUDGETS]
        keeps += [rank < max(1, round(budget * one.length)) for rank in ranks for budget in BUDGETS]
        lost = one.losses(keeps).view(len(rows), -1, len(BUDGETS)).numpy()
        orders = [order_of(scores) for scores in fits] + [rank[..., one.free].argsort(-1) for rank in ranks]
        whole = len(fits) - 1
        measured = {"recall": _recalls(one.largest, orders[whole:]), "loss": lost[:, whole:].mean(0)}
        if held is not None and any(rows):
            measured |= {"kind_recall": _recalls(one.largest_of(held.kind), orders), "kind_loss": lost[rows].mean(0)}
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
