"""Calibrate a query bank: store queries of what is asked of contexts, few enough, and report how well they rank.

Queries of all tokens that are asked after the contexts to fit on are turned back to position 0. Of them a bank is
chosen for every kv head, in two ways: farthest points (each the farthest from those chosen before) and k-means (the
queries nearest to the centres). Which way ranks better is decided on contexts that no query is of, and recall is
reported on others, as for a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.options import CANDIDATES, COMPARED, QueryBankOptions
from kvsearch.calibration.probe.measure import recall_of
from kvsearch.calibration.probe.reading import BUDGETS, Asking, prepared, split, without_questions
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.calibration.steps import Arrays, Steps, identity_of, kept_replies
from kvsearch.errors import IncompatibleError
from kvsearch.models.architecture import describe, require_plain_rotary, rotary
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PolicySpec, Profile
from kvsearch.plan.weights import WEIGHTS, know
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.fitted import VERSION, WRITTEN_FOR
from kvsearch.policies.query_bank import METHOD, QUERIES
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running
from kvsearch.runtime.collector import plain_queries
from kvsearch.runtime.observe import DensePass

SINKS = 4
ROUNDS = 10  # of k-means


def calibrate_query_bank(
    loaded: LoadedModel,
    data: CalibrationData,
    options: QueryBankOptions,
    progress: Progress | None = None,
    directory: Path | None = None,
) -> Profile:
    """Choose a bank; the profile has "queries" [L, Hkv, G, N, D], and "recall" [P, B, L, Hkv] as that of a probe.

    What is finished is kept in `directory`, and what is there is not measured again.

    Raises:
        UsageError: fewer than three contexts, or one too short; what is kept in `directory` is damaged, or of another
            calibration.
        IncompatibleError: the model computes NaN, its rotary embedding cannot be undone, or a context and what is asked
            of it do not fit its positions.
    """
    require_plain_rotary(loaded.model, f"policy {METHOD}")
    prompts, asking = prepared(loaded, data, options)
    policy = PolicySpec(name=METHOD, params={"sinks": SINKS, "protect": options.protect})
    lengths = [prompt.length for prompt in prompts]
    done = Steps(directory, identity_of(loaded, data, prompts, {"seed": options.seed, **options.settings()}))
    with running(loaded.model):
        if options.answers == "own" and "answers" in asking.targets:
            prompts = kept_replies(loaded, prompts, options.answer_tokens, done)
        parts = split(prompts, options.seed)
        settings = {
            "data": data.name, **options.settings(), WRITTEN_FOR: VERSION, "rankings": (METHOD, *COMPARED),
            "at": BUDGETS, "contexts": tuple(map(len, parts)), "targets": asking.targets,
            "without_questions": without_questions(prompts),
        }  # fmt: skip
        random = torch.Generator().manual_seed(options.seed)
        share, ticks = -(-CANDIDATES // len(parts.fit)), counted(prompts, len(prompts), progress)
        next(ticks)  # the next one tells that the first is done

        def each(
            part: Sequence[CalibrationPrompt], measure: Callable[[CalibrationPrompt], Tensor | Floats]
        ) -> list[NDArray[Any]]:
            """Measure contexts, or read what is kept of them."""
            step, found = done.stage(), list[NDArray[Any]]()
            for prompt in part:
                found.append(step(partial(found_in, measure, prompt))["found"])
                next(ticks, None)
            return found

        places = {prompt: places_asked(prompt, asking, share, random) for prompt in parts.fit}
        read = each(parts.fit, lambda prompt: queries_asked(loaded, prompt, asking, places[prompt]))
        asked = torch.from_numpy(np.concatenate(read, 3))  # [L, Hkv, G, M, D]

        def profile(queries: Tensor, how: str, recall: Floats | None = None) -> Profile:
            told = {**settings, "chosen_by": how}
            origin = profile_metadata(
                loaded, data, policy, METHOD, options.seed, told, lengths, SINKS + options.protect
            )
            more = {} if recall is None else {"recall": recall.astype(np.float32)}
            return Profile(origin, {QUERIES: queries.numpy(), **more})

        def ranking(made: Profile) -> Policy:
            return create_policy(METHOD, {**policy.params, WEIGHTS: know(made.to_bytes(), Path(METHOD))})

        banks = {how: chosen(asked, options.bank) for how, chosen in (("farthest", farthest), ("k-means", k_means))}
        rankings = [ranking(profile(bank, how)) for how, bank in banks.items()]
        tried = each(parts.choose, lambda prompt: recalls(loaded, prompt, options, asking, rankings))
        best = list(banks)[int(np.mean(tried, axis=0).mean((1, 2, 3)).argmax())]
        compared = [ranking(profile(banks[best], best)), *options.policies()]
        found = each(parts.report, lambda prompt: recalls(loaded, prompt, options, asking, compared))
    return profile(banks[best], best, np.mean(found, axis=0))


def found_in(measure: Callable[[CalibrationPrompt], Tensor | Floats], prompt: CalibrationPrompt) -> Arrays:
    """Return what is measured of a context, as a step of the calibration has it."""
    return {"found": np.asarray(measure(prompt))}


def places_asked(prompt: CalibrationPrompt, asking: Asking, count: int, random: torch.Generator) -> Tensor:
    """Draw at most `count` of the tokens that are asked of a context, their numbers in order [n].

    Tokens of questions come first; those of the context itself fill up what is left.
    """
    asked = list(asking.questions(prompt, "cpu"))
    own = sum(one.tokens.shape[1] for one in asked if one.target == "answers")
    rest = sum(one.tokens.shape[1] for one in asked) - own
    order = torch.cat([torch.randperm(own, generator=random), own + torch.randperm(rest, generator=random)])
    return order[:count].sort().values


def queries_asked(loaded: LoadedModel, prompt: CalibrationPrompt, asking: Asking, places: Tensor) -> Tensor:
    """Return un-rotated queries of the tokens at `places` [n] of all that is asked of a context, [L, Hkv, G, n, D]."""
    ids, full = prompt.ids.to(loaded.device), describe(loaded.model).full_layers
    passed = DensePass(loaded.model, dict.fromkeys(full, ()), lambda _: True, ids, refusal=prompt.refusal(loaded.name))
    parts = []
    for _, tokens, *_ in asking.questions(prompt, loaded.device):
        with passed.following(tokens):
            positions = prompt.length + torch.arange(tokens.shape[1], device=tokens.device)[None]
            layers = []
            for layer in passed.continuations():
                plain = plain_queries(layer.query, positions, rotary(loaded.model, layer.index))[0]
                layers.append(plain.view(layer.keys.shape[1], -1, *plain.shape[1:]).cpu())
            parts.append(torch.stack(layers))
    queries = torch.cat(parts, 3)
    if not bool(queries.isfinite().all()):
        raise IncompatibleError(prompt.refusal(loaded.name))
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


def recalls(
    loaded: LoadedModel,
    prompt: CalibrationPrompt,
    options: QueryBankOptions,
    asking: Asking,
    policies: Sequence[Policy],
) -> Floats:
    """Return the recall of policies on a context, [P, B, L, Hkv]."""
    free = slice(SINKS, prompt.length - options.protect)
    ids = prompt.ids.to(loaded.device)
    passed = ImportancePass(loaded.model, policies, ids, options.group, prompt.refusal(loaded.name))
    asked = [passed.ask(one.tokens).importance for one in asking.questions(prompt, loaded.device)]
    importance = torch.stack(asked).amax(0)[..., free]
    ranks = [passed.ranks(number)[..., free] for number in range(len(policies))]
    return np.stack([recall_of(importance.gather(-1, one.argsort(-1)).numpy()) for one in ranks])
