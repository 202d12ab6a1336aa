"""The decode rule of one layer: which entries leave after each step once a kv head holds more than its budget.

The storage calls `begin` once per step and `decide` for each of its blocks; a teacher-forced replay does the same with
all tokens side by side. What a policy remembers lives in the state of the segments, never on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Bools, Ints
from kvsearch.core.errors import InternalError, UsageError
from kvsearch.policies import Observation, Policy
from kvsearch.policies.base import Needs, QueryStatistics, Running
from kvsearch.policies.checks import DeferredCheck, check_form, make_finite_check, name_package_on_error, start_state
from kvsearch.policies.decoding import State, Step, find_lowest, gather_entries, list_slots, mark_best, mark_protected
from kvsearch.policies.fitted import Fitted
from kvsearch.policies.ranking import apply_to_each, raise_taken
from kvsearch.policies.registry import is_ours
from kvsearch.runtime.collector import Moments, Rotary, unrotate_queries
from kvsearch.runtime.logits import HeadRows, Logits, list_head_rows

STATISTICS_ROWS = 256  # query rows behind the statistics of a policy that is scored anew while decoding
UNBOUNDED = 2**62  # the budget of a head that is never evicted
PRIORITY = "priority"  # state of the rule itself: the last scores


def decode_needs(policy: Policy) -> Needs:
    """Return what the decode rule of `policy` needs of the prompt.

    Raises:
        UsageError: the policy needs something that cannot be kept up while decoding.
    """
    needs = policy.needs()
    if policy.has_decode_rule:
        return needs
    if (problem := policy.no_decode_rule()) is not None:
        raise UsageError(problem)
    # Moments of all queries would have to be updated for every entry; those of the last rows, which a ring of fixed
    # size holds, stand in for them.
    rows = max(needs.query_rows, STATISTICS_ROWS if needs.query_statistics_from is not None else 0)
    return Needs(query_rows=rows, projection=needs.projection)


def is_same_in_layers(policy: Policy) -> bool:
    """Tell whether the decode rule of `policy` depends on nothing of a layer but its queries, keys and values.

    Of a policy of another package nothing is known.
    """
    needs = policy.needs()
    # Each of these belongs to one layer: its output projection, its rotary tables, its hidden states.
    own = needs.projection or needs.unrotated or needs.hidden is not None or needs.query_statistics_from is not None
    return is_ours(type(policy)) and not isinstance(policy, Fitted) and not own


class Evictions(NamedTuple):
    """How many entries leave some segments after a step: known on the host before the step runs."""

    stay: Ints  # [S] entries that each segment holds then
    max_leaving: int  # entries that leave one of them at most
    each_one: bool  # every segment loses one, whose slot is free for the next token
    longest: int  # the most that stay in one of them, where several leave it; else 0


@dataclass(frozen=True)
class Limits:
    """Budgets and protection of some segments, [S] each, on the host and on the device."""

    host: Ints  # budgets
    stay: Ints  # entries left after an eviction
    guarded: bool  # whether entries are protected
    heads: HeadRows
    budgets: Tensor
    sinks: Tensor
    recent: Tensor
    stays: Tensor  # `stay`
    quotas: Tensor  # entries that the first stage of the policy takes
    young: Tensor  # `recent`, and one

    @staticmethod
    def table(policy: Policy, host: Ints) -> Tensor:
        """Make the device part of the limits of segments with budgets `host`, [6, S] int64, still on the CPU."""
        budgets = torch.from_numpy(host)
        sinks, recent = apply_to_each(policy.protected_at, budgets).unbind(-1)
        # A head that decodes is over its budget by one entry when it evicts, and a longer prompt is cut to the same
        # number in the first step. One entry stays in any case: attention over nothing is NaN.
        stays = (budgets + 1 - apply_to_each(policy.drop_at, budgets)).clamp(min=1)
        quotas = torch.minimum(apply_to_each(policy.first_stage_budget, budgets), budgets)
        # One table, so that the device gets all six rows in a single copy.
        return torch.stack([budgets, sinks, recent, stays, quotas, recent + 1])

    def select(self, rows: Ints, index: Tensor, heads: HeadRows) -> Limits:
        """Select segments: by `rows` what is on the host, by `index` what is on the device; `heads` are theirs."""
        on_device = (self.budgets, self.sinks, self.recent, self.stays, self.quotas, self.young)
        return Limits(self.host[rows], self.stay[rows], self.guarded, heads, *(tensor[index] for tensor in on_device))

    def leaving(self, used: Ints, real: Bools | None) -> Evictions:
        """Compute how many leave segments that hold `used` entries; none where not `real` [S] (None: all are)."""
        # A segment whose token is padding has got nothing, so nothing leaves it either.
        over = used > self.host if real is None else (used > self.host) & real
        stay = np.where(over, self.stay, used)
        gone = used - stay
        widest = int(gone.max())
        return Evictions(stay, widest, widest == 1 and bool((gone == 1).all()), int(stay.max()) if widest > 1 else 0)

    def outside(self, step: Step, edge: Tensor | None) -> Tensor | None:
        """Mark the slots [S, C] without an entry and those protected; None: there are none.

        Right for segments that hold more than they may; others may have nothing that is not protected. `edge` [S] are
        the newest positions that may leave, where they are known already.
        """
        if not self.guarded:
            return None if step.full else step.empty
        positions = step.cached.positions
        edge = step.seen - self.young if edge is None else edge
        # An empty slot (-1), a sink and a recent token all lie outside of [sinks, edge]: one look finds the three.
        return positions.clamp(self.sinks[:, None], edge[:, None]) != positions


class StepRule:
    """The decode rule of one layer: evicts by `policy` at `budgets` [B * Hkv] (UNBOUNDED where exempt).

    `queries` are the last query rows [B, Hq, w, D], where the policy looks at them; `next_position` [B] are the rotary
    positions of the tokens that come next; `scored` [B] counts steps since the last scoring (default: never, -1).
    """

    def __init__(
        self,
        policy: Policy,
        budgets: Ints,
        rotary: Rotary | None,
        layer: int,
        heads: int,
        queries: Tensor | None,
        next_position: Tensor,
        scored: Ints | None = None,
    ) -> None:
        if budgets.min() < 1:
            raise UsageError(f"policy {policy.name}: while decoding every head keeps at least 1 entry, not 0")
        self.policy = policy
        self.rotary = rotary
        self.layer = layer
        self.heads = heads
        self.needs = decode_needs(policy)
        # A copy: steps write to it in place, and captured steps read it where it is.
        self.next_position = next_position.clone()
        self.ring = None if queries is None or not queries.shape[2] else Ring(queries)
        # `running` holds of the `step` beside it: a subclass that overrides `step` alone has no kernel
        rules = [vars(kind) for kind in type(policy).__mro__ if "step" in vars(kind) or "running" in vars(kind)]
        self._running = None if policy.merges or "running" not in rules[0] else policy.running
        self.hidden: Tensor | None = None  # what the policy makes of the hidden states of a step's tokens, [B, Hkv]
        self.bound(budgets)
        # steps since the last scoring (-1: never), per sequence, so that none depends on its neighbours
        self.scored = np.full(len(self.interval), -1) if scored is None else scored
        self.due = ""  # whether "all" sequences are scored anew in this step, "some" of them, or none
        self.due_rows = torch.zeros(len(self.interval), dtype=torch.bool, device=next_position.device)
        self.decisions = 0  # steps that asked the policy; what it says in the first is noted for `require_finite`
        self.noting = False  # whether this is that step
        self.checks: list[DeferredCheck] = []

    @property
    def queries(self) -> Tensor | None:
        """The last query rows [B, Hq, w, D], where the policy looks at them."""
        return None if self.ring is None else self.ring.rows()

    @classmethod
    def after(cls, policy: Policy, budgets: Tensor, observation: Observation) -> StepRule:
        """Make the rule that holds after a prompt, at `budgets` [B, Hkv] int64."""
        queries = None
        wanted = decode_needs(policy).query_rows
        if not policy.has_decode_rule and observation.queries is not None:
            # A slice [-0:] would take all rows.
            rows = observation.queries[:, :, -wanted:] if wanted else observation.queries[:, :, :0]
            # zeros in front of a shorter prompt
            queries = torch.nn.functional.pad(rows, (0, 0, wanted - rows.shape[2], 0)).clone()
        flat: Ints = budgets.flatten().cpu().numpy().astype(np.int64)
        heads = observation.keys.shape[1]
        return cls(policy, flat, observation.rotary, observation.layer, heads, queries, observation.following)

    def bound(self, budgets: Ints) -> None:
        """Set the budgets, [B * Hkv] or [B, Hkv]: at the start, or once all layers have seen the prompt."""
        self.budgets: Ints = budgets.flatten()
        self.there: Tensor | None = None  # `Limits.table` of all segments, where it is on the device already
        self.interval = self._intervals()
        self.together = self._together()

    def start(self, observation: Observation) -> State:
        """Make the running state at the end of the prompt: [B, Hkv, T, ...] per entry, [B, Hkv, ...] per head."""
        if self.policy.has_decode_rule:
            return start_state(self.policy, observation)
        shape = observation.keys.shape[:3]
        return State({PRIORITY: torch.full(shape, float("inf"), device=observation.keys.device)})

    # --- one step -------------------------------------------------------------------------------------------------

    def prepare_step(self, over: Bools, real: Bools | None = None) -> None:
        """Decide on the host, before a step, whether it scores entries anew.

        `over` [B] says which sequences have a head over its budget; those not `real` [B] (None: all are) had padding.
        """
        arrived = np.ones_like(over) if real is None else real
        if self.policy.has_decode_rule:
            self.scored = self.scored.clip(min=0) + arrived  # the prompt's entries have their scores
            # All sequences are scored in the same step, as soon as one of them has waited as long as it may.
            is_rescoring = bool((arrived & (self.scored >= self.together)).any())
            self.due = "all" if is_rescoring and self.together > 1 else ""
            self.scored = np.where(arrived & is_rescoring, 0, self.scored)
            self._count(is_rescoring)
            return
        self.scored = self.scored + (arrived & (self.scored >= 0))
        # A sequence within its budgets evicts nothing, so its scores can wait.
        due = over & arrived & ((self.scored < 0) | (self.scored >= self.interval))
        self.scored = np.where(due, 0, self.scored)
        self._count(bool(due.any()))
        self.due = "all" if due.all() else "some" if due.any() else ""
        # In place: captured steps read this tensor where it is.
        if self.due == "some":
            self.due_rows.copy_(torch.from_numpy(due))

    def begin(
        self, query: Tensor, positions: Tensor, active: Tensor | None = None, hidden: Tensor | None = None
    ) -> None:
        """Store a step's queries [B, Hq, 1, D] at rotary `positions` [B, 1].

        `hidden` [B, Hkv] is what the policy makes of the tokens' hidden states (`Needs.hidden`), where it wants them.
        Those not `active` [B] bool (None: all are) had padding in this step.
        """
        self.hidden = hidden
        if self.policy.has_decode_rule:
            return  # what is asked for of its own token does not depend on what came before
        last = positions[:, -1].expand_as(self.next_position)
        if active is None:
            # In place, for captured steps; a sequence with padding stays where it was.
            torch.add(last, 1, out=self.next_position)
        else:
            self.next_position.copy_(torch.where(active, last + 1, self.next_position))
        if self.ring is not None:
            self.ring.add(query, active)

    def _count(self, is_rescoring: bool) -> None:
        self.noting = is_rescoring and self.decisions == 0
        self.decisions += is_rescoring

    def limits(self, names: Ints, device: torch.device) -> Limits:
        """Return the budgets and protection of the segments `names`; one copy to the device, unless they are there."""
        heads = list_head_rows(names % self.heads, self.heads, device)
        host = self.budgets[names]
        table = Limits.table(self.policy, host)
        # What was placed at the end of the prompt is of all segments in order; a block of some of them makes a table of
        # its own.
        there = self.there if len(names) == len(self.budgets) else None
        guarded = bool((table[1] + table[2]).any())
        return Limits(host, table[3].numpy(), guarded, heads, *(table.to(device) if there is None else there).unbind())

    def decide(
        self,
        step: Step,
        rows: Tensor,
        limits: Limits,
        plan: Evictions,
        active: Tensor | None,
        logits: Logits,
        out: Tensor | None = None,
        edge: Tensor | None = None,
    ) -> Tensor | None:
        """Choose the slots that leave after this step, as many as `plan` says.

        `rows` [S] are the sequences of the segments. The step brought a token where `active` [S] bool says
        so (None: everywhere). The slots are [S, E] int64 in ascending order of position, -1 for none; None: nothing
        leaves. Updates the running state, and merges what leaves where the policy does. Where one entry leaves every
        segment its slot is written to `out` [S], if given. For `edge` see `Limits.outside`.
        """
        if self.policy.has_decode_rule:
            step = self._asked(step, rows, limits.heads, logits)
        # Also where nothing leaves: the running state has to see every step.
        priorities = self._priorities(step, rows, limits, logits)
        if not plan.max_leaving:
            return None
        cached = step.cached
        positions = cached.positions
        # The usual case: one entry at most leaves each segment, and a single argmax finds it.
        if plan.max_leaving == 1:
            outside = limits.outside(step, edge)
            signed = self.policy.signed
            slots = find_lowest(priorities, positions, outside, signed, out if plan.each_one else None)
            leaving = slots[:, None]
            if not plan.each_one:  # the same on the device, which is not waited for
                stays = cached.held.sum(-1) <= limits.budgets
                leaving = leaving.masked_fill((stays if active is None else stays | ~active)[:, None], -1)
        else:
            # Several leave at once: under a policy that drops many, or after a prompt that no prefill phase has cut.
            # How many stay at most is known on the host, so tensors have sizes that no value decides.
            protected = mark_protected(positions, step.seen, limits.sinks, limits.recent)
            held = cached.held.sum(-1)
            over = held > limits.budgets if active is None else (held > limits.budgets) & active
            stay = torch.where(over, limits.stays, held)
            keep = mark_best(priorities, protected, positions, stay, plan.longest)
            leaving = list_slots(cached.held & ~keep, positions, plan.max_leaving)
            cached = replace(cached, most_staying=plan.longest)
        if self.policy.merges:
            self.policy.merge(cached, leaving)
        return leaving

    @property
    def running(self) -> Running | None:
        """The kernel rule that can do the work of `decide` in the prepared step; see `Policy.running`."""
        # Kernels neither note scores that are not finite nor score entries anew.
        if self.noting or self.due:
            return None
        # Between two scorings a policy without a rule of its own ranks by what is stored, +inf for what has come since.
        return self._running if self.policy.has_decode_rule else "stored"

    @property
    def ranks_by_row(self) -> bool:
        """Whether an entry's priority is what the attention row of the step says, and nothing else."""
        return self._running == "row"

    def arriving(self, step: Step, rows: Tensor, heads: HeadRows, logits: Logits) -> Tensor | None:
        """Return the priority of the step's own token, [S] fp32; None if it is scored later, or not on arrival."""
        if self._running != "stored" or not self.policy.has_decode_rule or self.together > 1:
            return None
        return self.policy.arriving(self._asked(step, rows, heads, logits))[:, 0]

    # --- priorities -----------------------------------------------------------------------------------------------

    def _priorities(self, step: Step, rows: Tensor, limits: Limits, logits: Logits) -> Tensor:
        if self.policy.has_decode_rule:
            with name_package_on_error(self.policy, "step"):
                scores = self.policy.step(step)
            checked = check_form(self.policy, "step", scores, step.cached.positions.shape, step.cached.positions)
            if self.noting:
                # Infinity is no fault here: policies give it to what must not leave.
                wrong = checked.isnan() & step.cached.held
                self.checks.append(make_finite_check(self.policy, self.layer, wrong).in_segments(rows))
            return checked
        priority = step.cached.state.entries[PRIORITY]
        priority.scatter_(1, step.newest[:, None], float("inf"))  # until it is scored nothing can make it leave
        # Where only some sequences are due all are scored, and the others' scores are thrown away: the device has no
        # branch.
        if self.due == "all":
            priority.copy_(self._score(step, rows, limits, logits))
        elif self.due == "some":
            due = self.due_rows[rows]
            priority.copy_(torch.where(due[:, None], self._score(step, rows, limits, logits), priority))
        return priority

    def _score(self, step: Step, rows: Tensor, limits: Limits, logits: Logits) -> Tensor:
        """Compute the policy's own scores over what is held, per slot [S, C]; +inf for what is protected."""
        cached = step.cached
        # Slots are in no order, and policies take columns by position with padding in front: empty slots have position
        # -1, so they come first.
        order = torch.argsort(cached.positions, dim=-1, stable=True)
        observation = self._seen(step, rows, limits.heads, order, logits)
        scores = raise_taken(self.policy, observation, limits.quotas[:, None])[:, 0]
        self.checks += [check.in_segments(rows) for check in observation.checks or ()]
        protected = mark_protected(observation.index, step.seen, limits.sinks, limits.recent)
        scores = scores.masked_fill(protected, float("inf"))
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def _asked(self, step: Step, rows: Tensor, heads: HeadRows, logits: Logits) -> Step:
        """Return the step with the views of new tokens that policies with a decode rule look at."""
        slots = step.newest[:, None]
        waits = False
        if self.together > 1:
            waits = not self.due
            if self.due:  # all that came since the last time, and no fewer slots in one step than in another
                slots = step.cached.positions.topk(min(self.together, step.cached.positions.shape[1])).indices
        hidden = self.hidden
        if hidden is not None:
            everyone = len(rows) == hidden.numel()  # in order, as all blocks are
            hidden = hidden.reshape(-1) if everyone else hidden[rows, step.cached.heads]
        look = partial(self._arrived, step, rows, heads, slots, logits, hidden)
        return replace(step, look=look, arrivals=slots, waits=waits, hidden=hidden)

    def _arrived(
        self, step: Step, rows: Tensor, heads: HeadRows, slots: Tensor, logits: Logits, hidden: Tensor | None
    ) -> Observation:
        """Return the tokens in `slots` [S, K], the newest first, as an observation."""
        seen = self._seen(step, rows, heads, slots, logits)
        projection = self.needs.hidden
        if projection is not None and hidden is not None:
            seen = replace(seen, hidden={projection: hidden[:, None, None]})
        return seen if heads is not None else _group_by_sequence(seen, self.heads, logits)

    def _seen(self, step: Step, rows: Tensor, heads: HeadRows, order: Tensor, logits: Logits) -> Observation:
        """Return the entries in the slots `order` [S, N] as an observation, a row for each segment."""
        cached = step.cached
        queries = None
        held = self.queries
        index = cached.positions.gather(-1, order)
        if held is not None:
            batch, _, count, dim = held.shape
            queries = held.view(batch, self.heads, -1, count, dim)[rows, cached.heads]  # [S, G, w, D]
        sinks = logits.sinks_of(cached.heads)
        return Observation(
            keys=gather_entries(cached.keys, order)[:, None],
            values=gather_entries(cached.values, order)[:, None],
            valid=index >= 0,
            scaling=logits.scaling,
            queries=queries,
            softcap=logits.softcap,
            statistics=self._statistics(held, rows, cached.heads, step.seen),
            rotary=self.rotary,
            next_position=None if self.policy.has_decode_rule else self.next_position[rows],
            projection=None if logits.projection is None else logits.projection.of_heads(cached.heads, heads),
            token_index=index,
            token_count=step.seen,
            layer=self.layer,
            sinks=None if sinks is None else sinks[:, None],
            heads=cached.heads,
            checks=[] if self.noting else None,
        )

    def _statistics(
        self, queries: Tensor | None, row: Tensor, head: Tensor, seen: Tensor
    ) -> dict[int, QueryStatistics]:
        """Compute statistics of the query rows for segments: sequences, kv heads and tokens so far, [S] each."""
        start = self.policy.needs().query_statistics_from
        if start is None or self.policy.has_decode_rule:
            return {}
        if queries is None or self.rotary is None:
            raise InternalError("query statistics without the rows behind them, or what turned these")
        batch, query_heads, rows, dim = queries.shape
        # Row r of the ring is the query that came `rows - r` tokens before the next one; it is turned back by that
        # position.
        back = torch.arange(rows, device=row.device) - rows
        plain = unrotate_queries(queries, (self.next_position[:, None] + back).clamp(min=0), self.rotary)
        # All segments of a sequence have seen as many tokens, so it does not matter whose number is written last.
        tokens = torch.zeros_like(self.next_position).index_put_((row,), seen.to(self.next_position.dtype))
        # This leaves out the zeros in front of a sequence that is shorter than the ring, too: their index is negative.
        statistics = Moments.of(plain, tokens[:, None] + back >= start).statistics()
        shape = (batch, self.heads, query_heads // self.heads)
        mean = statistics.mean.view(*shape, dim)
        covariance = statistics.covariance.view(*shape, dim, dim)
        return {start: QueryStatistics(mean[row, head], covariance[row, head])}

    def _intervals(self) -> Ints:
        """Return the steps between two scorings, [B]: at most half of the entries that may leave the tightest head."""

        def supply(budget: int) -> int:
            # What arrives after a scoring has priority +inf until the next one. With longer intervals a head would run
            # out of entries that may leave.
            fixed = max(sum(self.policy.protected_at(budget)), min(self.policy.first_stage_budget(budget), budget))
            return max(1, (budget + 1 - fixed) // 2)

        # A sequence is scored as a whole, so its tightest head sets the interval.
        tightest = apply_to_each(supply, torch.from_numpy(self.budgets)).numpy().reshape(-1, self.heads).min(-1)
        interval: Ints = np.minimum(tightest, self.policy.refresh_interval)
        return interval

    def _together(self) -> int:
        """Return how many new tokens are scored at once: each is protected until then."""
        if self._running != "stored" or not self.policy.has_decode_rule or self.needs.hidden is not None:
            return 1
        # A token that is among the recent ones of every head cannot leave, so its score may wait that long.
        recent = apply_to_each(self.policy.protected_at, torch.from_numpy(np.unique(self.budgets)))[..., 1]
        return 1 + int(recent.min())

    # --- rows of the batch ----------------------------------------------------------------------------------------

    def select_rows(self, rows: Sequence[int]) -> StepRule:
        """Return an independent rule for sequences `rows` of the batch, in that order."""
        chosen = list(rows)
        index = torch.tensor(chosen, device=self.next_position.device)
        # Policy and flags are shared; what belongs to the rows of the batch, or is changed in place, is replaced.
        rule = copy(self)
        rule.budgets = self.budgets.reshape(-1, self.heads)[chosen].flatten()
        rule.there = None
        rule.interval = self.interval[chosen]
        rule.scored = self.scored[chosen]
        rule.due_rows = self.due_rows[index]
        rule.next_position = self.next_position[index]
        rule.ring = None if self.ring is None else self.ring.select(index)
        return rule

    @classmethod
    def joined(cls, rules: Sequence[StepRule]) -> StepRule:
        """Join rules of one policy, before their first step, into the rule of one batch.

        Rules of several layers are alike only where `is_same_in_layers`.
        """
        joint = copy(rules[0])
        joint.bound(np.concatenate([rule.budgets for rule in rules]))
        joint.scored = np.concatenate([rule.scored for rule in rules])
        joint.due_rows = torch.cat([rule.due_rows for rule in rules])
        joint.next_position = torch.cat([rule.next_position for rule in rules])
        rings = [rule.ring for rule in rules if rule.ring is not None]
        joint.ring = Ring(torch.cat([ring.rows() for ring in rings])) if rings else None
        joint.checks = []
        return joint

    def nbytes(self) -> int:
        """Return the bytes of query rows held."""
        return 0 if self.ring is None else self.ring.states.untyped_storage().nbytes()


def _group_by_sequence(seen: Observation, heads: int, logits: Logits) -> Observation:
    """Return tokens of all heads of sequences, a row for each head [B * Hkv, 1, K, ...], as [B, Hkv, K, ...]."""

    def whole(tensor: Tensor) -> Tensor:
        return tensor.view(-1, heads, *tensor.shape[2:])

    index = seen.token_index
    count = seen.token_count
    following = seen.next_position
    # All heads of a sequence get the same tokens, so every `heads`-th row speaks for it.
    return replace(
        seen,
        keys=whole(seen.keys),
        values=whole(seen.values),
        valid=seen.valid[::heads],
        projection=logits.projection,
        hidden={what: whole(states) for what, states in seen.hidden.items()},
        token_index=None if index is None else index[::heads],
        token_count=None if count is None else count[::heads],
        next_position=None if following is None else following[::heads],
        sinks=logits.sinks,
        heads=None,
    )


class Ring:
    """The last w query rows of a batch, written in place: `place` [B] is where the oldest is, and the next one goes."""

    def __init__(self, rows: Tensor) -> None:
        self.states = rows.clone()  # [B, Hq, w, D]
        self.place = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)

    def add(self, query: Tensor, active: Tensor | None) -> None:
        """Replace the oldest row by queries [B, Hq, 1, D]; not where not `active` [B] bool (None: all are)."""
        # `place` lies on the device, so that a captured step writes to another row every time
        where = self.place[:, None, None, None].expand_as(query)
        query = query.to(self.states.dtype)
        if active is not None:
            # A sequence with padding writes back what is there already.
            query = torch.where(active[:, None, None, None], query, self.states.gather(2, where))
        self.states.scatter_(2, where, query)
        self.place.add_(1 if active is None else active).remainder_(self.states.shape[2])

    def rows(self) -> Tensor:
        """Return the rows, the oldest first, [B, Hq, w, D]."""
        count = self.states.shape[2]
        order = (self.place[:, None] + torch.arange(count, device=self.place.device)) % count
        return self.states.gather(2, order[:, None, :, None].expand_as(self.states))

    def select(self, rows: Tensor) -> Ring:
        """Return the ring of the selected sequences, as a copy."""
        return Ring(self.rows()[rows])
