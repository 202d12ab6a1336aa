"""From scores to ranks to kept entries: protection, padding and budgets, the same for every policy.

The entries kept at a budget are a prefix of those kept at a larger one. Most policies have one score, and then ranks do
not depend on the budget. Some take the first part of a budget by another priority (H2O's recent half, CriticalKV's
first stage): `keep_at` applies that at given budgets, `rank_under` finds the one order that holds at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from kvsearch.policies.base import Observation, Policy
from kvsearch.policies.checks import check_scores, name_package_on_error
from kvsearch.policies.tensors import Tensor, torch


def order_protected(valid: Tensor, sinks: int, window: int) -> Tensor:
    """Return the place of every protected entry in the order of protection, [B, T] int64; -1 where not protected.

    The newest entry comes first, then the sinks from the first on, then the window from the newest on: a budget
    below the protected count still keeps the newest entry and the first sinks.
    """
    lengths = valid.sum(-1, keepdim=True)
    index = valid.cumsum(-1) - 1
    age = lengths - 1 - index
    order = torch.full_like(index, -1)
    in_window = valid & (age < window)
    # Newest 0, then the sinks 1 to `sinks`, then the window by age; an entry that is both counts as window only where
    # it is the newest.
    order = torch.where(in_window, torch.where(age == 0, 0, age + sinks), order)
    in_sinks = valid & (index < sinks) & ~(in_window & (age == 0))
    offset = 1 if window > 0 else 0
    return torch.where(in_sinks, index + offset, order)


def rank_entries(scores: Tensor, valid: Tensor, sinks: int = 0, window: int = 0) -> Tensor:
    """Return the rank of every entry in its head, [B, Hkv, T] int32: 0 is kept first, padding comes last.

    Ties go to the lower position (stable descending sort). `scores` is [B, Hkv, T], `valid` [B, T] bool.

    Examples:
        >>> scores = torch.tensor([[[0.1, 0.5, 0.3, 0.9]]])
        >>> valid = torch.ones(1, 4, dtype=torch.bool)
        >>> rank_entries(scores, valid)[0, 0].tolist()
        [3, 1, 2, 0]
        >>> rank_entries(scores, valid, sinks=1)[0, 0].tolist()  # the first entry is always kept
        [0, 2, 3, 1]
    """
    order = order_protected(valid, sinks, window)
    # three classes, best first: protected (in the order of protection), candidates (by score), padding
    candidates = scores.float().masked_fill(~valid[:, None], float("-inf"))
    place = invert_permutation(torch.argsort(candidates, dim=-1, stable=True, descending=True))
    sort_key = torch.where((order >= 0)[:, None], order[:, None], place + sinks + window)
    # Above every place of a real entry: padding is last at all budgets.
    sort_key = sort_key.masked_fill(~valid[:, None], 2 * valid.shape[-1] + sinks + window)
    return invert_permutation(torch.argsort(sort_key, dim=-1, stable=True)).int()


def invert_permutation(permutation: Tensor) -> Tensor:
    """Return where each element went: the inverse of permutations along the last dimension."""
    index = torch.arange(permutation.shape[-1], device=permutation.device).expand_as(permutation)
    return torch.empty_like(permutation).scatter_(-1, permutation, index)


def apply_to_each(rule: Callable[..., int | tuple[int, ...]], *counts: Tensor) -> Tensor:
    """Apply a rule of whole numbers, such as `Policy.first_stage_budget`, to every element of int64 `counts`.

    All are of one shape, as is the result, int64 on the CPU; a rule of several results adds a dimension for them.
    """
    numbers = list(zip(*(count.flatten().tolist() for count in counts), strict=True))
    # Heads mostly share few budgets, and a rule is Python: it is called once for each that differs.
    known = {different: rule(*different) for different in set(numbers)}
    results = torch.tensor([known[each] for each in numbers], dtype=torch.int64)
    return results.view(*counts[0].shape, *results.shape[1:])


def raise_taken(policy: Policy, observation: Observation, taken: Tensor) -> Tensor:
    """Return scores [B, Hkv, T], +inf for the best `taken` [B, Hkv] entries of the first stage, if there is one."""
    scores = score_entries(policy, observation)
    first = first_stage_scores(policy, observation)
    if first is None:
        return scores
    # Protected entries take part in the first stage, as they are in every budget.
    ranks = rank_entries(first, observation.valid, policy.sink_count, policy.recent_count)
    return scores.masked_fill(ranks < taken[:, :, None], float("inf"))


def score_entries(policy: Policy, observation: Observation) -> Tensor:
    """Return the policy's scores [B, Hkv, T], computed once per observation, however many budgets are tried.

    Raises:
        EnvironmentFault: see `check_form`. Whether they are finite is noted for `lengths_after` and `require_finite`.
    """

    def compute() -> Tensor:
        with name_package_on_error(policy, "score"):
            scores = policy.score(observation)
        return check_scores(policy, observation, "score", scores)

    return observation.shared(("scores", _identify(policy)), compute)


def first_stage_scores(policy: Policy, observation: Observation) -> Tensor | None:
    """Return the policy's first stage [B, Hkv, T], as `score_entries`; None where it has none."""

    def compute() -> Tensor | None:
        with name_package_on_error(policy, "first_stage"):
            scores = policy.first_stage(observation)
        return None if scores is None else check_scores(policy, observation, "first_stage", scores)

    return observation.shared(("first stage", _identify(policy)), compute)


def rank_scored(policy: Policy, observation: Observation) -> Tensor:
    """Return the rank of every entry by the policy's score alone, [B, Hkv, T] int32, computed once per observation."""

    def rank() -> Tensor:
        return rank_entries(
            score_entries(policy, observation), observation.valid, policy.sink_count, policy.recent_count
        )

    return observation.shared(("ranks", _identify(policy)), rank)


