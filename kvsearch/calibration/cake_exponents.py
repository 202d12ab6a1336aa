"""CAKE's exponents: looked up, given, or chosen by what the answers of the calibration lose.

To choose them, every pair on a small grid decides the layer budgets of every prompt at one eviction ratio; then the
answers are teacher-forced while all layers see only what the policy keeps. The pair that costs least is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.budgets.cake import CAKEAllocation, exponents, preference
from kvsearch.calibration.analysis import least_loss
from kvsearch.calibration.dynamic import DynamicCalibration, full_pass
from kvsearch.calibration.options import CakeOptions
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation, check_lengths, prompts_of
from kvsearch.calibration.tables import floor_entries
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.progress import Progress, counted
from kvsearch.models.loading import LoadedModel
from kvsearch.models.speed import Work
from kvsearch.plan import Profile
from kvsearch.plan.origin import extended
from kvsearch.plan.size import GUARD, round_half_up
from kvsearch.policies import Observation, Policy, rank_under
from kvsearch.policies.base import Needs
from kvsearch.policies.checks import require_finite
from kvsearch.runtime.attention import running
from kvsearch.runtime.observe import DensePass
from kvsearch.signals.entropy import dispersion
from kvsearch.signals.predictions import divergence

Pair = tuple[float, float]

TEMPERATURES = tuple(1 / inverse for inverse in (0.2, 0.3, 0.5, 1.0, 2.0))
PLAIN: Pair = (1.0, 1.0)
# the plain pair comes first, and so wins ties
PAIRS = (PLAIN, *(pair for pair in product(TEMPERATURES, TEMPERATURES) if pair != PLAIN))


class Dispersion(NamedTuple):
    """What CAKE's preference for a layer is made of, and the ranks of the prompt there."""

    entropy: float
    variance: float
    ranks: Tensor  # [Hkv, T]


class CakeCalibration(DynamicCalibration[CakeOptions]):
    """CAKE's decisions, with exponents as the options say.

    Fitted ones leave all that was tried in the profile: "fit_exponents", float64 [25, 2], (tau1, tau2) by row,
    "fit_loss", float32 [25, questions], and "fit_context", int32 [questions], the text of each.
    """

    def prepare(self) -> list[CalibrationPrompt]:
        if self.options.exponents == "fit":
            self.prompts_to_fit()
        return super().prepare()

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        """Return the passes over the prompts and their tokens; of a fit, answers under at most all pairs, too."""
        fitted = self.prompts_to_fit() if self.options.exponents == "fit" else []
        return sum((prompt.work(1 + len(PAIRS)) for prompt in fitted), super().estimate(prompts))

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        options = self.options
        settings: dict[str, Any] = {"exponents": options.exponents}
        arrays: dict[str, NDArray[Any]] = {}
        pair = options.tau1, options.tau2
        if options.exponents == "auto":
            pair = exponents(self.loaded.name, options.tuned_for)
            settings["tuned_for"] = options.tuned_for
        elif options.exponents == "fit":
            loss, texts = self.fit(progress)
            pair = PAIRS[least_loss(loss)]
            arrays = {"fit_exponents": np.array(PAIRS), "fit_loss": loss, "fit_context": texts}
            settings |= {"fit_ratio": options.fit_ratio, "answer_tokens": options.answer_tokens}
        profile = self.average(CAKEAllocation(*pair, options.window), prompts, progress)
        return extended(profile, settings, arrays)

    def fit(self, progress: Progress | None = None) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Measure what the answers lose under every pair of `PAIRS` at the global eviction ratio `fit_ratio`.

        That is [pairs, questions], nats that an answer diverges, over its tokens, with the number of the text that each
        question is about, [questions]; answers of which the eviction touches no token are left out.

        Raises:
            UsageError: a prompt is too short, the ratio leaves less than what is always kept, or no answer is long
                enough.
            IncompatibleError: the model computes NaN, or a prompt and its answer do not fit its positions.
        """
        (policy,) = self.policies
        prompts = self.prompts_to_fit()
        results = self.loaded.map(partial(_losses, policy=policy, options=self.options), prompts)
        measured = list(counted(results, len(prompts), progress))
        losses = [loss for of_prompt in measured for loss in of_prompt]
        if not losses:
            raise UsageError(
                "no answer is long enough to fit exponents: with the question in the prompt, eviction changes the "
                "second token of an answer first; use protocol question-agnostic, or exponents auto or fixed"
            )
        texts = np.repeat([prompt.text for prompt in prompts], [len(of_prompt) for of_prompt in measured])
        return np.stack(losses, 1).astype(np.float32), texts.astype(np.int32)

    def prompts_to_fit(self) -> list[CalibrationPrompt]:
        """Return the prompts with their answers; errors as `fit`."""
        (policy,) = self.policies
        options = self.options
        prompts = prompts_of(self.loaded, self.data, options.protocol, options.answer_tokens, options.max_length)
        floor = partial(floor_entries, policy=policy, minimum=options.minimum)
        check_lengths(prompts, policy, floor)
        for prompt in prompts:
            least = floor(prompt.length)
            kept = (1 - options.fit_ratio) * prompt.length
            if kept < least - GUARD:
                raise UsageError(
                    f"fit_ratio {options.fit_ratio:g} keeps {kept:g} entries per kv head of a calibration prompt of "
                    f"{prompt.length} tokens, below the {least} that are always kept: lower it"
                )
        return prompts


def _losses(loaded: LoadedModel, prompt: CalibrationPrompt, policy: Policy, options: CakeOptions) -> list[Floats]:
    """Measure the loss of every pair, [pairs], for every answer after the prompt that eviction can change."""
    floor = floor_entries(prompt.length, policy, options.minimum)
    rows = CAKEAllocation(window=options.window).needs(policy).query_rows

    def look(observation: Observation) -> Dispersion:
        entropy, variance = dispersion(observation, rows)
        ranks = rank_under(policy, observation)[0]
        require_finite(observation.checks)
        return Dispersion(float(entropy[0]), float(variance[0]), ranks)

    with running(loaded.model):
        passed = full_pass(loaded, prompt, policy, Needs(query_rows=rows), look)
    entropy, variance = np.array([(layer.entropy, layer.variance) for layer in passed.noted]).T
    floors = np.full((len(passed.noted), len(passed.noted[0].ranks)), floor, dtype=np.int64)
    caps = np.full_like(floors, prompt.length)
    total = round_half_up((1 - options.fit_ratio) * prompt.length * floors.size)
    budgets = [
        CAKEAllocation(*pair).allocate(preference(entropy, variance, *pair), total, floors, caps) for pair in PAIRS
    ]
    with running(loaded.model):
        losses = [
            _of_answer(passed, after, budgets, loaded.device) for after in prompt.continuations if after.predicted
        ]
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
            rows = zip(passed.noted, given.tolist(), strict=True)
            kept = {row: layer.ranks < layer.ranks.new_tensor(few)[:, None] for row, (layer, few) in enumerate(rows)}
            known[given.tobytes()] = divergence(full, passed.logits_seeing(tokens, kept)[after.predicting])
    return np.array([known[given.tobytes()] for given in budgets])
