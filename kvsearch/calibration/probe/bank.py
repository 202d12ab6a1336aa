"""Calibrate a query bank: store queries of what is asked of contexts, few enough, and report how well they rank.

Queries of all tokens that are asked after the contexts to fit on are turned back to position 0. Of them a bank is
chosen for every kv head, in two ways: farthest points (each the farthest from those chosen before) and k-means (the
queries nearest to the centres). Which way ranks better is decided on contexts that no query is of, and which heads an
even spread moves less; how good the ranking is, is reported on others, as for a probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.options import CANDIDATES, TARGETS, QueryBankOptions
from kvsearch.calibration.probe.context_pass import (
    ContextPass,
    QuestionBuilder,
    by_policy,
    prefers_spread,
    recalls,
    reported,
    spread_where,
)
from kvsearch.calibration.probe.contexts import FitContexts, RankingCalibration
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.items import Progress
from kvsearch.models.architecture import RotaryTables, require_plain_rotary
from kvsearch.plan import Profile
from kvsearch.plan.saved import WEIGHTS, know
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.query_bank import EVEN, METHOD, QUERIES
from kvsearch.runtime.collector import plain_queries

ROUNDS = 10  # of k-means


class Bank(NamedTuple):
    """A bank, how its queries were chosen, and heads that are ranked evenly instead."""

    queries: Tensor  # [L, Hkv, G, N, D]
    how: str
    even: Tensor  # [L, Hkv] bool
    unseen: Tensor  # [L, Hkv] bool: of them those whose context nothing looks at

    def policy(self, contexts: FitContexts) -> Policy:
        """Return the policy that ranks by it."""
        made = contexts.profile(self.arrays, {"chosen_by": self.how}, self.even, self.unseen)
        return create_policy(METHOD, {**made.metadata.policy.params, WEIGHTS: know(made.to_bytes(), Path(METHOD))})

    @property
    def arrays(self) -> dict[str, Floats]:
        """What a profile has of it."""
        return {QUERIES: self.queries.numpy(), EVEN: self.even.float().numpy()}


class QueryBankCalibration(RankingCalibration[QueryBankOptions]):
    """A bank; the profile has "queries" [L, Hkv, G, N, D], and in "even" [L, Hkv] 1 for heads ranked evenly.

    "recall" and "text_loss" are those of a probe.
    """

    def prepare(self) -> list[CalibrationPrompt]:
        require_plain_rotary(self.loaded.model, f"policy {METHOD}")
        return super().prepare()

    @torch.no_grad()
    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        contexts = FitContexts(self, prompts, progress)
        bank = _chosen(contexts, self.options)
        policies = [bank.policy(contexts), *self.policies]
        read = contexts.reader(contexts.report, policies)
        judged, names = reported(by_policy(0), read, METHOD, first=1)
        arrays = {**bank.arrays, **judged}
        return contexts.profile(arrays, {"chosen_by": bank.how}, bank.even, bank.unseen, names)


def _chosen(contexts: FitContexts, options: QueryBankOptions) -> Bank:
    """Return a bank of queries that are asked of the contexts to fit on, by what is best on those to choose on."""
    random = torch.Generator().manual_seed(options.seed)
    share = -(-CANDIDATES // len(contexts.fit))
    places = {prompt.context: places_asked(prompt, contexts.builder, share, random) for prompt in contexts.fit}
    drawn = contexts.reader(contexts.fit)(
        lambda context_pass: {QUERIES: queries_asked(context_pass, places[context_pass.prompt.context])}
    )
    asked = torch.from_numpy(np.concatenate([arrays[QUERIES] for arrays in drawn], 3))  # [L, Hkv, G, M, D]
    none = torch.zeros(asked.shape[:2], dtype=torch.bool)
    ways = (("farthest", farthest), ("k-means", k_means))
    tried = [Bank(find(asked, options.bank), how, none, none) for how, find in ways]
    policies = [bank.policy(contexts) for bank in tried]

    def measure(context_pass: ContextPass) -> dict[str, Tensor]:
        scores = [by_policy(number)(context_pass) for number in range(len(tried))]
        gain = recalls(scores, context_pass).mean(1)
        return {"gain": gain, "unseen": (context_pass.largest == 0).all(-1)}

    read = contexts.reader(contexts.choose, policies)
    found = list(read(measure))
    best = int(np.mean([arrays["gain"] for arrays in found], axis=0).mean((1, 2)).argmax())
    unseen = torch.from_numpy(np.all([arrays["unseen"] for arrays in found], axis=0))
    even = prefers_spread(spread_where(unseen, by_policy(best)), read) | unseen
    return tried[best]._replace(even=even, unseen=unseen)


def places_asked(prompt: CalibrationPrompt, builder: QuestionBuilder, count: int, random: torch.Generator) -> Tensor:
    """Draw at most `count` of the tokens that are asked of a context, their numbers in order [n].

    Tokens of questions come first; those of the context itself fill up what is left.
    """
    asked = builder.build(prompt, "cpu")
    own, rest = (sum(after.tokens.shape[1] for after in asked.get(target, ())) for target in TARGETS)
    order = torch.cat([torch.randperm(own, generator=random), own + torch.randperm(rest, generator=random)])
    return order[:count].sort().values


def queries_asked(context_pass: ContextPass, places: Tensor) -> Tensor:
    """Return un-rotated queries of the tokens at `places` [n] of all that is asked of a context, [L, Hkv, G, n, D]."""
    parts = []
    for after in chain.from_iterable(context_pass.asked.values()):
        with context_pass.passed.following(after.tokens, logits_to_keep=1):
            positions = (
                context_pass.prompt.length + torch.arange(after.tokens.shape[1], device=after.tokens.device)[None]
            )
            layers = []
            for layer in context_pass.passed.continuations():
                plain = plain_queries(layer.query, positions, RotaryTables(context_pass.passed.model, layer.index))[0]
                layers.append(plain.view(layer.keys.shape[1], -1, *plain.shape[1:]).cpu())
            parts.append(torch.stack(layers))
    queries = torch.cat(parts, 3)
    if not bool(queries.isfinite().all()):
        raise IncompatibleError(context_pass.refusal)
    return queries[:, :, :, places]


def farthest(queries: Tensor, count: int) -> Tensor:
    """Choose `count` of the queries [L, Hkv, G, M, D] of every kv head, [L, Hkv, G, N, D]: farthest points.

    The first is the farthest from the mean, every other the farthest from its nearest among those before it.
    """
    return _taken(queries, _farthest(_vectors(queries), count))


def k_means(queries: Tensor, count: int) -> Tensor:
    """Choose `count` of the queries as `farthest`, which it starts from: the nearest to the means of clusters."""
    x = _vectors(queries)
    centres = x.gather(1, _farthest(x, count)[..., None].expand(-1, -1, x.shape[-1]))
    for _ in range(ROUNDS):
        nearest = torch.cdist(x, centres).argmin(-1)
        member = torch.nn.functional.one_hot(nearest, centres.shape[1]).to(x.dtype)  # [H, M, N]
        size = member.sum(1)[..., None]
        centres = torch.where(size > 0, member.transpose(1, 2) @ x / size.clamp(min=1), centres)
    return _taken(queries, torch.cdist(centres, x).argmin(-1))


def _vectors(queries: Tensor) -> Tensor:
    """Return the queries of a token in a kv head as one vector, [L * Hkv, M, G * D]."""
    return queries.flatten(0, 1).transpose(1, 2).flatten(2)


def _farthest(x: Tensor, count: int) -> Tensor:
    """Return the indices of farthest points of x [H, M, E], [H, N], N the lesser of `count` and M."""
    apart = (x - x.mean(1, keepdim=True)).norm(dim=-1)
    chosen = list[Tensor]()
    for number in range(min(count, x.shape[1])):
        index = apart.argmax(-1)
        chosen.append(index)
        away = (x - x[torch.arange(len(x)), index][:, None]).norm(dim=-1)
        apart = away if number == 0 else torch.minimum(apart, away)
    return torch.stack(chosen, 1)


def _taken(queries: Tensor, index: Tensor) -> Tensor:
    layers, heads, group, _, dim = queries.shape
    where = index.view(layers, heads, 1, -1, 1).expand(-1, -1, group, -1, dim)
    return queries.gather(3, where).contiguous()
