"""A race: candidates and baselines answer contexts in rounds, until it is decided which plan is written.

The best of many candidates on the questions that they are compared on looks better than it is (the winner's curse), and
a lead that is looked at after every round is above any fixed bound some day. So what says that a candidate *beats* the
baselines holds for all candidates together and at whatever round the race ends:

- A bettor stakes a share of what he has on every context: where the candidate leads by x in [-1, 1], he then has
  1 + share * x times as much. If the expected lead is not above zero, what he has is not expected to grow, whatever the
  distribution of leads; so the chance that 1 ever becomes 1 / level is at most the level (Ville's inequality). Several
  bettors begin with equal parts of the stake, each with a share of his own, as nobody knows the best one (Waudby-Smith
  and Ramdas 2024, "Estimating means of bounded random variables by betting", 4.1 and 4.4). The tasks of a round have
  the same stake together, so that it is the mean over tasks that is bet on.
- A candidate is bet on against every baseline, and its wealth is the least of these bets.
- Candidates share the level by closed testing (`adjust_for_several`), sizes by Holm's rule.

A candidate that is not proven may still be the best guess: it is *likely* better if the one-sided bound of its lead
over the best baseline is above zero after all contexts. That is no proof: the best of several looks better than it is,
and few contexts do not show what happens rarely. Else the best *baseline* is written. But if it reads every prompt
twice, and losses show that the foremost candidate is no worse (`SAME_LOSS`), then that is written, as it is *cheaper*.

A score of 0 or 1 says little of a context, and many methods that score alike differ: the one that scores highest on a
few contexts is picked by luck. The loss of the right replies, which are teacher-forced, says more, and takes one pass
for a question. They are the full cache's own where these are right: a model may find the words of a task unlikely, and
what a method changes of that says nothing of its replies. So losses rank the methods (`screen` in `PlanRace`) on more
and more contexts: after each screening those leave that are hopeless (`find_hopeless`), and after the last one the
`FINALISTS` of either kind that lose least reply, to questions about other contexts first. Their losses are measured
there, too, and count with the first ones. Losses say who is foremost; scores say who leaves and what is proven. A
candidate is also *likely* better if the one-sided bound of its lead in losses is above zero. Where such a bound tells
the foremost candidate and baseline apart, or bounds on both sides say that they are the same (`SAME_LOSS`), or the
candidate is cheaper, or a 95% bound of its lead in scores is above zero, the race ends once a proof is out of reach: if
the evidence, growing on as it has, would not do after all contexts.

After every round those leave that cannot win any more: who scores less than another one beyond a 95% bound. That may be
wrong for the best one, but then another that is about as good is ahead of it.

`benchmarks/study_decisions.py` shows what the rule does where nobody leads and where somebody does, beside others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby

import numpy as np
from scipy.special import logsumexp, stdtrit

from kvsearch.core.arrays import Floats
from kvsearch.core.errors import assert_present
from kvsearch.selection.records import HOPELESS_LEVEL, MIN_CONTEXTS_FOR_PROOF, RaceVerdict, Rule
from kvsearch.selection.scores import Scores
from kvsearch.tasks.metrics.likelihood import MOST_LOST

STAKES = np.linspace(0.05, 0.95, 19)  # shares of what a bettor has; with all of it one lost context would end him
ELIMINATION_LEVEL = 0.95  # of one-sided bounds by which one that is behind leaves, and a lead in scores is decided
# contexts at least after every screening, as far as there are so many; those that are hopeless by then leave
SCREENED_CONTEXTS = (3, 6, 12)
TYPICAL_FREEDOM = 2  # degrees of freedom that the median variance of all methods counts for
FINALISTS = 3  # candidates, and as many baselines, that reply
MIN_CONTEXTS_TO_GIVE_UP = 24  # contexts, before which no proof is given up
SAME_LOSS = 0.02  # nats per token: methods whose losses differ by less do the same for a user
ROUND_GROWTH = 1.5  # of the contexts from one round to the next


def compute_log_wealths(leads: Floats) -> Floats:
    """Compute log wealths [..., stakes] of bettors that start with 1, from `leads` [..., contexts] in [-1, 1]."""
    return np.stack([np.log1p(stake * leads).sum(axis=-1) for stake in STAKES], axis=-1)


def mix_bettors(wealths: Floats) -> Floats:
    """Average the wealth of all bettors: log of the mean, [...], from log wealths [..., stakes]."""
    mixed: Floats = logsumexp(wealths, axis=-1) - np.log(len(STAKES))
    return mixed


def adjust_for_several(wealths: Floats) -> Floats:
    """Adjust log wealths [candidates] for several candidates: the log evidence for each, [candidates].

    It is the least mean wealth of any set of candidates that has the candidate in it (closed testing with averages,
    Vovk and Wang 2021, "E-values: calibration, combination and applications", 5): the chance that it reaches 1 / level
    for any candidate that does not lead is at most the level. Candidates that lead together support each other, which
    Bonferroni's rule (the wealth divided by their number) does not let them do.

    Examples:
        >>> wealths = np.log([40.0, 10.0])  # of two candidates: each supports the other
        >>> np.exp(adjust_for_several(wealths)).round(2).tolist()
        [25.0, 10.0]
    """
    order = np.argsort(wealths)
    evidence = np.empty(len(wealths))
    for number, wealth in enumerate(wealths):
        # Poorest first: of all sets of a size that hold the candidate, the one with the poorest others has the least
        # mean.
        others = wealths[order[order != number]]
        sets = np.logaddexp.accumulate(np.append(wealth, others))  # the candidate with the poorest 0, 1, 2, ... others
        evidence[number] = (sets - np.log(np.arange(1, len(wealths) + 1))).min()
    return evidence


def make_bets(scores: Scores, method: str, other: str) -> Floats:
    """Scale the lead of a method over another in each context to a bet, [contexts] in [-1, 1].

    Contexts that count more for the mean stake more, so that all tasks have the same stake together.
    """
    worth = scores.questions * scores.weights
    # Divided by the largest weight, so that no lead leaves [-1, 1], where all shares of a stake are safe.
    leads: Floats = (scores.contributions(method) - scores.contributions(other)) / worth.max()
    return leads


def bound_lead(scores: Scores, method: str, other: str, level: float) -> float:
    """Bound the mean lead of a method over another from below (one-sided), by Student's t over contexts."""
    return bound_mean(*estimate_lead(scores, method, other), level)