def _identify(policy: Policy) -> Hashable:
    """Return a key that equal policies share: the policy, or its id where parameters cannot be hashed."""
    try:
        hash(policy)
    except TypeError:
        return id(policy)
    return policy


def find_limits(policy: Policy, budgets: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the entries that heads may keep at `budgets` [B, Hkv], and the first stage's part, [2, B, Hkv] int64.

    `lengths` are the real lengths of the sequences, and what exempt heads may keep. The result is on the CPU.
    """

    def limit(budget: int, length: int) -> int:
        return length if policy.keeps_all(budget, length) else budget

    limits = apply_to_each(limit, budgets, torch.tensor(lengths)[:, None].expand(budgets.shape))
    return torch.stack([limits, torch.minimum(apply_to_each(policy.first_stage_budget, limits), limits)])


def keep_at(policy: Policy, observation: Observation, limits: Tensor) -> Tensor:
    """Mark what a policy keeps, [B, Hkv, T] bool, at `limits` [2, B, Hkv] int64 on its device, see `find_limits`."""
    if first_stage_scores(policy, observation) is None:
        ranks = rank_scored(policy, observation)
    else:
        # With two stages the order depends on the budget, so it is made for these budgets alone.
        scores = raise_taken(policy, observation, limits[1])
        ranks = rank_entries(scores, observation.valid, policy.sink_count, policy.recent_count)
    return keep_mask(ranks, limits[0], observation.valid)


def rank_under(policy: Policy, observation: Observation) -> Tensor:
    """Return the rank of every entry under a policy, [B, Hkv, T] int32; see `rank_entries`.

    At every budget, the entries ranked below it are what `keep_at` keeps.
    """
    valid = observation.valid
    sinks = policy.sink_count
    window = policy.recent_count
    ranks = rank_scored(policy, observation)
    first = first_stage_scores(policy, observation)
    if first is None:
        return ranks
    # What the first stage takes of every budget that a prompt of this length can have.
    quota = [policy.first_stage_budget(budget) for budget in range(valid.shape[-1] + 1)]
    return merge_ranks(rank_entries(first, valid, sinks, window), ranks, quota)


def merge_ranks(first: Tensor, second: Tensor, quota: Sequence[int]) -> Tensor:
    """Return the rank of entries as growing budgets take them: `quota[b]` by their `first` rank, the rest by `second`.

    All ranks are permutations [..., T] int32. An entry is taken at the first budget at which it is among the quota, or
    at which the second ranks have come to it: how far they have is the rank, by `second`, of the (b - quota)-th of the
    entries that are not among the quota. That is found bit by bit for all budgets at once (a wavelet matrix).
    """
    length = first.shape[-1]
    counts = [0]
    for budget in range(1, length + 1):  # at most one entry more at a time: what is kept stays
        counts.append(min(max(counts[-1], min(quota[budget], budget)), counts[-1] + 1))
    among = torch.tensor(counts, device=first.device)  # [T + 1]
    # The smallest budget at which the entry is among the quota; its rank is one less.
    by_quota = torch.searchsorted(among, first.long(), right=True)
    values = second.long().gather(-1, invert_permutation(first.long()))  # by `first`
    low = among.expand(*first.shape[:-1], -1)
    high = torch.full_like(low, length)
    wanted = torch.arange(length + 1, device=first.device) - among - 1  # of those from `low` on, counted from 0
    left = wanted.clamp(min=0).expand_as(low)
    reached = torch.zeros_like(low)
    for bit in reversed(range(length.bit_length())):
        # One level of the wavelet matrix: numbers with this bit 0 move to the front, in their order; so each query
        # stays an interval, of which it goes into one half.
        is_one = values >> bit & 1
        zeros = torch.nn.functional.pad((1 - is_one).cumsum(-1), (1, 0))
        count = zeros[..., -1:]
        zeros_low = zeros.gather(-1, low)
        zeros_high = zeros.gather(-1, high)
        goes_up = left >= zeros_high - zeros_low
        left = torch.where(goes_up, left - (zeros_high - zeros_low), left)
        low = torch.where(goes_up, count + low - zeros_low, zeros_low)
        high = torch.where(goes_up, count + high - zeros_high, zeros_high)
        reached = reached | goes_up.long() << bit
        index = torch.arange(length, device=first.device)
        before = zeros[..., :-1]
        values = torch.empty_like(values).scatter_(-1, torch.where(is_one > 0, count + index - before, before), values)
    # Budgets that the first stage takes whole ask nothing of the second ranks; how far these have come never falls.
    reached = torch.where(wanted < 0, -1, reached).cummax(-1).values
    # The smallest budget at which the second ranks have come to the entry.
    by_second = torch.searchsorted(reached.contiguous(), second.long().contiguous())
    return (torch.minimum(by_quota, by_second) - 1).int()


def keep_mask(ranks: Tensor, budgets: Tensor, valid: Tensor) -> Tensor:
    """Mark what is kept at `budgets` ([Hkv] or [B, Hkv]), [B, Hkv, T] bool: exactly min(length, budget) a head.

    Examples:
        >>> ranks = torch.tensor([[[3, 1, 2, 0]]])
        >>> keep_mask(ranks, torch.tensor([2]), torch.ones(1, 4, dtype=torch.bool))[0, 0].tolist()
        [False, True, False, True]
    """
    return (ranks < budgets.to(ranks.device).view(-1, ranks.shape[1], 1)) & valid[:, None]
