"""Guarantees on what a plan loses: tests whether the mean loss of a context is below a bound, for any distribution.

The loss of a context is how far the mean score of its questions falls below the full cache's, and 0 where it does not:
a number in [0, 1]. What is gained on other contexts makes up for nothing, so a bound holds for the loss of the mean
score, too. Contexts are independent; tasks may have different means, and the bound is on the mean over all contexts.

A bettor stakes a fixed share of what he has on every context: it grows by 1 + stake (bound - loss) / (1 - bound). If
the mean loss is above the bound, he is not expected to have more than he began with: on average the logarithms of his
expected factors are at most zero, as the logarithm is concave. So the chance that 1 becomes 1 / (1 - confidence) is at
most 1 - confidence (Markov; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting",
4, with a constant stake). It depends on no order of contexts, and needs no equal distributions, as bets that are
adapted on the way would.

The stake is the one that wins just enough at the largest mean loss q for which Hoeffding's bound says the same:
contexts KL(q, bound) = -log(1 - confidence), stake 1 - q / bound. So whatever Hoeffding's bound shows is shown, and
more where losses are parts of 1. Without any loss n contexts show 1 - (1 - confidence)^(1 / n), which is exact.
What it covers, and what Hoeffding-Bentkus does: benchmarks/study_guarantee.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvsearch.core.arrays import TIE, Floats
from kvsearch.core.errors import UsageError
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.plan.origin import Guarantee
from kvsearch.tasks.metrics import is_forced

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation, Split
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Plan
    from kvsearch.tasks.base import Task
    from kvsearch.tasks.encode import TaskPrompts

STEPS = 1000  # bounds are tried in steps of 1 / STEPS, tenths of a point, as they are shown


def count_needed_contexts(bound: float, confidence: float) -> int:
    """Count the contexts that show a `bound` of the mean loss if none of them loses anything."""
    return math.ceil(math.log1p(-confidence) / math.log1p(-bound) - TIE)


def find_least_bound(contexts: int, confidence: float) -> float:
    """Find the least bound of the mean loss that so many contexts can show: if none of them loses anything."""
    return 1.0 - math.pow(1 - confidence, 1 / contexts)


def _diverge(mean: float, bound: float) -> float:
    """Return the Kullback-Leibler divergence of Bernoulli(`mean`) from Bernoulli(`bound`), in nats."""
    lost = mean * math.log(mean / bound) if mean > 0 else 0.0
    kept = (1 - mean) * math.log((1 - mean) / (1 - bound)) if mean < 1 else 0.0
    return lost + kept


def find_allowed_loss(contexts: int, bound: float, confidence: float) -> float | None:
    """Find the largest mean loss of so many contexts with which `bound` is shown in any case; None: there is none."""
    if contexts < count_needed_contexts(bound, confidence):
        return None
    least = -math.log1p(-confidence) / contexts
    low = 0.0
    high = bound
    for _ in range(60):  # bisection, to the last bit of a float: the divergence falls from 0 to the bound
        middle = (low + high) / 2
        if _diverge(middle, bound) >= least:
            low = middle
        else:
            high = middle
    return low


def describe_need(bound: float | None, confidence: float, contexts: int) -> str:
    """Say how many contexts a wished `bound` needs, and what mean loss the `contexts` at hand may have.

    Without a wish it says what the contexts at hand can show at all.

    Raises:
        UsageError: there are too few; the message says how many it takes.
    """
    # rounded up, as a bound below the least one could not be shown
    least = f"{100 * math.ceil(find_least_bound(contexts, confidence) * STEPS) / STEPS:g}"
    sure = f"with {100 * confidence:g}% confidence"
    if bound is None:
        return f"{contexts} contexts show a mean loss of at most {least} points {sure} if none of them loses anything"
    needed = count_needed_contexts(bound, confidence)
    wish = f"to show a mean loss of at most {100 * bound:g} points {sure} takes {needed} contexts at least"
    allowed = find_allowed_loss(contexts, bound, confidence)
    if allowed is None:
        raise UsageError(
            f"{wish}, and there are {contexts}: ask more with --samples or --tasks, or allow --lose-at-most {least}%"
        )
    return f"{wish}: the {contexts} at hand show it if they lose {100 * allowed:.2f} points or less"


def refuse_text(tasks: Iterable[Task]) -> None:
    """Raise UsageError if a task is text, whose loss is in nats per token and has no largest value."""
    if text := [task.name for task in tasks if is_forced(task)]:
        raise UsageError(
            f"{', '.join(text)}: the loss of text is in nats per token, not in [0, 1], so nothing is guaranteed of it: "
            "leave it out"
        )


def compute_log_wealth(losses: Floats, bound: float, confidence: float) -> Floats:
    """Compute the log wealth [...] of the bettor after losses [..., contexts]; see the head of this file.

    It is minus infinity where so few contexts cannot show the bound.
    """
    allowed = find_allowed_loss(losses.shape[-1], bound, confidence)
    if allowed is None:
        return np.full(losses.shape[:-1], -np.inf)
    stake = 1 - allowed / bound
    with np.errstate(divide="ignore"):  # who stakes everything may lose it: the log of 0
        wealth: Floats = np.log1p(stake * (bound - losses) / (1 - bound)).sum(-1)
    return wealth


def shows_bound(losses: Floats, bound: float, confidence: float) -> bool:
    """Tell whether losses [contexts] in [0, 1] reject that their mean in the long run exceeds `bound`.

    If it does, this is true with a chance of at most 1 - `confidence`.

    Raises:
        UsageError: a loss is not in [0, 1].
    """
    outside = ~((losses >= 0) & (losses <= 1))
    if outside.any():
        raise UsageError(f"losses are from 0 to 1, and one is {losses[outside][0]:g}")
    return bool(compute_log_wealth(losses, bound, confidence) >= -math.log1p(-confidence) - TIE)


def find_shown_bound(losses: Floats, confidence: float) -> float:
    """Find the smallest bound, in tenths of a point, that losses [contexts] show, and all larger ones, too; 1: none."""
    # from the largest bound down: the stake depends on the bound, so one may be shown and a larger one not
    shown = STEPS
    while shown > 1 and shows_bound(losses, (shown - 1) / STEPS, confidence):
        shown -= 1
    return shown / STEPS


def count_shown(sequence: Iterable[Floats], bound: float, confidence: float) -> int:
    """Count the plans of a fixed sequence that show `bound`, up to the first that does not; losses [contexts] of each.

    The order is fixed before any of these losses is seen, so all tests have the whole level: the first plan that loses
    more is reached and wrongly passed with a chance of at most 1 - `confidence`.
    """
    count = 0
    for losses in sequence:
        if not shows_bound(losses, bound, confidence):
            break
        count += 1
    return count


def compute_hoeffding_bentkus(mean: float, contexts: int, bound: float) -> float:
    """Compute the p-value of a mean loss of so many contexts in [0, 1] if it is `bound` or more in the long run.

    It is the lesser of Hoeffding's exp(-n KL(mean, bound)) and Bentkus' e P(Binomial(n, bound) <= ceil(n mean))
    (Bates et al. 2021, "Distribution-free, risk-controlling prediction sets", 3.1).
    """
    from scipy.stats import binom

    if mean >= bound:
        return 1.0
    bentkus = math.e * float(binom.cdf(math.ceil(contexts * mean - TIE), contexts, bound))
    return min(1.0, math.exp(-contexts * _diverge(mean, bound)), bentkus)


def measure_context_losses(samples: Sequence[Sample], method: str, contexts: Contexts) -> Floats:
    """Measure what a method loses on each context to the full cache, [contexts] in [0, 1]; see the head of this file.

    A context that several tasks ask about is one. `contexts` as for `summarize`.
    """
    lost: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if sample.method in {FULL, method}:
            name = contexts[sample.task, sample.key]
            place = (sample.task if name == sample.key else "", name)  # a key says nothing of the text
            sign = 1 if sample.method == FULL else -1  # the sum of a context is then what the method loses on it
            lost.setdefault(place, []).append(sign * sample.score)
    # below TIE it is rounding or a gain, and a gain makes up for no other loss
    means = np.array([2 * math.fsum(signed) / len(signed) for signed in lost.values()])  # both answer all questions
    return np.where(means < TIE, 0.0, np.minimum(means, 1.0))


def make_guarantee(
    plan: Plan,
    losses: Floats,
    bound: float,
    confidence: float,
    encoded: Sequence[TaskPrompts],
    protocol: str,
    masses: Sequence[float] = (),
) -> Guarantee:
    """Make the statement that losses [contexts] of the tasks `encoded` have shown a bound of a plan.

    `masses` are shares of the attention at the end of each prompt that evicted entries had; empty: not measured.
    """
    return Guarantee(
        loss=bound, confidence=confidence, contexts=len(losses), mean_loss=float(losses.mean()),
        tasks={task.task.name: task.distinct for task in encoded}, protocol=protocol,
        evicted_mass=(min(masses), max(masses)) if masses else None, plan_sha256=plan.content_sha256,
    )  # fmt: skip


def measure_evicted_masses(
    loaded: LoadedModel, plan: Plan, encoded: Sequence[TaskPrompts], split: Split
) -> list[float]:
    """Measure `PlanCache.evicted_mass` of every prompt that some tasks compress, contexts or whole prompts."""
    from kvsearch.runtime import PlanCache, Program
    from kvsearch.runtime.attention import run_attention
    from kvsearch.runtime.shared_prefill import make_batches, read_prompts
    from kvsearch.tasks.encode import make_readings

    program = Program.from_plan(loaded.model, plan)
    readings = [reading for task in encoded for reading in make_readings(task.prompts, split.protocol)]
    masses = []
    with run_attention(loaded.model):
        for batch in make_batches(readings, split.batch, lambda reading: len(reading.ids)):
            cache = PlanCache(loaded.model, program, monitor=True)
            read_prompts(loaded.model, [cache], [reading.ids for reading in batch])
            masses += cache.evicted_mass
    return masses


def require_unseen(evaluation: Evaluation, names: Iterable[str]) -> None:
    """Raise UsageError if a method was fitted or chosen on contexts of an evaluation: nothing is guaranteed by them."""
    for name in names:
        if (warning := evaluation.seen[name].warning) is not None:
            raise UsageError(f"{name}: nothing is guaranteed on contexts that it has seen: {warning}")
