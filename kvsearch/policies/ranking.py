"""From scores to ranks to kept entries: protection, padding and budgets, the same for every policy.

Ranks do not depend on the budget, so the entries kept at a budget are a prefix of those kept at a larger one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsearch.policies.base import Observation, Policy


def protection_order(valid: Tensor, sinks: int, window: int) -> Tensor:
    """Position of every protected entry in the order of protection, [B, T] int64; -1 where not protected.

    The newest entry comes first, then the sinks from the first on, then the window from the newest on: a budget
    below the protected count still keeps the newest entry and the first sinks.
    """
    lengths = valid.sum(-1, keepdim=True)
    index = valid.cumsum(-1) - 1
    age = lengths - 1 - index
    order = torch.full_like(index, -1)
    in_window = valid & (age < window)
    order = torch.where(in_window, torch.where(age == 0, 0, age + sinks), order)
    in_sinks = valid & (index < sinks) & ~(in_window & (age == 0))
    offset = 1 if window > 0 else 0
    return torch.where(in_sinks, index + offset, order)


def rank_entries(scores: Tensor, valid: Tensor, sinks: int = 0, window: int = 0) -> Tensor:
    """Rank of every entry in its head, [B, Hkv, T] int32: 0 is kept first, padding comes last.

    Ties go to the lower position (stable descending sort). `scores` is [B, Hkv, T], `valid` [B, T] bool.
    """
    order = protection_order(valid, sinks, window)
    # three classes, best first: protected (in the order of protection), candidates (by score), padding
    candidates = scores.float().masked_fill(~valid[:, None], float("-inf"))
    place = _inverse(torch.argsort(candidates, dim=-1, stable=True, descending=True))
    sort_key = torch.where((order >= 0)[:, None], order[:, None], place + sinks + window)
    sort_key = sort_key.masked_fill(~valid[:, None], 2 * valid.shape[-1] + sinks + window)
    return _inverse(torch.argsort(sort_key, dim=-1, stable=True)).int()


def _inverse(permutation: Tensor) -> Tensor:
    """Where each element went: the inverse of permutations along the last dimension."""
    index = torch.arange(permutation.shape[-1], device=permutation.device).expand_as(permutation)
    return torch.empty_like(permutation).scatter_(-1, permutation, index)


def rank_under(policy: Policy, observation: Observation) -> Tensor:
    """Rank of every entry under a policy, [B, Hkv, T] int32; see `rank_entries`."""
    scores = policy.score(observation)
    return rank_entries(scores, observation.valid, policy.sink_count, policy.window_count)


def keep_mask(ranks: Tensor, budgets: Tensor, valid: Tensor) -> Tensor:
    """Entries kept at `budgets` ([Hkv] or [B, Hkv]), [B, Hkv, T] bool: exactly min(real length, budget) per head."""
    return (ranks < budgets.to(ranks.device).view(-1, ranks.shape[1], 1)) & valid[:, None]


def kept_indices(ranks: Tensor, budget: int, row: int = 0, head: int = 0) -> list[int]:
    """Positions kept in one head at `budget`, ascending (for inspection and tests)."""
    return torch.nonzero(ranks[row, head] < budget).flatten().tolist()
