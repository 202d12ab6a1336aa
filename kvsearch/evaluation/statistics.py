"""Means, paired differences and their 95% intervals over contexts, and blocks of one size.

Questions about one context are not independent, so contexts are what is counted. A mean weighs every task the same, and
its variance is the sum of those by task (linearised, as a task's mean is a ratio: scores over questions). Few contexts
near the end of a scale hardly differ although others would. So an interval counts one more context at either end of it,
as heavy as the heaviest one: of scores all wrong and all right, of differences all lost and all won (the adjusted Wald
intervals of Agresti and Caffo 2000, and of Bonett and Price 2012 for pairs), and takes Student's t over all of them.
What it covers: benchmarks/study_intervals.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import InternalError
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import Contexts, Sample
from kvsearch.plan import Size
from kvsearch.runs.estimates import Difference, Estimate, TextLoss
from kvsearch.tasks.metrics.likelihood import read_losses
from kvsearch.tasks.retain import RETAIN

if TYPE_CHECKING:
    from kvsearch.evaluation.ready_methods import ReadyMethod
    from kvsearch.tasks.encode import TaskPrompts

CONFIDENCE = 0.95
MIN_CONTEXTS_FOR_INTERVAL: Final = 5  # fewer make no interval
SCORE_ENDS: Final = (0.0, 1.0)
DIFFERENCE_ENDS: Final = (-1.0, 1.0)
AVERAGE = "average"
MACRO = "macro"  # the plain mean over all tasks
RETAINED: Final = "retained"  # the mean share that is kept of what the full cache does of the tasks `RETAIN`
LEAST_DONE: Final = 0.5  # of the cases of such a task, else nothing is there to be kept

Kind = Literal["task", "category", "average"]
# what the questions of each context of a task add up to, [..., contexts], and how many they are, [contexts]
ContextSums = tuple[Floats, Floats | Ints]


@dataclass(frozen=True)
class Row:
    """One task, or the plain mean over the tasks of a category or over all tasks.

    A category's row of a task counts only the questions of that category.

    Scores are per method, differences between the subject and each other method. Means give every task the same weight;
    wins, ties and losses are sums over its questions. `nats` are per method, too, where all tasks are teacher-forced.
    """

    task: str
    kind: Kind
    questions: int
    scores: dict[str, Estimate]
    differences: dict[str, Difference]
    nats: Annotated[dict[str, TextLoss], Field(exclude_if=lambda nats: not nats)] = field(default_factory=dict)


class TaskScores(NamedTuple):
    """The scores of one task's questions: an array [questions] per method, all in the same order.

    `losses` are per method, of teacher-forced answers: the method's and the full cache's, [2, questions].
    """

    categories: tuple[str, ...]  # [questions]
    contexts: Ints  # [questions]: which context each belongs to
    by_method: dict[str, Floats]
    losses: dict[str, Floats]  # nats per token; empty of tasks that are replied to

    def of(self, category: str) -> TaskScores:
        """Return the scores of one category's questions."""
        in_category = np.array([label == category for label in self.categories])
        if in_category.all():
            return self
        _, contexts = np.unique(self.contexts[in_category], return_inverse=True)
        scores_of_category = {method: scores[in_category] for method, scores in self.by_method.items()}
        losses = {method: values[:, in_category] for method, values in self.losses.items()}
        return TaskScores((category,) * len(contexts), contexts, scores_of_category, losses)

    def sum_by_context(self, scores: Floats) -> ContextSums:
        """Return what scores [questions] add up to in each context, and how many questions it has."""
        return np.bincount(self.contexts, scores).astype(np.float64), np.bincount(self.contexts)

    def average_by_context(self, values: Floats) -> Floats:
        """Return the mean of values [questions] over the questions of each context, [contexts]."""
        sums, questions = self.sum_by_context(values)
        means: Floats = sums / questions
        return means

    def by_context(self) -> tuple[dict[str, Floats], Ints]:
        """Return sums over the questions of each context, by method, and how many questions it has; all [contexts]."""
        return {m: self.sum_by_context(scores)[0] for m, scores in self.by_method.items()}, np.bincount(self.contexts)


