"""What an evaluation, a selection, a validation, a search and a run found, in a sentence each."""

from __future__ import annotations

from itertools import groupby
from statistics import fmean

from kvsearch.choose.selection import SelectionResult
from kvsearch.choose.verdicts import Validation
from kvsearch.evaluation.averages import SizeBlock
from kvsearch.report.asked import asked_words
from kvsearch.report.files.evaluation import StoredEvaluation
from kvsearch.report.files.perplexity import StoredPerplexity
from kvsearch.report.files.replies import Replies
from kvsearch.report.files.search import StoredSearch, Trace
from kvsearch.report.files.selection import StoredRun
from kvsearch.report.headroom import MEANING, HeadroomResult
from kvsearch.report.numbers import bounds, counted, interval, percent
from kvsearch.report.page.story import Story, sentence
from kvsearch.report.selection import decision, gap
from kvsearch.report.speed import MEANING as MEANING_OF_SPEED
from kvsearch.report.speed import SpeedView
from kvsearch.report.validation import verdict_lines
from kvsearch.runs.estimates import Estimate
from kvsearch.search.names import EVOLVED
from kvsearch.strategies.names import FULL


def evaluation_story(found: StoredEvaluation) -> Story:
    """Return which method scores highest at each size."""
    names = {name for block in found.blocks for name in block.methods}
    sizes = [block.size.words for block in found.blocks if block.size is not None]
    at = f" at {_listed(sizes)}" if sizes else ", as large as the plan"
    asked = f"Which of {counted(len(names), 'method')} keeps the full cache's score{at}? {asked_words(found.coverage)}"
    full = found.blocks[0].overall.scores[FULL]
    notes = [found.different] if found.different else []
    winners = [(*_best(block), block) for block in found.blocks]
    groups = [(name, [(told, block) for _, told, block in some]) for name, some in groupby(winners, lambda one: one[0])]
    told = "; ".join(_winner(name, some) for name, some in groups)
    return Story(asked, sentence(f"{told}; the full cache scores {_score(full)}"), (*notes, *found.notes))


def _best(block: SizeBlock) -> tuple[str, str]:
    """Return which method of a size scores highest, and its score, above that of the method all are compared with."""
    row = block.overall
    label = max(block.methods.values(), key=lambda one: row.scores[one].mean)
    name = next(name for name, one in block.methods.items() if one == label)
    score = percent(row.scores[label].mean, 1)
    if label == block.subject:
        return name, f"{score} {bounds(row.scores[label], '.1f')}"
    subject = next((name for name, one in block.methods.items() if one == block.subject), FULL)
    return name, f"{score}, {interval(block.difference(row, label), '+.1f')} points on {subject}"


def _winner(name: str, found: list[tuple[str, SizeBlock]]) -> str:
    """Say at which sizes a method scores highest, and what."""
    sizes = [block.size.words for _, block in found if block.size is not None]
    return f"{name} scores highest{f' at {_listed(sizes)}' if sizes else ''}: {'; '.join(told for told, _ in found)}"


def perplexity_story(found: StoredPerplexity) -> Story:
    """Return which method loses least per token."""
    rows = [row for row in found.rows if row.method != FULL]
    asked = f"What does {found.result.model} lose per token of text?"
    if not rows:
        return Story(asked)
    best = min(rows, key=lambda row: row.nll.mean)
    return Story(asked, f"{best.method} loses least: {best.nll.mean:.4f} nats per token.")


def headroom_story(found: HeadroomResult) -> Story:
    """Return what the best cache there is would keep of the score."""
    shares = {name: share for name, share in found.shares.items() if name != FULL}
    listed = ", ".join(f"{name} {percent(share, 0)}%" for name, share in shares.items())
    asked = f"How much of the score can be kept with {percent(found.ratio, 0)}% evicted? {asked_words(found.asked)}"
    return Story(asked, f"Of the full cache's score: {listed}.", MEANING)


def speed_story(found: SpeedView) -> Story:
    """Return what each cache but the one they are compared with gains at the largest workload."""
    batch, length = max((one.batch, one.length) for one in found.costs)
    gains = [
        f"{one.cache} decodes {one.token_speedup:.2f} times as fast and holds {one.held_bytes / 1e6:,.1f} MB"
        for one in found.costs
        if (one.batch, one.length) == (batch, length)
    ][1:]
    asked = f"What do caches cost beside {found.costs[0].cache}? {found.measured()}"
    return Story(asked, sentence(f"Batch {batch}, {length:,} tokens: {'; '.join(gains)}"), MEANING_OF_SPEED)


