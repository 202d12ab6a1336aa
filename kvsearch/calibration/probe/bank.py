"""Calibrate a query bank: store queries of what is asked of contexts, few enough, and report how well they rank.

Queries of all tokens that are asked after the contexts to fit on are turned back to position 0. Of them a bank is
chosen for every kv head, in two ways: farthest points (each the farthest from those chosen before) and k-means (the
queries nearest to the centres). Which way ranks better is decided on contexts that no query is of, and which heads an
even spread moves less; how good the ranking is, also on a kind of question that a second bank has no queries of, is
reported on others, as for a probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.options import CANDIDATES, QueryBankOptions
from kvsearch.calibration.probe.context_pass import ContextPass, QuestionBuilder
from kvsearch.calibration.probe.contexts import FitContexts, RankingCalibration
from kvsearch.calibration.probe.rankings import LeftOut, by_policy, gains, prefers_spread, reported, spread_where
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.progress import Progress
from kvsearch.models.architecture import describe, require_plain_rotary, rotary
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
        made = contexts.profile(METHOD, self.arrays, {"chosen_by": self.how})
        return create_policy(METHOD, {**made.metadata.policy.params, WEIGHTS: know(made.to_bytes(), Path(METHOD))})

    @property
    def arrays(self) -> dict[str, Floats]:
        """What a profile has of it."""
        return {QUERIES: self.queries.numpy(), EVEN: self.even.float().numpy()}


class QueryBankCalibration(RankingCalibration[QueryBankOptions]):
    """A bank; the profile has "queries" [L, Hkv, G, N, D], and in "even" [L, Hkv] 1 for heads ranked evenly.

    "recall", "loss", "kind_recall" and "kind_loss" are those of a probe; a second bank has no queries of the kind that
    is left out.
    """

    reads_again = True

    def prepare(self) -> list[CalibrationPrompt]:
        require_plain_rotary(self.loaded.model, f"policy {METHOD}")
        return super().prepare()

    @torch.no_grad()
    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        contexts = FitContexts.of(self, prompts, self.steps, progress)
        parts = contexts.parts
        others = contexts.others
        bank = _chosen(contexts, parts.fit, parts.choose, self.options)
        fitted = [bank.policy(contexts)]
        held: LeftOut | None = None
        if contexts.left_out is not None and others is not None:
            fitted.append(_chosen(contexts, others.fit, others.choose, self.options).policy(contexts))
            held = LeftOut(contexts.left_out, by_policy(1))
        report = partial(contexts.read, parts.report, policies=[*fitted, *self.policies])
        judged = reported(by_policy(0), report, held, len(fitted))
        layers = describe(self.loaded.model).full_layers
        settings = {
            "chosen_by": bank.how, "spread_heads": int((bank.even & ~bank.unseen).sum()),
            "unseen_heads": tuple(f"{layers[row]}.{head}" for row, head in bank.unseen.nonzero().tolist()),
        }  # fmt: skip
        return contexts.profile(METHOD, {**bank.arrays, **judged}, settings)


def _chosen(
    contexts: FitContexts,
    fit: Sequence[CalibrationPrompt],
    choose: Sequence[CalibrationPrompt],
    options: QueryBankOptions,
) -> Bank:
    """Return a bank of queries that are asked of the contexts `fit`, by what is best on the contexts `choose`."""
    random = torch.Generator().manual_seed(options.seed)
    share = -(-CANDIDATES // len(fit))
    places = {prompt.context: places_asked(prompt, contexts.builder, share, random) for prompt in fit}
    read = contexts.read(fit, lambda one: {QUERIES: queries_asked(one, places[one.context])})
    asked = torch.from_numpy(np.concatenate([one[QUERIES] for one in read], 3))  # [L, Hkv, G, M, D]
    none = torch.zeros(asked.shape[:2], dtype=torch.bool)
    ways = (("farthest", farthest), ("k-means", k_means))
    tried = [Bank(find(asked, options.bank), how, none, none) for how, find in ways]
    policies, rankings = [bank.policy(contexts) for bank in tried], [by_policy(number) for number in range(len(tried))]

    def measure(one: ContextPass) -> dict[str, Tensor]:
        return {"gain": gains(rankings, one), "unseen": (one.largest == 0).all(-1)}

    found = list(contexts.read(choose, measure, policies))
    best = int(np.mean([one["gain"] for one in found], axis=0).mean((1, 2)).argmax())
    unseen = torch.from_numpy(np.all([one["unseen"] for one in found], axis=0))
    again = partial(contexts.read, choose, policies=[policies[best]])
    even = prefers_spread(spread_where(unseen, by_policy(0)), again) | unseen
    return tried[best]._replace(even=even, unseen=unseen)


def places_asked(prompt: CalibrationPrompt, builder: QuestionBuilder, count: int, random: torch.Generator) -> Tensor:
    """Draw at most `count` of the tokens that are asked of a context, their numbers in order [n].

    Tokens of questions come first; those of the context itself fill up what is left.
    """
    asked = list(builder.build(prompt, "cpu"))
    own = sum(one.tokens.shape[1] for one in asked if one.target == "answers")
    rest = sum(one.tokens.shape[1] for one in asked) - own
    order = torch.cat([torch.randperm(own, generator=random), own + torch.randperm(rest, generator=random)])
    return order[:count].sort().values


def queries_asked(context_pass: ContextPass, places: Tensor) -> Tensor:
    """Return un-rotated queries of the tokens at `places` [n] of all that is asked of a context, [L, Hkv, G, n, D]."""
    parts = []
    for one in context_pass.asked:
        with context_pass.passed.following(one.tokens):
            positions = context_pass.length + torch.arange(one.tokens.shape[1], device=one.tokens.device)[None]
            layers = []
            for layer in context_pass.passed.continuations():
                plain = plain_queries(layer.query, positions, rotary(context_pass.passed.model, layer.index))[0]
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
    apart, chosen = (x - x.mean(1, keepdim=True)).norm(dim=-1), list[Tensor]()
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