def count_contexts(encoded: Iterable[TaskPrompts]) -> int:
    """Count the contexts of tasks."""
    return sum(task.distinct for task in encoded)


def share_level(confidence: float, statements: int) -> float:
    """Return the confidence of each of several statements with which they hold together (Bonferroni)."""
    return 1 - (1 - confidence) / statements


def find_student_quantile(freedom: float) -> float:
    """Return how many standard errors a 95% interval reaches to either side, by Student's t with `freedom` degrees."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def compute_interval(tasks: Sequence[ContextSums], ends: tuple[float, float]) -> tuple[Floats, Floats]:
    """Return the ends [...] of the 95% interval of the mean over tasks, of values between the `ends` of their scale.

    A task with one context has the largest variance that its scale allows.
    """
    mean = np.zeros(tasks[0][0].shape[:-1])
    variance = np.zeros_like(mean)
    weight = 0.0  # of the heaviest context
    contexts = 0
    for sums, sizes in tasks:
        count = len(sizes)
        questions = sizes.sum()
        task_mean = sums.sum(-1) / questions
        deviations = (sums - task_mean[..., None] * sizes) / questions
        task_variance = (deviations**2).sum(-1) * count / (count - 1) if count > 1 else ((ends[1] - ends[0]) / 2) ** 2
        mean = mean + task_mean / len(tasks)
        variance = variance + task_variance / len(tasks) ** 2
        weight = max(weight, float(sizes.max() / questions) / len(tasks))
        contexts += count
    low, high = ends[0] - mean, ends[1] - mean  # how far the two contexts at the ends are off
    whole = 1 + 2 * weight
    middle = mean + weight * (low + high) / whole
    variance = variance + weight**2 * (low**2 + high**2)
    reach = find_student_quantile(contexts + 2 - len(tasks)) * np.sqrt(variance) / whole
    return np.maximum(middle - reach, ends[0]), np.minimum(middle + reach, ends[1])


def estimate_by_student(*tasks: Floats) -> Estimate:
    """Return the mean over tasks of the means of values [contexts], with its interval by Student's t alone.

    It needs no ends of a scale, so a task with one context, which says nothing of its variance, leaves no interval.
    """
    count = sum(map(len, tasks))
    mean = float(np.mean([values.mean() for values in tasks]))
    reach = math.nan
    if count >= MIN_CONTEXTS_FOR_INTERVAL and min(map(len, tasks)) > 1:
        error = math.sqrt(sum(float(values.var(ddof=1)) / len(values) for values in tasks)) / len(tasks)
        reach = find_student_quantile(count - len(tasks)) * error
    return Estimate(mean, mean - reach, mean + reach, contexts=count)


def summarize(samples: Sequence[Sample], subject: str, contexts: Contexts | None = None) -> list[Row]:
    """Return rows of all tasks, then of their categories where there are several; the last row is of all together.

    `subject` is the method the differences are about. `contexts` say what is one context, by task and key (None: every
    key is one).

    Raises:
        InternalError: the methods did not answer the same questions.
    """
    tasks = group_scores(samples, contexts)
    rows = [_make_row(name, "task", [scores], subject) for name, scores in tasks.items()]
    categories = dict.fromkeys(category for scores in tasks.values() for category in scores.categories)
    for category in categories if len(categories) > 1 else ():
        parts = [scores.of(category) for scores in tasks.values() if category in scores.categories]
        rows.append(_make_row(category, "category", parts, subject))
    if len(rows) > 1:
        rows.append(_make_row(AVERAGE, "average", list(tasks.values()), subject))
    return rows


def contrast_scores(
    samples: Sequence[Sample], weights: Mapping[str, float], contexts: Contexts | None = None
) -> Difference:
    """Return the weighted sum of the scores of some methods, question by question, averaged as `summarize` does.

    With weights of 1 and -1 that is their paired difference, with 1 and several of -1/n the difference to a mean.

    Raises:
        InternalError: the methods did not answer the same questions.
    """
    tasks = list(group_scores([sample for sample in samples if sample.method in weights], contexts).values())
    ends = DIFFERENCE_ENDS if any(weights.values()) else (0.0, 0.0)  # nothing differs from itself
    sums = [sum(weight * task.by_method[method] for method, weight in weights.items()) for task in tasks]
    # a tie stays one whatever the weights
    return _compare_paired(tasks, [np.where(np.abs(total) < 1e-12, 0.0, total) for total in sums], ends)


def estimate(samples: Sequence[Sample], contexts: Contexts | None = None) -> Estimate:
    """Return the mean score of one method over all tasks, with its interval, as `summarize` does."""
    method = samples[0].method
    return summarize(samples, method, contexts)[-1].scores[method]


def group_scores(samples: Sequence[Sample], contexts: Contexts | None = None) -> dict[str, TaskScores]:
    """Group scores by task; `contexts` as for `summarize`.

    Raises:
        InternalError: the methods did not answer the same questions.
    """
    return {task: _fill_scores(samples, task, contexts) for task in dict.fromkeys(sample.task for sample in samples)}


def _fill_scores(samples: Sequence[Sample], task: str, contexts: Contexts | None) -> TaskScores:
    task_samples = [sample for sample in samples if sample.task == task]
    named = {sample.key: sample.key if contexts is None else contexts[task, sample.key] for sample in task_samples}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(named.values()))}
    categories = {(sample.key, sample.question): sample.category for sample in task_samples}
    questions = {question: n for n, question in enumerate(categories)}
    by_method = {m: np.full(len(questions), np.nan) for m in dict.fromkeys(sample.method for sample in task_samples)}
    for sample in task_samples:
        by_method[sample.method][questions[sample.key, sample.question]] = sample.score
    if len(task_samples) != len(questions) * len(by_method) or any(
        np.isnan(scores).any() for scores in by_method.values()
    ):
        raise InternalError(f"task {task}: the methods did not answer the same questions once each")
    places = np.array([numbers[named[key]] for key, _ in questions])
    return TaskScores(tuple(categories.values()), places, by_method, _read_losses(task_samples, questions))


def _read_losses(samples: Sequence[Sample], questions: Mapping[tuple[str, int], int]) -> dict[str, Floats]:
    """Read the losses that stand in place of one task's replies, see `TaskScores.losses`."""
    by_method: dict[str, Floats] = {}
    for sample in samples:
        losses = read_losses(sample.reply)
        if losses is None:
            return {}
        pairs = by_method.setdefault(sample.method, np.empty((2, len(questions))))
        pairs[:, questions[sample.key, sample.question]] = losses
    return by_method


