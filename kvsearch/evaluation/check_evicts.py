"""Whether anything is evicted at all: strategies that keep every prompt whole score the same, which says nothing."""

from __future__ import annotations

from kvsearch.errors import UsageError
from kvsearch.evaluation.compare import FULL, Evaluation
from kvsearch.plan import Size
from kvsearch.runtime import Program
from kvsearch.tasks.readings import Reading, readings


def check_eviction(evaluation: Evaluation, size: Size) -> str | None:
    """Return a note if some strategies evict nothing from prompts that are too short; None if all evict from all.

    `size` is the size of all strategies, for the words.

    Raises:
        UsageError: no strategy evicts anything from any prompt.
    """
    programs = [one.program for one in evaluation.methods if one.label != FULL]
    asked = [reading for task in evaluation.encoded for reading in readings(task.prompts, evaluation.settings.protocol)]
    ends = [(len(reading.ids), _end(reading)) for reading in asked]
    lengths, last = zip(*ends, strict=True)
    if all(_evicts(program, min(lengths), min(last)) for program in programs):
        return None  # then they evict from longer ones, too
    idle = {end: [number for number, one in enumerate(programs) if not _evicts(one, *end)] for end in set(ends)}
    whole = {number for found in idle.values() for number in found}
    if all(len(found) == len(programs) for found in idle.values()):
        raise UsageError(
            f"{size.words}: nothing would be evicted from any prompt, the longest has {max(lengths)} tokens; give a "
            "smaller --budget, or longer contexts (--length of synthetic ones)"
        )
    short = [length for length, end in ends if idle[length, end]]
    return (
        f"{size.words}: {len(short)} of {len(asked)} prompts are so short, up to {max(short)} tokens, that "
        f"{len(whole)} of {len(programs)} strategies evict nothing from them"
    )


def idle_methods(evaluation: Evaluation) -> list[str]:
    """Return the labels of methods, the full cache aside, that evict nothing from any prompt."""
    asked = [reading for task in evaluation.encoded for reading in readings(task.prompts, evaluation.settings.protocol)]
    ends = {(len(reading.ids), _end(reading)) for reading in asked}
    return [
        one.label
        for one in evaluation.methods
        if one.name != FULL and not any(_evicts(one.program, *end) for end in ends)
    ]


def _end(reading: Reading) -> int:
    """Return tokens of a prompt with its longest question and reply."""
    return max(
        len(reading.prompt.context) + len(question.ids) + question.query.max_new_tokens
        for question in reading.questions
    )


def _evicts(program: Program, length: int, end: int) -> bool:
    """Return whether a program drops anything from a prompt of `length` tokens until there are `end` of them."""
    prefill, decode = program.prefill, program.decode
    if prefill is not None and prefill.entries(length) < prefill.table(length).size * length:
        return True
    rows = () if decode is None else zip(decode.table(length).tolist(), sorted(decode.policies.items()), strict=True)
    return any(budget < end and not policy.exempt(budget, end) for row, (_, policy) in rows for budget in row)
