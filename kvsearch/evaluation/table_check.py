"""Cross-validation of a table of budgets against uniform budgets, on held-out contexts.

Every context is asked under the table that the other contexts make (`held_out_ratio` of its profile), so none judges
what it was part of. A table may be too sure of itself: where a mixture with even budgets keeps more of the answers, it
is the mixture that is written (`shrink_table`). What is compared is how much of each answer stays, by context: the
share of its tokens before the first one that the model predicts otherwise than under its full cache, teacher-forced.
Chance is that of a sign-flip test, see `kvsearch.core.sign_flips`; several ratios share the level among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.options import CalibrationOptions
from kvsearch.calibration.prompts import CalibrationPrompt, encode_prompts
from kvsearch.calibration.tables import CHECKED_RATIOS, HELD_OUT, assign_folds, floor_entries
from kvsearch.core.arrays import TIE, Floats, Ints
from kvsearch.core.items import Progress, with_progress
from kvsearch.core.sign_flips import compute_chances
from kvsearch.evaluation.statistics import estimate_by_student
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import Work
from kvsearch.plan import Profile
from kvsearch.plan.profile import TableCheck
from kvsearch.plan.profile_arrays import EVICTED_RATIO, GRID_SIZE
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.policies import Policy
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.speed import scale_to_first

TABLE_SHARES = (1.0, 2 / 3, 1 / 3, 0.0)  # shares of the table; the rest is even
TABLE_AND_EVEN = (1.0, 0.0)  # nothing to choose from: even budgets are what the table is compared with
FALSE_VERDICT_LEVEL = 0.05  # chance that a table is said wrongly to be better, or worse, at any of the ratios


def check_table(
    loaded: LoadedModel,
    data: CalibrationData,
    options: CalibrationOptions,
    profile: Profile,
    progress: Progress | None = None,
) -> tuple[TableCheck, ...]:
    """Measure the answers of `data` kept under the table of a profile with `held_out_ratio`, and under uniform budgets.

    With `options.shrink` mixtures of the two are asked as well, see `shrink_table`. Takes a pass over every context,
    and 1 + M R over every question, for M mixtures and R ratios. Nothing where no answer has a token that is predicted
    from the cache.
    """
    protocol, minimum = getattr(options, "protocol", QUESTION_AGNOSTIC), getattr(options, "minimum", 0.0)
    answer_tokens = getattr(options, "answer_tokens", None)
    mixes = TABLE_SHARES if getattr(options, "shrink", False) else TABLE_AND_EVEN
    prompts = encode_prompts(loaded, data, protocol, answer_tokens, options.max_length)
    policy, folds, tables = options.make_policy(), assign_folds(data), profile.arrays[HELD_OUT]
    shares_by_text: dict[int, list[Floats]] = {}
    items = [(prompt, tables[folds[prompt.context]].astype(np.float64)) for prompt in prompts]
    measured = loaded.map(partial(_measure_kept_shares, policy=policy, minimum=minimum, mixes=mixes), items)
    for prompt, stays in zip(prompts, with_progress(measured, len(prompts), progress), strict=True):
        shares_by_text.setdefault(prompt.text, []).extend(stays)
    scores = {text: np.mean(stays, axis=0) for text, stays in shares_by_text.items() if stays}
    if not scores:
        return ()
    by_context = np.stack(list(scores.values()))  # [contexts, R, mixes]
    parts = np.array([folds[text] for text in scores])
    return tuple(
        _judge_ratio(ratio, by_context[:, number], parts, mixes) for number, ratio in enumerate(CHECKED_RATIOS)
    )


def estimate_check(loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], options: CalibrationOptions) -> Work:
    """Estimate the work of `check_table`; the first context is measured for that, under uniform budgets."""
    mixes = TABLE_SHARES if getattr(options, "shrink", False) else TABLE_AND_EVEN
    times = 1 + len(mixes) * len(CHECKED_RATIOS)
    shape = describe(loaded.model)
    even = np.tile(np.reshape(CHECKED_RATIOS, (-1, 1, 1)), (1, len(shape.full_layers), shape.kv_heads))
    minimum = getattr(options, "minimum", 0.0)
    first = (prompts[0], even)
    measure_first = partial(_measure_kept_shares, loaded, first, options.make_policy(), minimum, mixes)
    return scale_to_first(loaded.model, [prompt.work(times) for prompt in prompts], measure_first)


def _measure_kept_shares(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, Floats],
    policy: Policy,
    minimum: float,
    mixes: tuple[float, ...],
) -> list[Floats]:
    """Measure the share of each answer's tokens that stays, [R, mixes], under mixtures of a table [R, L, Hkv].

    The `item` is a prompt with its table.
    """
    prompt, table = item
    ids, length = prompt.ids.to(loaded.device), prompt.length
    shares = []
    with run_attention(loaded.model):
        context_pass = ImportancePass(loaded.model, [policy], ids, refusal=prompt.refusal(loaded.name))
        ranks, heads = context_pass.ranks(), table[0].size
        floor = floor_entries(length, policy, minimum)
        for continuation in prompt.continuations:
            if not continuation.predicted:
                continue
            tokens = continuation.tokens.to(loaded.device)

            def predict(keep: dict[int, Tensor]) -> Tensor:
                logits = context_pass.logits_seeing(tokens, keep)  # noqa: B023 - used at once
                return logits[continuation.predicting].argmax(-1)  # noqa: B023

            full = predict({})
            stays = np.empty((len(CHECKED_RATIOS), len(mixes)))
            for row, ratio in enumerate(CHECKED_RATIOS):
                total = max(round((1 - ratio) * length * heads), floor * heads)
                for column, mix in enumerate(mixes):
                    weights = 1 - mix_with_even(table[row], mix)
                    budgets = torch.from_numpy(water_fill(weights, total, floor, length))
                    kept = dict(enumerate(ranks < budgets[..., None]))
                    stays[row, column] = float((predict(kept) == full).double().cumprod(0).mean())
            shares.append(stays)
    return shares


def _judge_ratio(ratio: float, scores: Floats, folds: Ints, mixes: tuple[float, ...]) -> TableCheck:
    """Judge the scores [contexts, mixes] of a table and its mixtures with uniform budgets (last) at one ratio.

    Every context is judged under the mixture that is best on the contexts of the other `folds` [contexts], so none
    judges what it has chosen; the mixture that is stated is the best of all contexts.
    """
    best = _best_mixture if mixes != TABLE_AND_EVEN else lambda _: 0
    chosen = np.array([best(scores[folds != fold]) for fold in folds])
    table_scores, even_scores = scores[np.arange(len(scores)), chosen], scores[:, -1]
    leads = table_scores - even_scores
    level = FALSE_VERDICT_LEVEL / len(CHECKED_RATIOS)
    lead = estimate_by_student(leads)
    (better,) = compute_chances(leads[None] / len(leads)) <= level
    (worse,) = compute_chances(-leads[None] / len(leads)) <= level
    verdict: Literal["useful", "unproven", "harmful"]
    verdict = "useful" if lead.low > 0 and better else "harmful" if lead.high < 0 and worse else "unproven"
    return TableCheck(
        ratio=ratio,
        contexts=len(scores),
        table=float(table_scores.mean()),
        even=float(even_scores.mean()),
        low=lead.low,
        high=lead.high,
        verdict=verdict,
        mix=mixes[best(scores)],
    )


def _best_mixture(scores: Floats) -> int:
    """Find the column with the best mean of scores [contexts, mixes], uniform budgets last.

    Of equal ones it is the even one, as what is not shown to help is left out, and else the one with most of the table.
    """
    means = scores.mean(0) if len(scores) else np.zeros(scores.shape[1])
    best = np.flatnonzero(means >= means.max() - TIE)
    return int(best[-1] if best[-1] == len(means) - 1 else best[0])


def mix_with_even(table: Floats, mix: float) -> Floats:
    """Mix the share `mix` of a table of local eviction ratios [..., L, Hkv] with uniform ones."""
    shared: Floats = mix * table + (1 - mix) * table.mean((-2, -1), keepdims=True)
    return shared


def shrink_table(profile: Profile, checks: tuple[TableCheck, ...]) -> Profile:
    """Mix every row of the table of a profile with uniform budgets, as the checks found best.

    Between the ratios that were checked the mixture is linear in the logarithm of what is kept, beyond them it is that
    of the nearest.
    """
    if all(check.mix == 1 for check in checks):
        return profile
    kept = np.log(1 - np.arange(1, GRID_SIZE + 1) / (GRID_SIZE + 1))
    sorted_checks = sorted(checks, key=lambda check: -check.ratio)  # by what is kept, ascending
    mixes = np.interp(
        kept, np.log([1 - check.ratio for check in sorted_checks]), [check.mix for check in sorted_checks]
    )
    table = profile.arrays[EVICTED_RATIO].astype(np.float64)
    rows = np.stack([mix_with_even(row, mix) for row, mix in zip(table, mixes.tolist(), strict=True)])
    return replace(profile, arrays={**profile.arrays, EVICTED_RATIO: rows.astype(np.float32)})


def describe_harmful_table(profile: Profile, ratio: float) -> str | None:
    """Describe a table that lost to uniform budgets at the nearest checked ratio; None if it did not lose."""
    checks = profile.metadata.checks or ()
    nearest = min(checks, key=lambda check: abs(np.log((1 - check.ratio) / (1 - ratio))), default=None)
    if nearest is None or nearest.verdict != "harmful":
        return None
    return f"the budgets of this table lose to even ones: {nearest.words}"