def _make_row(label: str, kind: Kind, tasks: Sequence[TaskScores], subject: str) -> Row:
    methods = tasks[0].by_method
    scores = {method: _estimate(tasks, [task.by_method[method] for task in tasks], SCORE_ENDS) for method in methods}
    differences = {
        method: _compare_paired(tasks, [task.by_method[subject] - task.by_method[method] for task in tasks])
        for method in (methods if subject in methods else ())
        if method != subject
    }
    nats = _compare_losses(tasks, subject) if all(task.losses for task in tasks) else {}
    return Row(label, kind, sum(len(task.contexts) for task in tasks), scores, differences, nats)


def _compare_losses(tasks: Sequence[TaskScores], subject: str) -> dict[str, TextLoss]:
    """Return the losses of every method on tasks that are all teacher-forced."""

    def excess(task: TaskScores, method: str) -> Floats:
        loss, full = task.losses[method]
        return task.average_by_context(loss - full)

    losses = {}
    for method in tasks[0].losses:
        difference = None
        if method != subject and subject in tasks[0].losses:
            difference = estimate_by_student(*(excess(task, method) - excess(task, subject) for task in tasks))
        losses[method] = TextLoss(
            estimate_by_student(*(task.average_by_context(task.losses[method][0]) for task in tasks)),
            estimate_by_student(*(excess(task, method) for task in tasks)),
            difference,
        )
    return losses


