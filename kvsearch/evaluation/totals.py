"""Checks that methods keep as many entries as their sizes say on given prompts, and that they evict anything at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.ready_methods import ReadyMethod
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Size
from kvsearch.runtime import Program
from kvsearch.runtime.program import PhaseProgram
from kvsearch.tasks.encode import make_readings

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation


def check_totals(loaded: LoadedModel, methods: Sequence[ReadyMethod], lengths: Iterable[int]) -> list[str]:
    """Check how many entries methods keep of prompts of these `lengths`, one per prompt; plans are not checked.

    Returns notes about prompts that are too short for a ratio.

    Raises:
        UsageError: a method holds more than its size allows in some phase, or its ratio leaves less of every prompt
            than its policy always keeps.
    """
    shape, counts, notes = describe(loaded.model), Counter(lengths), list[str]()
    heads = len(shape.full_layers) * shape.kv_heads
    for method in methods:
        if method.size is not None and "plan" not in method.definition:
            notes += _check_short_prompts(method, method.size, counts, heads)
            for length in sorted(counts):
                _check_total(method, method.size, length, heads)
    return notes


def decode_entries(phase: PhaseProgram, length: int) -> int:
    """Return the entries of all governed layers and heads that a decode phase allows after `length` prompt tokens.

    A head that is never evicted counts as one more than the longest of the others and the prompt.
    """
    table = np.array(phase.table(length))
    # One more than any head that evicts can hold: what never evicts is above all sizes.
    grown = max(length, int(table.max())) + 1
    for row, (_, policy) in enumerate(sorted(phase.policies.items())):
        table[row] = [grown if policy.keeps_all(budget, grown) else budget for budget in table[row].tolist()]
    return int(table.sum())


def _check_total(method: ReadyMethod, size: Size, length: int, heads: int) -> None:
    total = size.held(length, heads)
    prefill, decode = method.program.prefill, method.program.decode
    sizes = [] if prefill is None else [("of", prefill.entries(length), min(total, length * heads))]
    sizes += [] if decode is None else [("while it replies to", decode_entries(decode, length), total)]
    for where, held, wanted in sizes:
        if held != wanted:
            raise UsageError(
                f"method {method.name} would hold {held} entries {where} a prompt of {length} tokens, {size.words} "
                f"are {wanted}: it never evicts some heads, leave it out or change its settings"
            )


def _check_short_prompts(method: ReadyMethod, size: Size, counts: Counter[int], heads: int) -> Iterator[str]:
    """Raise UsageError if a ratio leaves less of every prompt than the policy always keeps; if of some, note it."""
    policy = max(method.program.policies, key=lambda policy: policy.least)
    always_kept = policy.least
    short = sorted(length for length in counts if size.held(length, heads) < always_kept * heads)
    if size.budget is not None or not short:
        return
    if len(short) == len(counts):
        given = size.held(short[-1], heads) / heads
        raise UsageError(
            f"method {method.name}: ratio {size} leaves {given:.4g} entries per kv head of a prompt of {short[-1]} "
            f"tokens, which is below the {always_kept} that {policy.name} always keeps ({policy.sink_count} sinks, "
            f"{policy.recent_count} recent): keep more, or lower them with --set"
        )
    few = sum(counts[length] for length in short)
    yield (
        f"{method.name} at ratio {size}: {few} of {counts.total()} prompts ({short[0]} to {short[-1]} tokens) are "
        f"so short that it holds less than the {always_kept} entries per kv head that {policy.name} always keeps"
    )


def check_eviction(evaluation: Evaluation, size: Size) -> str | None:
    """Return a note if some strategies evict nothing from prompts that are too short; None if all evict from all.

    `size` is the size of all strategies, for the words.

    Raises:
        UsageError: no strategy evicts anything from any prompt.
    """
    programs = [method.program for method in evaluation.methods if method.label != FULL]
    ends = _list_ends(evaluation)
    # By prompt and by its end, as a decode phase may drop what the prompt had room for.
    idle = {
        end: [number for number, program in enumerate(programs) if not _drops_entries(program, *end)]
        for end in set(ends)
    }
    whole = {number for numbers in idle.values() for number in numbers}
    if not whole:
        return None
    if all(len(numbers) == len(programs) for numbers in idle.values()):
        raise UsageError(
            f"{size.words}: nothing would be evicted from any prompt, the longest has {max(ends)[0]} tokens; give a "
            "smaller --budget, or longer contexts (--length of synthetic ones)"
        )
    short = [length for length, end in ends if idle[length, end]]
    return (
        f"{size.words}: {len(short)} of {len(ends)} prompts are so short, up to {max(short)} tokens, that "
        f"{len(whole)} of {len(programs)} strategies evict nothing from them"
    )


def find_idle_methods(evaluation: Evaluation) -> list[str]:
    """Return the labels of methods, the full cache aside, that evict nothing from any prompt."""
    ends = set(_list_ends(evaluation))
    return [
        method.label
        for method in evaluation.methods
        if method.name != FULL and not any(_drops_entries(method.program, *end) for end in ends)
    ]


def _list_ends(evaluation: Evaluation) -> list[tuple[int, int]]:
    """Return tokens of every prompt, and of it with its longest question and reply."""
    return [
        (
            len(reading.ids),
            len(reading.prompt.context)
            + max(len(question.ids) + question.query.max_new_tokens for question in reading.questions),
        )
        for task in evaluation.encoded
        for reading in make_readings(task.prompts, evaluation.split.protocol)
    ]


def _drops_entries(program: Program, length: int, end: int) -> bool:
    """Return whether a program drops anything from a prompt of `length` tokens until there are `end` of them."""
    prefill, decode = program.prefill, program.decode
    if prefill is not None and prefill.entries(length) < prefill.table(length).size * length:
        return True
    rows = () if decode is None else zip(decode.table(length).tolist(), sorted(decode.policies.items()), strict=True)
    return any(budget < end and not policy.keeps_all(budget, end) for row, (_, policy) in rows for budget in row)
