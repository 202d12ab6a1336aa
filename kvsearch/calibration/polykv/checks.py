"""What a PolyKV calibration cannot measure, found out before anything is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.polykv.patterns import check_pattern
from kvsearch.calibration.prompts import CalibrationPrompt, prompts_of
from kvsearch.errors import KvsearchWarning, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import Policy
from kvsearch.runtime.cache import check_rotary


def checked_prompts(
    loaded: LoadedModel, data: CalibrationData, options: PolykvOptions, policies: Sequence[Policy]
) -> list[CalibrationPrompt]:
    """Return the prompts that can be run; a `KvsearchWarning` if a budget evicts nothing from some of them.

    Raises:
        UsageError: policies that cannot be tried, or without `options.policy`; no prompt is longer than a budget; no
            token whose loss counts.
        IncompatibleError: a prompt and what follows do not fit the positions of the model.
    """
    check_policies(policies, options)
    check_rotary(loaded.model, policies)
    prompts = prompts_of(loaded, data, options.protocol, options.answer_tokens, options.max_length)
    lengths = [prompt.length for prompt in prompts]
    for budget in options.budgets:
        _check_evicts(lengths, budget)
    if "ppl" in options.signals and not any(after.predicted for prompt in prompts for after in prompt.continuations):
        raise UsageError(
            "no answer has a second token, and eviction cannot change the first one, which the prompt predicts: give "
            "longer answers, or --signals cosine,entropy"
        )
    return prompts


def check_policies(policies: Sequence[Policy], options: PolykvOptions) -> None:
    """Raise a UsageError if there is no policy, one is there twice or cannot be tried, or the base is missing."""
    names = [policy.name for policy in policies]
    if not names:
        raise UsageError("there are no patterns: name some")
    for number, policy in enumerate(policies):
        if policy.name in names[:number]:
            raise UsageError(f"the pattern {policy.name} is given twice: a pattern is tried with one setting")
        check_pattern(policy, options.measured_phases, min(options.budgets))
    if options.policy not in names:
        raise UsageError(
            f"policy {options.policy!r}, for strategies without a route, is none of the patterns: name one of "
            f"{', '.join(names)}"
        )


def _check_evicts(lengths: Sequence[int], budget: int) -> None:
    short = sum(length <= budget for length in lengths)
    if short == len(lengths):
        raise UsageError(
            f"nothing is evicted at a budget of {budget}: no calibration prompt has more than {max(lengths)} tokens; "
            "give longer texts or smaller budgets"
        )
    if short:
        warnings.warn(
            f"nothing is evicted at a budget of {budget} from {short} of {len(lengths)} calibration prompts, which "
            "have no more tokens: they say that patterns do not matter",
            KvsearchWarning,
            stacklevel=4,
        )