def bound_mean(mean: float, variance: float, freedom: int, level: float) -> float:
    """Bound a mean from below (one-sided) by Student's t, where `variance` is that of the mean.

    Without degrees of freedom there is no bound, minus infinity.
    """
    if not freedom:
        return -math.inf
    return mean - float(stdtrit(freedom, level)) * math.sqrt(variance)


def estimate_lead(scores: Scores, method: str, other: str) -> tuple[float, float, int]:
    """Estimate the mean lead of a method over another: the lead, its variance and its degrees of freedom.

    The variance is that of the contexts within each task. Tasks with one context say nothing of it: they count as one
    task. With one context in all there are no degrees of freedom.
    """
    leads = scores.contributions(method) - scores.contributions(other)
    numbers = np.unique(scores.tasks, return_inverse=True)[1]
    # A task with one context has no spread of its own: such tasks are taken for one.
    groups = np.where(np.bincount(numbers)[numbers] > 1, numbers, -1)
    variance = 0.0
    freedom = 0
    for group in np.unique(groups):
        members = leads[groups == group]
        if len(members) > 1:
            variance += len(members) * float(members.var(ddof=1))
            freedom += len(members) - 1
    return float(leads.sum()), variance, freedom


def find_hopeless(losses: Scores, candidates: Sequence[str], baselines: Sequence[str]) -> list[str]:
    """Find methods that are dropped before they reply, by their losses on right replies; scores are minus losses.

    Such a method loses more than the best one by over `MOST_LOST` nats per token, beyond a one-sided bound at
    `HOPELESS_LEVEL` by Student's t on differences in the same contexts, and it is none of the best `FINALISTS` of
    its kind. So at that level a pair of methods that differ by no more is taken for one that does. That may drop the
    best one of many that are alike, but not before as many of its kind as reply look better.

    A few contexts hardly say how much a difference varies, but many methods do together: a variance is averaged with
    the median of all, which counts for `TYPICAL_FREEDOM` degrees of freedom (the moderated t of Smyth 2004, "Linear
    models and empirical Bayes methods for assessing differential expression in microarray experiments", 3).
    """
    methods = [*candidates, *baselines]
    best = losses.rank(methods)[0]
    leads = {name: estimate_lead(losses, best, name) for name in methods if name != best}
    typical = float(np.median([variance for _, variance, _ in leads.values()])) if leads else 0.0
    kept = {*losses.rank(candidates)[:FINALISTS], *losses.rank(baselines)[:FINALISTS]}

    def is_hopeless(lead: float, variance: float, freedom: int) -> bool:
        if not freedom:
            return False
        together = TYPICAL_FREEDOM + freedom
        variance = (TYPICAL_FREEDOM * typical + freedom * variance) / together
        return bound_mean(lead, variance, together, HOPELESS_LEVEL) > MOST_LOST

    return [name for name in methods if name not in kept and is_hopeless(*leads[name])]


