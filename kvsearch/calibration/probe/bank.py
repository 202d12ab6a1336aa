"""Calibrate a query bank: store a few queries of questions on contexts, and report how well they rank.

Queries of all tokens that are asked after the contexts to fit on are turned back to position 0. Of them a bank is
chosen for every kv head, in two ways: farthest points (each the farthest from those chosen before) and k-means (the
queries nearest to the centres). Which way ranks better is decided on contexts that no query is of, and which heads an
even spread moves less; how good the ranking is, is reported on others, as for a probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.options import BANK_CANDIDATES, TARGETS, QueryBankOptions
from kvsearch.calibration.probe.context_pass import ContextPass, EntryLook, Measure, Noting, Questions
from kvsearch.calibration.probe.contexts import FitCandidates, FitContexts, FittedRanking, RankingCalibration
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.core.arrays import Floats
from kvsearch.models.architecture import describe, require_plain_rotary
from kvsearch.models.work import Work
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.plan.saved import WEIGHTS, register_weights
from kvsearch.policies import Observation, Policy, create_policy, rank_under
from kvsearch.policies.query_bank import EVEN_ARRAY, QUERIES_ARRAY, QUERY_BANK_METHOD
from kvsearch.runtime.speed import time_action

KMEANS_ROUNDS = 10  # of k-means


class StoredQueries(NamedTuple):
    """Stored queries of every kv head, how they were chosen, and heads that are ranked evenly instead."""

    queries: Tensor  # [L, Hkv, G, N, D]
    how: str
    even: Tensor  # [L, Hkv] bool

    def policy(self, calibration: QueryBankCalibration, contexts: FitContexts) -> Policy:
        """Make the policy that ranks by these queries."""
        profile = contexts.make_profile(
            calibration, self.arrays, {"chosen_by": self.how}, self.even, torch.zeros_like(self.even)
        )
        return create_policy(
            QUERY_BANK_METHOD,
            {**profile.metadata.policy.params, WEIGHTS: register_weights(profile.to_bytes(), Path(QUERY_BANK_METHOD))},
        )

    @property
    def arrays(self) -> dict[str, Floats]:
        """Arrays for a profile."""
        return {QUERIES_ARRAY: self.queries.numpy(), EVEN_ARRAY: self.even.float().numpy()}


class QueryBankCalibration(RankingCalibration[QueryBankOptions]):
    """Calibration of a query bank; the profile has "queries" [L, Hkv, G, N, D] and "even" [L, Hkv], 1 for even heads.

    "recall" and "text_loss" mean the same as in the profile of a probe.
    """

    fits_importance: ClassVar[bool] = False

    def prepare(self) -> list[CalibrationPrompt]:
        require_plain_rotary(self.loaded.model, f"policy {QUERY_BANK_METHOD}")
        return super().prepare()

    def draw(self, contexts: FitContexts) -> Noting:
        share = -(-BANK_CANDIDATES // len(contexts.fit))
        return Noting(draw_queries=partial(draw_asked_places, count=share, seed=self.options.seed))

    def make_sampler(self) -> Measure:
        return sample_queries

    def fit(self, samples: Sequence[Arrays], contexts: FitContexts) -> FitCandidates:
        queries = torch.from_numpy(
            np.concatenate([arrays[QUERIES_ARRAY] for arrays in samples], 3)
        )  # [L, Hkv, G, M, D]
        none = torch.zeros(queries.shape[:2], dtype=torch.bool)
        apart = choose_farthest(queries, self.options.bank)
        self.tried = [
            StoredQueries(apart, "farthest", none),
            StoredQueries(choose_by_k_means(queries, apart), "k-means", none),
        ]
        return FitCandidates(len(self.tried), self._look(self.tried, contexts), None)

    def choose(self, gains: Floats) -> Tensor:
        """Return the index of the bank with the best mean gain of all heads, for every head [L, Hkv]."""
        return torch.full(gains.shape[1:], int(gains.mean((1, 2)).argmax()))

    def finish(self, chosen: Tensor, even: Tensor, contexts: FitContexts) -> FittedRanking:
        bank = self.tried[int(chosen[0, 0])]._replace(even=even)
        return FittedRanking(self._look([bank], contexts), bank.arrays, {"chosen_by": bank.how})

    def estimate_fit(self, contexts: int) -> Work:  # noqa: ARG002
        """Estimate the time of choosing the banks, by that of a layer."""
        shape = describe(self.loaded.model)
        group = shape.query_heads // shape.kv_heads
        queries = torch.rand(1, shape.kv_heads, group, BANK_CANDIDATES, shape.head_dim)

        def choose_banks() -> None:
            choose_by_k_means(queries, choose_farthest(queries, self.options.bank))

        (seconds,) = time_action(choose_banks, 1)
        return Work(seconds=seconds * len(shape.full_layers))

    def _look(self, banks: Sequence[StoredQueries], contexts: FitContexts) -> EntryLook:
        """Make the look that notes the order of entries under each of several banks."""
        policies = [bank.policy(self, contexts) for bank in banks]
        return EntryLook([policy.needs() for policy in policies], partial(note_order, policies=policies))


def sample_queries(context_pass: ContextPass) -> dict[str, Tensor]:
    """Return the drawn queries of a context."""
    return {QUERIES_ARRAY: context_pass.queries}


def note_order(observation: Observation, context: int, free: slice, policies: Sequence[Policy]) -> Tensor:  # noqa: ARG001
    """Note scores of entries that order them as each of several policies, [policies, Hkv, T]."""
    return torch.cat([-rank_under(policy, observation)[..., free].float() for policy in policies])


def draw_asked_places(questions: Questions, context: int, count: int, seed: int) -> Tensor:
    """Draw at most `count` of the question tokens of a context; return their ascending numbers [n].

    Tokens of questions come first; the context's own tokens fill up the rest.
    """
    # Every context has a generator of its own: which tokens are drawn does not depend on what was read before.
    random = torch.Generator().manual_seed(seed + context)
    own, rest = (sum(after.tokens.shape[1] for after in questions.get(target, ())) for target in TARGETS)
    order = torch.cat([torch.randperm(own, generator=random), own + torch.randperm(rest, generator=random)])
    return order[:count].sort().values


def choose_farthest(queries: Tensor, count: int) -> Tensor:
    """Choose `count` queries of every kv head by farthest points, [L, Hkv, G, M, D] to [L, Hkv, G, N, D].

    The first is the farthest from the mean, every other the farthest from its nearest among those before it.
    """
    x = _flatten_heads(queries)
    x = x - x.mean(1, keepdim=True)
    squares = x.square().sum(-1)
    apart = squares  # squared distance from the mean, later from the nearest chosen query
    heads = torch.arange(len(x))
    chosen = list[Tensor]()
    for number in range(min(count, x.shape[1])):
        index = apart.argmax(-1)
        chosen.append(index)
        # |x - c|^2 by products: differences would be written to memory and read again for every chosen query
        products = (x @ x[heads, index][:, None].transpose(1, 2))[..., 0]
        away = squares - 2 * products + squares[heads, index][:, None]
        away[heads, index] = 0.0  # whatever rounding leaves: none is chosen twice while others lie apart
        apart = away if number == 0 else torch.minimum(apart, away)
    return _gather_queries(queries, torch.stack(chosen, 1))


def choose_by_k_means(queries: Tensor, start: Tensor) -> Tensor:
    """Choose the queries nearest to k-means centres, from the `start` of `choose_farthest`."""
    x = _flatten_heads(queries)
    centres = _flatten_heads(start)
    heads, count, size = centres.shape
    first = torch.arange(heads)[:, None] * count  # row of a head's first centre
    for _ in range(KMEANS_ROUNDS):
        # |c|^2 - 2 x.c is smallest where |x - c|^2 is
        away = torch.baddbmm(centres.square().sum(-1)[:, None], x, centres.transpose(1, 2), alpha=-2)
        nearest = (away.argmin(-1) + first).flatten()
        sums = x.new_zeros(heads * count, size).index_add_(0, nearest, x.flatten(0, 1))
        members = nearest.bincount(minlength=heads * count).view(heads, count, 1)
        means = sums.view_as(centres) / members.clamp(min=1)
        centres = torch.where(members > 0, means, centres)
    away = torch.baddbmm(x.square().sum(-1)[..., None], x, centres.transpose(1, 2), alpha=-2)
    return _gather_queries(queries, away.argmin(1))


def _flatten_heads(queries: Tensor) -> Tensor:
    """Flatten the queries of a token in a kv head to one vector, [L * Hkv, M, G * D]."""
    return queries.flatten(0, 1).transpose(1, 2).flatten(2)


def _gather_queries(queries: Tensor, index: Tensor) -> Tensor:
    layers, heads, group, _, dim = queries.shape
    where = index.view(layers, heads, 1, -1, 1).expand(-1, -1, group, -1, dim)
    return queries.gather(3, where).contiguous()