def _estimate(tasks: Sequence[TaskScores], scores: Sequence[Floats], ends: tuple[float, float]) -> Estimate:
    """Return the mean over tasks of the scores [questions] of each, on a scale with these ends."""
    mean = float(np.mean([of_task.mean() for of_task in scores]))
    sums = [task.sum_by_context(of_task) for task, of_task in zip(tasks, scores, strict=True)]
    contexts = sum(len(sizes) for _, sizes in sums)
    low, high = compute_interval(sums, ends) if contexts >= MIN_CONTEXTS_FOR_INTERVAL else (math.nan, math.nan)
    return Estimate(mean, float(low), float(high), contexts=contexts)


def _compare_paired(
    tasks: Sequence[TaskScores], differences: Sequence[Floats], ends: tuple[float, float] = DIFFERENCE_ENDS
) -> Difference:
    """Return the mean over tasks of paired differences [questions], and how many questions were won, tied and lost."""
    signs = np.sign(np.concatenate(differences))
    wins, ties, losses = (int((signs == sign).sum()) for sign in (1, 0, -1))
    return Difference(**asdict(_estimate(tasks, differences, ends)), wins=wins, ties=ties, losses=losses)


def _relate_to_full(task: TaskScores) -> dict[str, Floats]:
    """Return scores [questions] as shares of the full cache's mean, by method.

    A share is a ratio of two means over the same questions, so its deviations are the linearised ones: the mean is the
    ratio, and a question that the method answers just as the full cache does deviates where the ratio is not one.
    """
    full = task.by_method[FULL]
    mean = full.mean()
    shares = {method: scores.mean() / mean for method, scores in task.by_method.items()}
    return {
        method: shares[method] + (scores - shares[method] * full) / mean for method, scores in task.by_method.items()
    }


def find_retained(tasks: Mapping[str, TaskScores]) -> dict[str, TaskScores]:
    """Return the tasks `RETAIN` on which the full cache scores half or more: a share of less would say nothing."""
    return {
        name: task
        for name, task in tasks.items()
        if {*task.categories} == {RETAIN} and task.by_method[FULL].mean() >= LEAST_DONE
    }


def summarize_retained(samples: Sequence[Sample], subject: str, contexts: Contexts | None = None) -> Row | None:
    """Return the row `RETAINED`: scores relative to the full cache's, the mean over the tasks of `find_retained`.

    Differences are of these shares; None without such a task. Arguments as for `summarize`.
    """
    tasks = list(find_retained(group_scores(samples, contexts)).values())
    if not tasks:
        return None
    row = _make_row(RETAINED, "average", tasks, subject)
    shares = [_relate_to_full(task) for task in tasks]
    ceiling = float(np.mean([1 / task.by_method[FULL].mean() for task in tasks]))
    scores = {method: _estimate(tasks, [share[method] for share in shares], (0.0, ceiling)) for method in row.scores}
    scores[FULL] = replace(scores[FULL], low=1.0, high=1.0)  # by definition
    differences = {
        method: replace(
            difference,
            **asdict(_estimate(tasks, [share[subject] - share[method] for share in shares], (-ceiling, ceiling))),
        )
        for method, difference in row.differences.items()
    }
    return replace(row, scores=scores, differences=differences)


def measure_retained_gap(samples: Sequence[Sample], method: str, contexts: Contexts | None = None) -> Estimate | None:
    """Return by how much a method keeps more of the other tasks' scores than of the tasks `RETAIN`.

    Both are shares of the full cache's score, question by question, and each task counts the same on its side; the
    interval is Student's. None without tasks of both kinds on which the full cache scores anything.
    """
    tasks = group_scores([sample for sample in samples if sample.method in (FULL, method)], contexts)
    retained = find_retained(tasks).values()
    others = [
        task
        for task in tasks.values()
        if RETAIN not in task.categories and not task.losses and task.by_method[FULL].mean() > 0
    ]
    if not (retained and others):
        return None
    sides = [(others, 1), (retained, -1)]
    count = len(others) + len(retained)
    return estimate_by_student(
        *(
            task.average_by_context(_relate_to_full(task)[method]) * (sign * count / len(side))
            for side, sign in sides
            for task in side
        )
    )


