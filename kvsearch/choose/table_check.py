"""Whether a table of budgets is worth having: beside even budgets, on contexts that it was not made of.

Every context is asked under the table that the other contexts make (`held_out_ratio` of its profile), so none judges
what it was part of. What is compared is how much of each answer stays, by context: the share of its tokens before the
first one that the model predicts otherwise than under its full cache, teacher-forced. Chance is that of a sign-flip
test, see `kvsearch.choose.acceptance`; several ratios share the level among them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.options import CalibrationOptions
from kvsearch.calibration.prompts import CalibrationPrompt, prompts_of
from kvsearch.calibration.tables import CHECKED_RATIOS, HELD_OUT, floor_entries, folds_of
from kvsearch.choose.acceptance import Rule, chances
from kvsearch.evaluation.statistics import interval_of, resampled_means
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.plan.profile import TableCheck
from kvsearch.plan.protocol import QUESTION_AGNOSTIC
from kvsearch.plan.rounding import water_fill
from kvsearch.policies import Policy
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running


def check_table(
    loaded: LoadedModel,
    data: CalibrationData,
    options: CalibrationOptions,
    profile: Profile,
    progress: Progress | None = None,
) -> tuple[TableCheck, ...]:
    """Ask the table of a profile with `held_out_ratio`, and even budgets, what the answers of `data` lose.

    Takes a pass over every context, and 1 + 2 R over every question, for R ratios. Nothing where no answer has a token
    that is predicted from the cache.
    """
    protocol, minimum = getattr(options, "protocol", QUESTION_AGNOSTIC), getattr(options, "minimum", 0.0)
    answer_tokens = getattr(options, "answer_tokens", None)
    prompts = prompts_of(loaded, data, protocol, answer_tokens, options.max_length)
    policy, folds, tables = options.make_policy(), folds_of(data), profile.arrays[HELD_OUT]
    asked: dict[str, list[Floats]] = {}
    with running(loaded.model):
        for prompt in counted(prompts, len(prompts), progress):
            table = tables[folds[prompt.context]].astype(np.float64)
            stays = _staying(loaded, prompt, policy, minimum, table)
            asked.setdefault(data.contexts[prompt.context].text, []).extend(stays)
    scores = [np.mean(found, axis=0) for found in asked.values() if found]
    if not scores:
        return ()
    by_context = np.stack(scores)  # [contexts, R, 2]
    return tuple(_judged(ratio, by_context[:, number]) for number, ratio in enumerate(CHECKED_RATIOS))


def _staying(
    loaded: LoadedModel, prompt: CalibrationPrompt, policy: Policy, minimum: float, table: Floats
) -> list[Floats]:
    """Return the share of each answer's tokens that stays under the `table` [R, L, Hkv] and even budgets, [R, 2]."""
    ids, length = prompt.ids.to(loaded.device), prompt.length
    passed = ImportancePass(loaded.model, [policy], ids, refusal=prompt.refusal(loaded.name))
    ranks, heads = passed.ranks(), table[0].size
    floor = floor_entries(length, policy, minimum)
    found = []
    for after in prompt.continuations:
        if not after.predicted:
            continue
        tokens = after.tokens.to(loaded.device)

        def said(keep: dict[int, Tensor]) -> Tensor:
            return passed.logits_seeing(tokens, keep)[after.predicting].argmax(-1)  # noqa: B023 - used at once

        full = said({})
        stays = np.empty((len(CHECKED_RATIOS), 2))
        for row, ratio in enumerate(CHECKED_RATIOS):
            total = max(round((1 - ratio) * length * heads), floor * heads)
            for column, weights in enumerate((1 - table[row], np.ones_like(table[row]))):
                budgets = torch.from_numpy(water_fill(weights, total, floor, length))
                kept = dict(enumerate(ranks < budgets[..., None]))
                stays[row, column] = float((said(kept) == full).double().cumprod(0).mean())
        found.append(stays)
    return found


def _judged(ratio: float, scores: Floats) -> TableCheck:
    """Judge the scores [contexts, 2] of a table and of even budgets at one ratio."""
    leads = scores[:, 0] - scores[:, 1]
    level = Rule().level / len(CHECKED_RATIOS)
    (means,) = resampled_means(np.random.default_rng(0), [leads], np.ones(len(leads)))
    low, high = interval_of(means)
    better, worse = (float(chances(sign * leads[None] / len(leads))[0]) <= level for sign in (1, -1))
    verdict: Literal["useful", "unproven", "harmful"]
    verdict = "useful" if low > 0 and better else "harmful" if high < 0 and worse else "unproven"
    table, even = scores.mean(0).tolist()
    return TableCheck(ratio=ratio, contexts=len(scores), table=table, even=even, low=low, high=high, verdict=verdict)


def harmful_table(profile: Profile, ratio: float) -> str | None:
    """Return a line about a table that lost to even budgets at the ratio nearest to this one, by what is kept."""
    checks = profile.metadata.checks or ()
    nearest = min(checks, key=lambda one: abs(np.log((1 - one.ratio) / (1 - ratio))), default=None)
    if nearest is None or nearest.verdict != "harmful":
        return None
    return f"the budgets of this table lose to even ones: {nearest.words}"
