"""CAKE's exponents: looked up, given, or chosen by what the answers of the calibration lose.

To choose them, every pair on a small grid decides the layer budgets of every prompt at one eviction ratio; then the
answers are teacher-forced while all layers see only what the policy keeps. The pair that costs least is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.arrays import Floats, Ints
from kvsearch.budgets.cake import CAKEAllocation, exponents, preference
from kvsearch.calibration.analysis import least_loss
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.dynamic import calibrate_dynamic, full_pass
from kvsearch.calibration.options import CakeOptions
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation, check_lengths, prompts_of
from kvsearch.calibration.tables import floor_entries
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.plan.guard import GUARD, round_half_up
from kvsearch.plan.origin import extended
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.policies.checks import require_finite
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running
from kvsearch.runtime.observe import DensePass
from kvsearch.signals.dispersion import dispersion
from kvsearch.signals.divergence import divergence

Pair = tuple[float, float]

TEMPERATURES = tuple(1 / inverse for inverse in (0.2, 0.3, 0.5, 1.0, 2.0))
PLAIN: Pair = (1.0, 1.0)
# the plain pair comes first, and so wins ties
PAIRS = (PLAIN, *(pair for pair in product(TEMPERATURES, TEMPERATURES) if pair != PLAIN))


@dataclass(frozen=True, eq=False)
class Fit:
    """What the pairs (tau1, tau2) cost: `loss` [pairs, questions] fp32, nats that an answer diverges, over its tokens.

    Answers of which the eviction touches no token are left out.
    """

    pairs: tuple[Pair, ...]
    loss: NDArray[np.float32]

    @property
    def chosen(self) -> Pair:
        """The pair with the least mean loss; the first of equals."""
        return self.pairs[least_loss(self.loss)]


class Dispersion(NamedTuple):
    """What CAKE's preference for a layer is made of, and the ranks of the prompt there."""

    entropy: float
    variance: float
    ranks: Tensor  # [Hkv, T]


def calibrate_cake(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    options: CakeOptions | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Calibrate CAKE with exponents as `options` say.

    Fitted ones leave all that was tried in the profile: "fit_exponents", float64 [25, 2], (tau1, tau2) by row, and
    "fit_loss", float32 [25, questions], see `Fit`.

    Raises:
        UsageError, IncompatibleError: see `fit_exponents` and `calibrate_dynamic`.
    """
    options = options or CakeOptions()
    settings: dict[str, Any] = {"exponents": options.exponents}
    arrays: dict[str, NDArray[Any]] = {}
    pair, second = (options.tau1, options.tau2), progress
    if options.exponents == "auto":
        pair, settings["tuned_for"] = exponents(loaded.name, options.tuned_for), options.tuned_for
    elif options.exponents == "fit":
        first, second = _halves(progress)
        fit = fit_exponents(loaded, data, policy, options, first)
        pair, arrays = fit.chosen, {"fit_exponents": np.array(fit.pairs), "fit_loss": fit.loss}
        settings |= {"fit_ratio": options.fit_ratio, "answer_tokens": options.answer_tokens}
    profile = calibrate_dynamic(loaded, data, policy, CAKEAllocation(*pair, options.window), options, second)
    return extended(profile, settings, arrays)


def _halves(progress: Progress | None) -> tuple[Progress | None, Progress | None]:
    """Tell two passes over the same prompts as one."""
    if progress is None:
        return None, None
    return lambda done, total: progress(done, 2 * total), lambda done, total: progress(total + done, 2 * total)


def fit_exponents(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    options: CakeOptions | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Measure what the answers lose under every pair of `PAIRS` at the global eviction ratio `options.fit_ratio`.

    Raises:
        UsageError: a prompt is too short, the ratio leaves less than what is always kept, or no answer is long enough.
        IncompatibleError: the model computes NaN, or a prompt and its answer do not fit its positions.
    """
    options = options or CakeOptions()
    prompts = prompts_of(loaded, data, options.protocol, options.answer_tokens, options.max_length)

    def floor(length: int) -> int:
        return floor_entries(length, policy, options.minimum)

    check_lengths(prompts, policy, floor)
    for prompt in prompts:
        least, kept = floor(prompt.length), (1 - options.fit_ratio) * prompt.length
        if kept < least - GUARD:
            raise UsageError(
                f"fit_ratio {options.fit_ratio:g} keeps {kept:g} entries per kv head of a calibration prompt of "
                f"{prompt.length} tokens, below the {least} that are always kept: lower it"
            )
    found = loaded.map(partial(_losses, policy=policy, options=options), prompts)
    losses = [loss for some in counted(found, len(prompts), progress) for loss in some]
    if not losses:
        raise UsageError(
            "no answer is long enough to fit exponents: with the question in the prompt, eviction changes the second "
            "token of an answer first; use protocol question-agnostic, or exponents auto or fixed"
        )
    return Fit(PAIRS, np.stack(losses, 1).astype(np.float32))


def _losses(loaded: LoadedModel, prompt: CalibrationPrompt, policy: Policy, options: CakeOptions) -> list[Floats]:
    """Measure the loss of every pair, [pairs], for every answer after the prompt that eviction can change."""
    with running(loaded.model):
        return _losses_of(loaded, prompt, policy, options)


def _losses_of(loaded: LoadedModel, prompt: CalibrationPrompt, policy: Policy, options: CakeOptions) -> list[Floats]:
    floor = floor_entries(prompt.length, policy, options.minimum)
    rows = CAKEAllocation(window=options.window).needs(policy).query_rows

    def look(observation: Observation) -> Dispersion:
        entropy, variance = dispersion(observation, rows)
        ranks = rank_under(policy, observation)[0]
        require_finite(observation.looks)
        return Dispersion(float(entropy[0]), float(variance[0]), ranks)

    passed = full_pass(loaded, prompt, policy, Needs(query_rows=rows), look)
    entropy, variance = np.array([(layer.entropy, layer.variance) for layer in passed.noted]).T
    floors = np.full((len(passed.noted), len(passed.noted[0].ranks)), floor, dtype=np.int64)
    caps = np.full_like(floors, prompt.length)
    total = round_half_up((1 - options.fit_ratio) * prompt.length * floors.size)
    budgets = [
        CAKEAllocation(*pair).allocate(preference(entropy, variance, *pair), total, floors, caps) for pair in PAIRS
    ]
    losses = [_of_answer(passed, after, budgets, loaded.device) for after in prompt.continuations if after.predicted]
    if not np.isfinite(losses).all():
        raise IncompatibleError(f"{loaded.name}: the model computes NaN after calibration context {prompt.context}")
    return losses


def _of_answer(passed: DensePass[Dispersion], after: Continuation, budgets: list[Ints], device: Any) -> Floats:
    """Return how far the answer diverges from the full cache's for each of `budgets`; equal ones are run once."""
    tokens = after.tokens.to(device)
    full = passed.logits_seeing(tokens, {})[after.predicting]
    known: dict[bytes, float] = {}
    for given in budgets:
        if given.tobytes() not in known:
            kept = {row: layer.ranks < layer.ranks.new_tensor(few)[:, None]
                    for row, (layer, few) in enumerate(zip(passed.noted, given.tolist(), strict=True))}  # fmt: skip
            known[given.tobytes()] = divergence(full, passed.logits_seeing(tokens, kept)[after.predicting])
    return np.array([known[given.tobytes()] for given in budgets])