@dataclass(frozen=True)
class TraceLength:
    """The length of a method's replies to one task in tokens: the mean, and how many replies reached the limit.

    `longer` is the mean difference to the full cache's replies, paired by question (None for the full cache itself).
    """

    tokens: Estimate
    longer: Estimate | None
    at_limit: int

    @classmethod
    def by_method(
        cls, samples: Sequence[Sample], tasks: Sequence[TaskPrompts], contexts: Contexts | None = None
    ) -> dict[str, dict[str, TraceLength]]:
        """Measure the length of replies, by method and traced task; means and intervals are over contexts."""
        result: dict[str, dict[str, TraceLength]] = {}
        for task in tasks:
            if not task.task.traced:
                continue
            name = task.task.name
            limits = {
                (prompt.key, question.number): question.query.max_new_tokens
                for prompt in task.prompts
                for question in prompt.questions
            }
            token_counts = [
                replace(sample, score=float(sample.reply_tokens)) for sample in samples if sample.task == name
            ]
            cut = Counter(
                sample.method for sample in token_counts if sample.reply_tokens >= limits[sample.key, sample.question]
            )
            lengths = _fill_scores(token_counts, name, contexts)
            means = {method: lengths.average_by_context(tokens) for method, tokens in lengths.by_method.items()}
            for method, mean in means.items():
                longer = None if method == FULL else estimate_by_student(mean - means[FULL])
                result.setdefault(method, {})[name] = cls(estimate_by_student(mean), longer, cut[method])
        return result


@dataclass(frozen=True)
class SizeBlock:
    """Methods of one size (None: of plans and their baselines), by name and label; the full cache is in all blocks.

    The rows are the tasks, then categories if there are several, then the named averages, and `RETAINED`, if that can
    be said.
    """

    size: Size | None
    methods: dict[str, str]
    subject: str  # its label
    rows: list[Row]

    @property
    def overall(self) -> Row:
        """The mean over all tasks."""
        return next(row for row in self.rows if (row.kind, row.task) == ("average", MACRO))

    def difference(self, row: Row, label: str) -> Difference:
        """Return a method minus the subject: the paired difference, and the questions it wins, ties and loses."""
        lead = row.differences[label]
        # 0.0 - x, not -x: there is a zero with a sign
        turned = replace(lead, mean=0.0 - lead.mean, low=0.0 - lead.high, high=0.0 - lead.low)
        return replace(turned, wins=lead.losses, losses=lead.wins)


def make_blocks(
    samples: Sequence[Sample],
    methods: Sequence[ReadyMethod],
    subject: str,
    averages: Mapping[str, Sequence[str]],
    contexts: Contexts | None = None,
) -> list[SizeBlock]:
    """Return a block per size, in the order of the methods; `subject` is a name, `contexts` as for `summarize`."""
    others = [method for method in methods if method.name != FULL]
    blocks = []
    for size, group in groupby(others, key=lambda method: method.size):
        labels = {method.name: method.label for method in group}
        label = {**labels, FULL: FULL}[subject]
        compared = [sample for sample in samples if sample.method in {FULL, *labels.values()}]
        *rows, last = summarize(compared, label, contexts)
        whole = {frozenset(averages[MACRO]): last}
        rows = [row for row in (*rows, last) if row.kind != "average"]
        for name, tasks in averages.items():
            chosen = frozenset(tasks)
            if chosen not in whole:
                whole[chosen] = summarize([sample for sample in compared if sample.task in chosen], label, contexts)[-1]
            rows.append(replace(whole[chosen], task=name, kind="average"))
        if (retained := summarize_retained(compared, label, contexts)) is not None:
            rows.append(retained)
        blocks.append(SizeBlock(size, labels, label, rows))
    return blocks
