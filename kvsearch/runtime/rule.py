"""The decode rule of one layer: which entries leave after each step once a kv head holds more than its budget.

The storage calls `begin` once per step and `decide` for each of its blocks; a teacher-forced replay does the same with
all tokens side by side. What a policy remembers lives in the state of the segments, never on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Bools, Ints
from kvsearch.errors import InternalError, UsageError
from kvsearch.policies import Observation, Policy
from kvsearch.policies.base import Needs, QueryStatistics
from kvsearch.policies.checks import Look, check_form, check_state
from kvsearch.policies.decoding import (
    State,
    Step,
    best,
    entries_at,
    lowest,
    protected_slots,
    slots_of,
)
from kvsearch.policies.ranking import at_each, scores_at
from kvsearch.runtime.collector import Moments, Rotary, plain_queries
from kvsearch.runtime.logits import Logits

STATISTICS_ROWS = 256  # query rows behind the statistics of a policy that is scored anew while decoding
UNBOUNDED = 2**62  # the budget of a head that is never evicted
PRIORITY = "priority"  # state of the rule itself: the last scores


def decode_needs(policy: Policy) -> Needs:
    """Return what the decode rule of `policy` must be given of the prompt.

    Raises:
        UsageError: the policy needs something that cannot be kept up while decoding.
    """
    needs = policy.needs()
    if policy.online:
        return needs
    if (problem := policy.no_decode_rule()) is not None:
        raise UsageError(problem)
    rows = max(needs.query_rows, STATISTICS_ROWS if needs.query_statistics_from is not None else 0)
    return Needs(query_rows=rows, projection=needs.projection)


@dataclass(frozen=True)
class Limits:
    """What some segments may hold, on the host and on the device, [S] each."""

    host: Ints  # budgets
    stay: Ints  # entries left after an eviction
    budgets: Tensor
    sinks: Tensor
    recent: Tensor

    def select(self, rows: Ints) -> Limits:
        """Return the limits of some of the segments."""
        index = torch.from_numpy(rows).to(self.budgets.device)
        return Limits(self.host[rows], self.stay[rows], self.budgets[index], self.sinks[index], self.recent[index])


class StepRule:
    """The rule of `policy` at `budgets` [B * Hkv] (UNBOUNDED where exempt), from the end of the prompt on.

    `queries` are the last query rows [B, Hq, w, D], where the policy looks at them; `next_position` [B] are the rotary
    positions of the tokens that come next; `scored` [B] counts steps since the last scoring (default: never, -1).
    """

    def __init__(
        self,
        policy: Policy,
        budgets: Ints,
        rotary: Rotary,
        layer: int,
        heads: int,
        queries: Tensor | None,
        next_position: Tensor,
        scored: Ints | None = None,
    ) -> None:
        if budgets.min() < 1:
            raise UsageError(f"policy {policy.name}: while decoding every head keeps at least 1 entry, not 0")
        self.policy, self.budgets, self.rotary = policy, budgets, rotary
        self.layer, self.heads = layer, heads
        self.needs = decode_needs(policy)
        self.queries, self.next_position = queries, next_position
        self.hidden: Tensor | None = None  # what the policy makes of the hidden states of a step's tokens, [B, Hkv]
        self.interval = self._intervals()
        # per sequence, so that none depends on its neighbours: steps since the last scoring (-1: never), and who is due
        self.scored = np.full(len(self.interval), -1) if scored is None else scored
        self.due = np.zeros(len(self.interval), dtype=bool)
        self.decisions = 0  # steps that asked the policy; what it says in the first is noted for `require_finite`
        self.looks: list[Look] = []

    @classmethod
    def after(cls, policy: Policy, budgets: Tensor, observation: Observation, rotary: Rotary) -> StepRule:
        """Make the rule that holds after a prompt, at `budgets` [B, Hkv] int64."""
        queries, wanted = None, decode_needs(policy).query_rows
        if not policy.online and observation.queries is not None:
            given = observation.queries[:, :, -wanted:] if wanted else observation.queries[:, :, :0]
            # zeros in front of a shorter prompt
            queries = torch.nn.functional.pad(given, (0, 0, wanted - given.shape[2], 0)).clone()
        following = observation.next_position
        position = observation.seen if following is None else following
        flat: Ints = budgets.flatten().cpu().numpy().astype(np.int64)
        return cls(policy, flat, rotary, observation.layer, observation.keys.shape[1], queries, position)

    def bound(self, budgets: Ints) -> None:
        """Set the budgets [B, Hkv] that were not known when the prompt passed."""
        self.budgets = budgets.flatten()
        self.interval = self._intervals()

    def start(self, observation: Observation) -> State:
        """Make the running state per entry and head at the end of the prompt, [B, Hkv, T, ...] and [B, Hkv, ...]."""
        if self.policy.online:
            return check_state(self.policy, self.policy.start(observation), observation)
        shape = observation.keys.shape[:3]
        return State({PRIORITY: torch.full(shape, float("inf"), device=observation.keys.device)})

    # --- one step -------------------------------------------------------------------------------------------------

    def begin(
        self,
        query: Tensor,
        positions: Tensor,
        over: Bools,
        real: Bools | None = None,
        active: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        """Take note of a step's queries [B, Hq, 1, D] at rotary `positions` [B, 1].

        `hidden` [B, Hkv] is what the policy makes of the tokens' hidden states (`Needs.hidden`), where it wants them.
        `over` [B] says which sequences have a head over its budget. Those not `real`, or `active` on the device, [B]
        bool each (None: all are), had padding in this step.
        """
        self.hidden = hidden
        following = positions[:, -1].expand_as(self.next_position) + 1
        if self.queries is not None and self.queries.shape[2]:
            rows = torch.cat([self.queries[:, :, 1:], query.to(self.queries.dtype)], 2)
            self.queries = rows if active is None else torch.where(active[:, None, None, None], rows, self.queries)
        self.next_position = following if active is None else torch.where(active, following, self.next_position)
        if self.policy.online:
            self.decisions += 1
            return
        arrived = np.ones_like(over) if real is None else real
        self.scored = self.scored + (arrived & (self.scored >= 0))
        self.due = over & arrived & ((self.scored < 0) | (self.scored >= self.interval))
        self.scored = np.where(self.due, 0, self.scored)
        self.decisions += bool(self.due.any())

    def limits(self, names: Ints, device: torch.device) -> Limits:
        """Return the budgets and protection of the segments `names`."""
        host = self.budgets[names]
        budgets = torch.from_numpy(host)
        sinks, recent = at_each(self.policy.protected_at, budgets).unbind(-1)
        stay = np.maximum(host + 1 - at_each(self.policy.drop_at, budgets).numpy(), 1)
        return Limits(host, stay, budgets.to(device), sinks.to(device), recent.to(device))

    def decide(
        self,
        step: Step,
        rows: Tensor,
        limits: Limits,
        used: Ints,
        real: Bools | None,
        active: Tensor | None,
        logits: Logits,
    ) -> tuple[Tensor | None, Ints]:
        """Choose the slots that leave after this step; return them with what each segment holds then.

        `rows` [S] are the segments' sequences, `used` what they hold now. The step brought a token where `real`, or
        `active` on the device, says so, [S] bool each (None: everywhere).
        The slots are [S, E] int64 in ascending order of position, -1 for none; None: nothing leaves. Updates the
        running state, and merges what leaves where the policy does.
        """
        priorities = self._priorities(step, rows, limits, logits)
        over = used > limits.host if real is None else (used > limits.host) & real
        if not over.any():
            return None, used
        positions = step.cached.positions
        protected = protected_slots(positions, step.seen, limits.sinks, limits.recent)
        stay = np.where(over, limits.stay, used)
        if (used - stay).max() == 1:
            leaving = lowest(priorities, step.cached.held & ~protected, positions)[:, None]
            if not over.all():  # the same on the device, which is not waited for
                stays = step.cached.held.sum(-1) <= limits.budgets
                leaving = leaving.masked_fill((stays if active is None else stays | ~active)[:, None], -1)
        else:
            keep = best(priorities, protected, positions, torch.from_numpy(stay).to(positions.device))
            leaving = slots_of(step.cached.held & ~keep, positions)
        if self.policy.merges:
            self.policy.merge(step.cached, leaving)
        return leaving, stay

    # --- priorities -----------------------------------------------------------------------------------------------

    def _priorities(self, step: Step, rows: Tensor, limits: Limits, logits: Logits) -> Tensor:
        if self.policy.online:
            found = self.policy.step(replace(step, look=partial(self._arrived, step, rows, logits)))
            given = check_form(self.policy, "step", found, step.cached.positions.shape, step.cached.positions)
            if self.decisions == 1:
                wrong = (given.isnan() & step.cached.held).any()
                self.looks.append(Look(self.policy, self.layer, wrong))
            return given
        priority = step.cached.state.entries[PRIORITY]
        priority.scatter_(1, step.newest[:, None], float("inf"))  # protected until it is scored
        if self.due.all():
            priority.copy_(self._score(step, rows, limits, logits))
        elif self.due.any():
            due = torch.from_numpy(self.due).to(rows.device)[rows]
            priority.copy_(torch.where(due[:, None], self._score(step, rows, limits, logits), priority))
        return priority

    def _score(self, step: Step, rows: Tensor, limits: Limits, logits: Logits) -> Tensor:
        """Compute the policy's own scores over what is held, per slot [S, C]; +inf for what is protected."""
        cached = step.cached
        order = torch.argsort(cached.positions, dim=-1, stable=True)
        observation = self._seen(step, rows, order, logits)
        scores = scores_at(self.policy, observation, limits.budgets[:, None])[:, 0]
        self.looks += observation.looks or ()
        protected = protected_slots(observation.index, step.seen, limits.sinks, limits.recent)
        scores = scores.masked_fill(protected, float("inf"))
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def _arrived(self, step: Step, rows: Tensor, logits: Logits) -> Observation:
        """Return the step's own token as policies see it, an entry for each segment."""
        seen = self._seen(step, rows, step.newest[:, None], logits)
        what = self.needs.hidden
        if what is None or self.hidden is None:
            return seen
        return replace(seen, hidden={what: self.hidden[rows, step.cached.heads][:, None, None]})

    def _seen(self, step: Step, rows: Tensor, order: Tensor, logits: Logits) -> Observation:
        """Return the entries in the slots `order` [S, N] as policies see them, a row for each segment."""
        cached, queries = step.cached, None
        index = cached.positions.gather(-1, order)
        if self.queries is not None and self.queries.shape[2]:
            batch, _, count, dim = self.queries.shape
            queries = self.queries.view(batch, self.heads, -1, count, dim)[rows, cached.heads]  # [S, G, w, D]
        sinks = logits.sinks_of(cached.heads)
        return Observation(
            keys=entries_at(cached.keys, order)[:, None],
            values=entries_at(cached.values, order)[:, None],
            valid=index >= 0,
            scaling=logits.scaling,
            queries=queries,
            softcap=logits.softcap,
            statistics=self._statistics(rows, cached.heads, step.seen),
            rotary=self.rotary,
            next_position=self.next_position[rows],
            projection=None if logits.projection is None else logits.projection.of_heads(cached.heads),
            token_index=index,
            token_count=step.seen,
            layer=self.layer,
            sinks=None if sinks is None else sinks[:, None],
            heads=cached.heads,
            looks=[] if self.decisions == 1 else None,
        )

    def _statistics(self, row: Tensor, head: Tensor, seen: Tensor) -> dict[int, QueryStatistics]:
        """Compute statistics of the query rows for segments: sequences, kv heads and tokens so far, [S] each."""
        start = self.policy.needs().query_statistics_from
        if start is None or self.policy.online:
            return {}
        if self.queries is None:
            raise InternalError("query statistics without the rows behind them")
        batch, query_heads, rows, dim = self.queries.shape
        back = torch.arange(rows, device=row.device) - rows
        plain = plain_queries(self.queries, (self.next_position[:, None] + back).clamp(min=0), self.rotary)
        tokens = torch.zeros_like(self.next_position).index_put_((row,), seen.to(self.next_position.dtype))
        found = Moments.of(plain, tokens[:, None] + back >= start).statistics()
        shape = (batch, self.heads, query_heads // self.heads)
        mean, covariance = found.mean.view(*shape, dim), found.covariance.view(*shape, dim, dim)
        return {start: QueryStatistics(mean[row, head], covariance[row, head])}

    def _intervals(self) -> Ints:
        """Return steps between two scorings, [B]: half of what one leaves open in the tightest head, at most."""

        def supply(budget: int) -> int:
            fixed = max(sum(self.policy.protected_at(budget)), min(self.policy.quota(budget), budget))
            return max(1, (budget + 1 - fixed) // 2)

        tightest = at_each(supply, torch.from_numpy(self.budgets)).numpy().reshape(-1, self.heads).min(-1)
        interval: Ints = np.minimum(tightest, self.policy.refresh_interval)
        return interval

    # --- rows of the batch ----------------------------------------------------------------------------------------

    def select_rows(self, rows: Sequence[int]) -> StepRule:
        """Return the rule for sequences `rows` of the batch, in that order; it goes its own way from here."""
        chosen = list(rows)
        index = torch.tensor(chosen, device=self.next_position.device)
        made = copy(self)
        made.budgets = self.budgets.reshape(-1, self.heads)[chosen].flatten()
        made.interval, made.scored, made.due = self.interval[chosen], self.scored[chosen], self.due[chosen]
        made.queries = None if self.queries is None else self.queries[index]
        made.next_position = self.next_position[index]
        return made

    def nbytes(self) -> int:
        """Return the bytes of query rows held."""
        return 0 if self.queries is None else self.queries.untyped_storage().nbytes()