def validation_story(found: Validation) -> Story:
    """Return the verdict on every signal."""
    parts = []
    for at in found.budgets:
        judged = sorted(at.signals, key=lambda one: one.verdict)
        verdicts = [
            f"{verdict}: {', '.join(one.words for one in some)}"
            for verdict, some in groupby(judged, key=lambda one: one.verdict)
        ]
        parts.append(f"{at.size}: {'; '.join(verdicts)}" if len(found.budgets) > 1 else "; ".join(verdicts))
    asked = "Is a signal worth more than its inverse, a uniform strategy and random ones of the same size?"
    remarks = tuple(line for at in found.budgets for line in verdict_lines(at))
    answer = ". ".join(part[:1].upper() + part[1:] for part in parts)
    return Story(asked, sentence(answer), remarks)


def selection_story(found: tuple[SelectionResult, ...]) -> Story:
    """Return what was chosen at each size, and what fresh questions say of it."""
    several = len(found) > 1
    sizes = [one.size.words for one in found]
    answers = [f"{f'{one.size.words}: ' if several else ''}{decision(one.chosen)}" for one in found]
    asked = f"Does a strategy of this profile beat every baseline at {_listed(sizes)}?"
    return Story(asked, sentence("; ".join(answers)), tuple(map(gap, found)))


def run_story(found: StoredRun) -> Story:
    """Return what a run chose at each size."""
    sizes = [one.selection.size.words for one in found.choices]
    answers = [one.words[0] for one in found.choices if one.words]
    remarks = tuple(line for one in found.choices for line in one.words[1:])
    return Story(f"What is the best plan of {_listed(sizes)}?", sentence("; ".join(answers)), remarks)


def search_story(found: StoredSearch) -> Story:
    """Return what a search chose at each budget, or how far it is."""
    trace, result = found.trace, found.result
    if result is None:
        return Story("Which budgets serve the tasks best?", _progress(trace) if trace else "")
    budgets = _listed([str(budget) for budget in result.found])
    tasks = asked_words(result.asked["report"]) if "report" in result.asked else ""
    asked = f"Which budgets serve the tasks best, at {budgets} entries per kv head? {tasks}".strip()
    several = len(result.found) > 1
    answers, reported = [], []
    for budget, one in result.found.items():
        size = f"{budget} entries per kv head: " if several else ""
        chosen = (
            one.decision or f"{one.chosen} was chosen, {_score(one.finalists[one.chosen].score)} on the second split"
        )
        answers.append(f"{size}{chosen}")
        others = {name: score for name, score in one.report.items() if name not in (EVOLVED, FULL)}
        best = max(others, key=lambda name: others[name].mean)
        told = [f"{name} {_score(one.report[name])}" for name in (EVOLVED, best, FULL)]
        reported.append(f"{size}report split: {', '.join(told)}")
    spent = f"{counted(result.evaluations, 'candidate')}, {result.tokens:,} tokens"
    return Story(asked, sentence("; ".join(answers)), (*reported, *([_progress(trace)] if trace else [spent])))


def _progress(trace: Trace) -> str:
    best = f"; the best is worth {trace.steps[-1].value:.6g}" if trace.steps else ""
    return f"{counted(trace.evaluations, 'candidate')}, {trace.tokens:,} tokens, {trace.seconds:.0f} s of work{best}."


def replies_story(found: Replies) -> Story:
    """Return how far an evaluation is."""
    scores = fmean(one.score for one in found.methods.values()) if found.methods else 0.0
    asked = f"What do {counted(len(found.methods), 'method')} score?"
    return Story(asked, f"{found.count:,} replies so far, {percent(scores, 1)} on the mean." if found.methods else "")


def _score(found: Estimate) -> str:
    return f"{percent(found.mean, 1)} {bounds(found, '.1f')}"


def _listed(words: list[str]) -> str:
    """Join sizes; what they end with is said once."""
    numbers = [word.partition(" ") for word in words]
    if len(words) > 1 and len({rest for _, _, rest in numbers}) == 1:
        *most, last = [first for first, _, _ in numbers]
        return f"{', '.join(most)} and {last} {numbers[0][2]}".strip()
    return ", ".join(words)