def plan_screenings(counts: Sequence[int]) -> list[list[int]]:
    """Return the number of contexts of each task after every screening, of `counts` in all: some of every task.

    Examples:
        >>> plan_screenings([2, 30])
        [[1, 2], [1, 5], [1, 11]]
        >>> plan_screenings([5] * 9)
        [[1, 1, 1, 1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 2, 2]]
    """
    largest = max(counts)
    shares = [[-(-size * count // largest) for count in counts] for size in range(1, largest + 1)]
    # The smallest share of all tasks that has contexts enough; every task has some.
    ends = (next((share for share in shares if sum(share) >= least), list(counts)) for least in SCREENED_CONTEXTS)
    return [end for end, _ in groupby(ends)]


def plan_rounds(counts: Sequence[int]) -> list[list[int]]:
    """Return the contexts of each task evaluated after every round, of `counts` in all.

    Every round has contexts of every task. The first has `MIN_CONTEXTS_FOR_PROOF` at least, the others half as many
    more each.

    Examples:
        >>> plan_rounds([12, 24])  # contexts of two tasks after every round
        [[3, 5], [4, 7], [5, 10], [8, 15], [11, 22], [12, 24]]
    """
    largest = max(counts)
    rounds = [[0] * len(counts)]
    size = 1
    while size < largest:
        evaluated = [-(-size * count // largest) for count in counts]  # rounded up
        if sum(evaluated) >= MIN_CONTEXTS_FOR_PROOF and all(
            new > old for new, old in zip(evaluated, rounds[-1], strict=True)
        ):
            rounds.append(evaluated)
            size = max(size, int(ROUND_GROWTH * size) - 1)
        size += 1
    if any(count == old for count, old in zip(counts, rounds[-1], strict=True)):
        rounds.pop()  # a task would have nothing left for a last round
    return [*rounds[1:], list(counts)]


class Race:
    """A race of candidates and baselines over rounds of contexts; see the head of this file.

    `candidates` and `baselines` are still in the race, `scores` are all rounds of the methods of the last round, and
    `wealths` the log wealth of bets on every candidate as of its last round.
    `losses` have minus the losses of the right replies; None: methods are ranked by their scores. Methods in
    `reading_twice` read every prompt a second time.
    `winner` and `verdict` are None until the race ends. `best` is the foremost baseline, `bound` the one-sided bound at
    `Rule.sure` of what the foremost candidate scores above it, and `loss_bound` that of what it loses less.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        baselines: Sequence[str],
        rule: Rule,
        losses: Scores | None = None,
        reading_twice: Collection[str] = (),
    ) -> None:
        self.candidates = list(candidates)
        self.baselines = list(baselines)
        self.rule = rule
        self.losses = losses
        self.reading_twice = reading_twice
        self.scores: Scores | None = None
        self.wealths: dict[str, float] = {}
        self.best = ""
        self.bound = self.loss_bound = -math.inf
        self.winner: str | None = None
        self.verdict: RaceVerdict | None = None
        self._bettors: dict[tuple[str, str], Floats] = {}

    def eliminate(self, round_scores: Scores, *, is_last: bool, available: int) -> None:
        """Add the scores of a round, drop methods that cannot win any more, and end the race if it is decided.

        `available` is about how many contexts all rounds have; `is_last`: this round is the last of them.
        """
        scores = round_scores if self.scores is None else self.scores.concatenate(round_scores)
        self.scores = scores
        for name in self.candidates:
            for other in self.baselines:
                # Log wealths add up over rounds, whatever has been looked at in between: that is what makes peeking
                # safe.
                before = self._bettors.get((name, other), 0.0)
                self._bettors[name, other] = before + compute_log_wealths(make_bets(round_scores, name, other))
            against = np.stack([self._bettors[name, other] for other in self.baselines])
            # To beat the baselines is to beat each of them, so the poorest bet counts.
            self.wealths[name] = float(mix_bettors(against).min())
        # Bets are kept of those who leave, too: evidence is adjusted for all that ever ran.
        self._drop(scores)
        self.best = self.rank(self.baselines)[0]
        leader = self.rank(self.candidates)[0] if self.candidates else None
        if leader is None:
            if is_last or len(self.baselines) == 1:
                self._end(self.best, "baseline")
            return
        self.bound = bound_lead(scores, leader, self.best, self.rule.sure)
        # Losses rank, and their bound is a second way to be likely better.
        if self.losses is not None:
            self.loss_bound = bound_lead(self.losses, leader, self.best, self.rule.sure)
        # Proof ends a race at any round; without one it goes on as long as one is in reach.
        if self.evidence(leader) >= -math.log(self.rule.level) and len(scores.tasks) >= MIN_CONTEXTS_FOR_PROOF:
            self._end(leader, "beats")
        elif is_last or (self._is_decided(leader) and self._is_out_of_reach(leader, available)):
            if self.rule.writes_likely and max(self.bound, self.loss_bound) > 0:
                self._end(leader, "likely")
            elif self.rule.writes_likely and self._is_cheaper(leader):
                self._end(leader, "cheaper")
            else:
                self._end(self.best, "baseline")

    def rank(self, names: Sequence[str]) -> list[str]:
        """Rank candidates or baselines, the foremost first."""
        ranking = assert_present(self.scores, "no round was judged") if self.losses is None else self.losses
        return ranking.rank(names)

    def evidence(self, name: str) -> float:
        """Return the log evidence for a candidate, adjusted for all candidates."""
        names = list(self.wealths)
        return float(adjust_for_several(np.array(list(self.wealths.values())))[names.index(name)])

    def _is_decided(self, leader: str) -> bool:
        """Tell whether losses separate the leader from the best baseline or show that they are the same, or scores do.

        Races without losses go on for a proof: then scores alone say who leads, and the best of many looks too good.
        """
        if self.losses is None:
            return False
        scores = assert_present(self.scores, "no round was judged")
        if bound_lead(scores, leader, self.best, ELIMINATION_LEVEL) > 0:
            return True
        behind = bound_lead(self.losses, self.best, leader, self.rule.sure)
        is_same = min(self.loss_bound, behind) > -SAME_LOSS
        return max(self.loss_bound, behind) > 0 or is_same or self._is_cheaper(leader)

    def _is_cheaper(self, leader: str) -> bool:
        """Tell whether the leader loses no more than the best baseline, and spares its second reading of prompts."""
        spares_reading = self.best in self.reading_twice and leader not in self.reading_twice
        return spares_reading and self.loss_bound > -SAME_LOSS

    def _is_out_of_reach(self, leader: str, available: int) -> bool:
        """Tell whether the evidence for the leader grows too slowly for a proof."""
        contexts = len(assert_present(self.scores, "no round was judged").tasks)
        return contexts >= MIN_CONTEXTS_TO_GIVE_UP and self.evidence(leader) * available / contexts < -math.log(
            self.rule.level
        )

    def _drop(self, scores: Scores) -> None:
        # Compared with the best of each kind only: whoever is behind one of these cannot win.
        ahead = [scores.rank(kind)[0] for kind in (self.candidates, self.baselines) if kind]

        def stays(name: str, others: Sequence[str]) -> bool:
            return all(bound_lead(scores, other, name, ELIMINATION_LEVEL) <= 0 for other in others if other != name)

        self.candidates = [name for name in self.candidates if stays(name, ahead)]
        # Baselines leave by baselines: candidates have to beat the best of them.
        self.baselines = [name for name in self.baselines if stays(name, ahead[-1:])]

    def _end(self, winner: str, verdict: RaceVerdict) -> None:
        self.winner = winner
        self.verdict = verdict
