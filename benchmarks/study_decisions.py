"""What rules of deciding do where nobody leads and where somebody does, by simulation.

    python benchmarks/study_decisions.py            # some minutes on one core
    python benchmarks/study_decisions.py --runs 100

Thirteen methods answer questions about contexts: eight candidates and five baselines. Questions about one context, and
methods on one question, agree more than by chance. In nulls no candidate is better than the best baseline: all are
equal, near the ceiling, one baseline leads, or candidates are better in most contexts and lose some of them whole. In
leads the best candidate is so many points above the best baseline.

Rules: "signs" is the sign-flip test of the maximum in two stages; "signs + 1" the same with one more context that every
finalist loses whole; "bootstrap" the studentised bootstrap of the maximum; "bets" a race in rounds (see `Race` and
`log_wealth`). "signs" is what kvsearch does today. Columns: how often a candidate is said to beat the best baseline (in
nulls a false acceptance), how often one is said to be likely better, the regret (points between the best method and
the one that is written), contexts that the decision took, and methods asked per context.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.special import logsumexp, ndtri, stdtrit

from kvsearch.core.arrays import Floats, Ints
from kvsearch.selection.acceptance import Scores, compute_chances

CANDIDATES = tuple(f"candidate {number}" for number in range(8))
BASELINES = tuple(f"baseline {number}" for number in range(5))
METHODS = (*CANDIDATES, *BASELINES)
AGREE = 0.6  # share of what makes a question hard that all methods have in common
CONTEXT = 0.3  # share of it that all questions about a context have in common
LEVEL = 0.05
FINALISTS = 5
SPREAD = (0.0, -0.01, -0.05, -0.1, -0.3)


STAKES = np.linspace(0.05, 0.95, 19)  # shares of what a bettor has; with all of it one lost context would end him


def log_wealth(leads: Floats) -> Floats:
    """Return the logarithm of what bets on leads make of 1: [...], of `leads` [..., contexts] in [-1, 1].

    A bettor stakes a share of what he has on every context: where the lead is x he then has 1 + share * x times as
    much. If the expected lead is not above zero, what he has is not expected to grow, whatever the distribution; so the
    chance that it ever reaches 1 / level is at most the level (Ville's inequality), and one may look after every round.
    Several bettors begin with equal parts of the stake, each with a share of his own, as nobody knows the best one
    (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", 4.1 and 4.4).
    """
    bettors = np.stack([np.log1p(stake * leads).sum(axis=-1) for stake in STAKES])
    mixed: Floats = logsumexp(bettors, axis=0) - np.log(len(STAKES))
    return mixed


def adjust_for_several(wealths: Floats) -> Floats:
    """Return the evidence for each of several candidates together, [candidates], of their log wealths.

    It is the least mean wealth of any set of candidates that has the candidate in it (closed testing with averages,
    Vovk and Wang 2021, "E-values: calibration, combination and applications", 5): the chance that it reaches 1 / level
    for any candidate that does not lead is at most the level. Candidates that lead together support each other, which
    Bonferroni's rule (the wealth divided by their number) does not let them do.
    """
    order = np.argsort(wealths)
    evidence = np.empty(len(wealths))
    for number, wealth in enumerate(wealths):
        others = wealths[order[order != number]]
        sets = np.logaddexp.accumulate(np.append(wealth, others))  # the candidate with the poorest 0, 1, 2, ... others
        evidence[number] = (sets - np.log(np.arange(1, len(wealths) + 1))).min()
    return evidence


def lower_bound(leads: Floats, tasks: Ints, level: float) -> float:
    """Return the one-sided lower bound of the sum of `leads` [contexts], by Student's t over the contexts of each task.

    `tasks` [contexts] are numbers from 0. Tasks with one context say nothing of the spread within a task: they count as
    one task. With one context in all there is no bound, minus infinity.
    """
    counts = np.bincount(tasks)
    groups = np.where(counts[tasks] > 1, tasks, -1)
    variance = 0.0
    freedom = 0
    for group in np.unique(groups):
        members = leads[groups == group]
        if len(members) > 1:
            variance += len(members) * float(members.var(ddof=1))
            freedom += len(members) - 1
    if freedom == 0:
        return -math.inf
    return float(leads.sum() - stdtrit(freedom, level) * math.sqrt(variance))


Verdict = Literal["beats", "likely", "baseline"]
LEAST_CONTEXTS = 8  # with fewer nothing beats
LEAVES = 0.95  # of the one-sided bound by which one that is behind leaves
LIKELY = 0.90  # of the bound by which a lead is likely


def bets(scores: Scores, method: str, other: str) -> Floats:
    """Return the lead of a method over another in each context as a bet, [contexts] in [-1, 1].

    Contexts that count more for the mean stake more, so that all tasks have the same stake together.
    """
    worth = scores.questions * scores._weights
    leads: Floats = (scores.added(method) - scores.added(other)) / worth.max()
    return leads


def lead_bound(scores: Scores, method: str, other: str, level: float) -> float:
    """Return the one-sided lower bound of the mean lead of a method over another, by contexts within tasks."""
    leads = scores.added(method) - scores.added(other)
    names = list(dict.fromkeys(scores.tasks))
    return lower_bound(leads, np.array([names.index(task) for task in scores.tasks]), level)


def round_sizes(contexts: int) -> list[int]:
    """Return how many contexts have been asked after every round: 8, then half as many more each time."""
    sizes = []
    size = LEAST_CONTEXTS
    while size < contexts:
        sizes.append(size)
        size += size // 2
    return [*sizes, contexts]


@dataclass(eq=False)
class Race:
    """Candidates and baselines that answer contexts in rounds, until it is decided which plan is to be written.

    After every round those leave that cannot win any more: a candidate that another candidate or a baseline leads, and
    a baseline that another one leads, beyond its 95% bound. The race ends as soon as the candidate with the highest
    score beats every baseline that is left; or without a candidate; or when all contexts were asked. Then the winner is

    - a candidate that *beats* the baselines: the chance that any candidate is said so wrongly is at most `level`;
    - else the candidate with the highest score if it is *likely* better: the 90% bound of its lead over the best
      baseline is above zero, after all contexts. That is no proof: there are several candidates, and a bound of few
      contexts does not know what was not seen yet;
    - else the best *baseline*.

    `candidates` and `baselines` are those that the next round asks. `wealths` has the logarithm of what bets on the
    lead of every candidate over its closest baseline make of 1, as of the last round that asked it. `winner` and
    `verdict` are None until the race ends.
    """

    candidates: list[str]
    baselines: list[str]
    level: float = 0.05
    wealths: dict[str, float] = field(default_factory=dict)
    winner: str | None = None
    verdict: Verdict | None = None

    def judge_round(self, scores: Scores, *, is_last: bool) -> None:
        """Take in the scores of all contexts so far, and let those leave that cannot win any more."""
        best = scores.ranked(self.baselines)[0]
        leader = scores.ranked(self.candidates)[0]
        for name in self.candidates:
            self.wealths[name] = min(float(log_wealth(bets(scores, name, other))) for other in self.baselines)
        if self.beats(leader) and len(scores.tasks) >= LEAST_CONTEXTS:
            self._end(leader, "beats")
        elif is_last:
            is_likely = lead_bound(scores, leader, best, LIKELY) > 0
            self._end(leader if is_likely else best, "likely" if is_likely else "baseline")
        else:
            ahead = [leader, best]
            self.baselines = [name for name in self.baselines if lead_bound(scores, best, name, LEAVES) <= 0]
            self.candidates = [
                name
                for name in self.candidates
                if all(lead_bound(scores, other, name, LEAVES) <= 0 for other in ahead if other != name)
            ]
            if not self.candidates:
                self._end(best, "baseline")

    def beats(self, name: str) -> bool:
        """Return True if the evidence for a candidate is beyond the level, for all candidates together."""
        return self.evidence(name) >= -math.log(self.level)

    def evidence(self, name: str) -> float:
        """Return the logarithm of the evidence for a candidate, with all others taken into account."""
        names = list(self.wealths)
        return float(adjust_for_several(np.array([self.wealths[other] for other in names]))[names.index(name)])

    def _end(self, winner: str, verdict: Verdict) -> None:
        self.winner = winner
        self.verdict = verdict


@dataclass(frozen=True)
class World:
    """True means of the methods, and the chance that each loses a whole context (its mean stays)."""

    name: str
    means: tuple[float, ...]
    loses: float = 0.0

    def draw(self, rng: np.random.Generator, contexts: int, questions: int) -> Floats:
        """Return mean scores, [methods, contexts]."""
        shape = (len(METHODS), contexts, questions)
        common = np.sqrt(CONTEXT) * rng.standard_normal((*shape[1:2], 1))
        common = common + np.sqrt(1 - CONTEXT) * rng.standard_normal(shape[1:])
        own = np.sqrt(CONTEXT) * rng.standard_normal((*shape[:2], 1))
        own = own + np.sqrt(1 - CONTEXT) * rng.standard_normal(shape)
        hardness = np.sqrt(AGREE) * common + np.sqrt(1 - AGREE) * own
        loses = np.array([self.loses] * len(CANDIDATES) + [0.0] * len(BASELINES))
        answers = hardness < ndtri(np.array(self.means) / (1 - loses))[:, None, None]
        lost = rng.random((*shape[:2], 1)) < loses[:, None, None]
        right: Floats = (answers & ~lost).mean(axis=2)
        return right


def null(name: str, base: float, *, best: float = 0.0, loses: float = 0.0) -> World:
    """Return a world whose candidates are as good as the baselines, but for one that is `best` better than all."""
    baselines = (base + best, *[base] * (len(BASELINES) - 1))
    return World(name, (*[base] * len(CANDIDATES), *baselines), loses)


def lead(points: int, base: float) -> World:
    """Return a world whose best candidate is so many points of 100 above the best baseline."""
    gain = points / 100
    gains = (gain, gain - 0.005, gain - 0.01, gain - 0.02, gain / 2, 0.0, -0.02, -0.05)
    return World(f"lead of {points}", tuple(base + more for more in (*gains, *SPREAD)))


WORLDS = (
    null("null: all equal", 0.85),
    null("null: at the ceiling", 0.98),
    null("null: one baseline leads", 0.85, best=0.02),
    null("null: contexts lost, 5%", 0.85, loses=0.05),
    null("null: contexts lost, 10%", 0.85, loses=0.10),
    World("null: worse, contexts lost", (*[0.85] * len(CANDIDATES), 0.90, *[0.85] * 4), 0.10),
    lead(4, 0.88), lead(8, 0.87), lead(16, 0.80), lead(38, 0.55),
)  # fmt: skip
SIZES = ((8, 3), (15, 3), (15, 10), (42, 1), (42, 3), (100, 3), (200, 3))


@dataclass(frozen=True)
class Decided:
    """What a rule wrote: number of the method, its verdict, contexts asked, methods asked per context."""

    method: int
    verdict: str
    contexts: int
    asked: float


Rule = Callable[[Floats, np.random.Generator], Decided]


def in_two_stages(test: Callable[[Floats], Floats]) -> Rule:
    """Return the rule of two stages whose second one decides by the chances that `test` gives to leads."""

    def decide(scores: Floats, rng: np.random.Generator) -> Decided:  # noqa: ARG001 - as all rules have it
        contexts = scores.shape[1]
        first = max(1, contexts // 4)
        ranked = np.argsort(-scores[:, :first].mean(axis=1), kind="stable")
        finalists = [method for method in ranked if method < len(CANDIDATES)][:FINALISTS]
        baselines = range(len(CANDIDATES), len(METHODS))
        best = max(baselines, key=lambda method: scores[method].mean())
        second = scores[:, first:]
        chances = test(second[finalists] - second[best])
        means = second.mean(axis=1)
        sure = [
            method
            for method, chance in zip(finalists, chances, strict=True)
            if chance <= LEVEL and means[method] > max(means[other] for other in baselines)
        ]
        asked = (first * len(METHODS) + (contexts - first) * (FINALISTS + len(BASELINES))) / contexts
        if not sure:
            return Decided(best, "baseline", contexts, asked)
        return Decided(max(sure, key=lambda method: means[method]), "beats", contexts, asked)

    return decide


def with_a_lost_context(leads: Floats) -> Floats:
    """Return the chances of leads with one more context that all lose whole."""
    return compute_chances(np.append(leads, -np.ones((len(leads), 1)), axis=1))


def bootstrap(leads: Floats, resamples: int = 499) -> Floats:
    """Return the chances of leads by the studentised bootstrap of the largest one."""
    contexts = leads.shape[1]
    draws = np.random.default_rng(0).integers(0, contexts, (resamples, contexts))
    centred = leads - leads.mean(axis=1, keepdims=True)

    def studentise(values: Floats) -> Floats:
        spread = values.std(axis=-1, ddof=1) / np.sqrt(values.shape[-1])
        ratios: Floats = np.divide(values.mean(axis=-1), spread, out=np.zeros_like(spread), where=spread > 0)
        return ratios

    largest = studentise(centred[:, draws]).max(axis=0)
    found: Floats = (1 + (largest[:, None] >= studentise(leads)).sum(axis=0)) / (resamples + 1)
    return found


def bet(scores: Floats, rng: np.random.Generator) -> Decided:  # noqa: ARG001 - as all rules have it
    """Decide in rounds, by bets."""
    race = Race(list(CANDIDATES), list(BASELINES), LEVEL)
    contexts = scores.shape[1]
    before = answered = 0
    for size in round_sizes(contexts):
        names = [*race.candidates, *race.baselines]
        answered += len(names) * (size - before)
        before = size
        sums = {name: scores[METHODS.index(name), :size] for name in names}
        race.judge_round(Scores(("task",) * size, np.ones(size), sums), is_last=size == contexts)
        if race.winner is not None:
            break
    assert race.winner is not None
    assert race.verdict is not None
    return Decided(METHODS.index(race.winner), race.verdict, before, answered / before)


RULES: dict[str, Rule] = {
    "signs": in_two_stages(compute_chances),
    "signs + 1": in_two_stages(with_a_lost_context),
    "bootstrap": in_two_stages(bootstrap),
    "bets": bet,
}


def main() -> None:
    """Print a line for every world, size and rule."""
    parser = argparse.ArgumentParser(description="What rules of deciding do.")
    parser.add_argument("--runs", type=int, default=400, help="draws of every world")
    options = parser.parse_args()
    print(f"{'world':<28}{'contexts':>9}{'questions':>10}  {'rule':<10}{'beats':>7}{'likely':>8}{'regret':>8}"
          f"{'asked':>7}{'methods':>9}")  # fmt: skip
    for contexts, questions in SIZES:
        for world in WORLDS:
            rng = np.random.default_rng(0)
            drawn = [world.draw(rng, contexts, questions) for _ in range(options.runs)]
            for name, rule in RULES.items():
                decided = [rule(scores, rng) for scores in drawn]
                beats, likely = (np.mean([one.verdict == word for one in decided]) for word in ("beats", "likely"))
                regret = 100 * np.mean([max(world.means) - world.means[one.method] for one in decided])
                asked = np.median([one.contexts for one in decided])
                methods = np.mean([one.asked for one in decided])
                print(f"{world.name:<28}{contexts:>9}{questions:>10}  {name:<10}{beats:>7.1%}{likely:>8.1%}"
                      f"{regret:>8.2f}{asked:>7.0f}{methods:>9.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
