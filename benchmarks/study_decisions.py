"""What rules of deciding do where nobody leads and where somebody does, by simulation.

    python benchmarks/study_decisions.py            # some minutes on one core
    python benchmarks/study_decisions.py --runs 100

Thirteen methods answer questions about contexts: eight candidates and five baselines. Questions about one context, and
methods on one question, agree more than by chance. In nulls no candidate is better than the best baseline: all are
equal, near the ceiling, one baseline leads, or candidates are better in most contexts and lose some of them whole. In
leads the best candidate is so many points above the best baseline.

Rules: "signs" is the sign-flip test of the maximum in two stages; "signs + 1" the same with one more context that every
finalist loses whole; "bootstrap" the studentised bootstrap of the maximum; "bets" a race in rounds, which is what
kvsearch does (`kvsearch.selection.race`; "signs" is what it did before). Columns: how often a candidate is said to beat
the best baseline (in nulls a false acceptance), how often one is said to be likely better, the regret (points between
the best method and the one that is written), contexts that the decision took, and methods asked per context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from kvsearch.core.arrays import Floats
from kvsearch.selection.race import Race, plan_rounds
from kvsearch.selection.records import Rule
from kvsearch.selection.scores import Scores

CANDIDATES = tuple(f"candidate {number}" for number in range(8))
BASELINES = tuple(f"baseline {number}" for number in range(5))
METHODS = (*CANDIDATES, *BASELINES)
AGREE = 0.6  # share of what makes a question hard that all methods have in common
CONTEXT = 0.3  # share of it that all questions about a context have in common
LEVEL = 0.05
FINALISTS = 5
SPREAD = (0.0, -0.01, -0.05, -0.1, -0.3)


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


Decide = Callable[[Floats, np.random.Generator], Decided]


def in_two_stages(test: Callable[[Floats], Floats]) -> Decide:
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


def signs(leads: Floats, flips: int = 9999) -> Floats:
    """Return the chances of leads [finalists, contexts] by the sign-flip test of the largest one."""
    scale = np.linalg.norm(leads, axis=1, keepdims=True)
    scaled = np.divide(leads, scale, out=np.zeros_like(leads), where=scale > 0)
    flipped = np.random.default_rng(0).choice([-1.0, 1.0], (flips, leads.shape[1]))
    largest = (flipped @ scaled.T).max(axis=1)
    chances: Floats = (1 + (largest[:, None] >= scaled.sum(axis=1) - 1e-9).sum(axis=0)) / (flips + 1)
    return chances


def with_a_lost_context(leads: Floats) -> Floats:
    """Return the chances of leads with one more context that all lose whole."""
    return signs(np.append(leads, -np.ones((len(leads), 1)), axis=1))


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
    race = Race(list(CANDIDATES), list(BASELINES), Rule())
    contexts = scores.shape[1]
    before = answered = 0
    for (size,) in plan_rounds([contexts]):
        names = [*race.candidates, *race.baselines]
        answered += len(names) * (size - before)
        sums = {name: scores[METHODS.index(name), before:size] for name in names}
        asked = Scores(("task",) * (size - before), np.ones(size - before), sums)
        race.eliminate(asked, is_last=size == contexts, available=contexts)
        before = size
        if race.winner is not None:
            break
    assert race.winner is not None
    assert race.verdict is not None
    return Decided(METHODS.index(race.winner), race.verdict, before, answered / before)


RULES: dict[str, Decide] = {
    "signs": in_two_stages(signs),
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
