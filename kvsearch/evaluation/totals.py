"""Whether methods hold what their sizes say of the prompts at hand, after the prompt and while they reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Size
from kvsearch.runtime.program import PhaseProgram
from kvsearch.strategies.compared import ReadyMethod


def check_totals(loaded: LoadedModel, methods: Sequence[ReadyMethod], lengths: Iterable[int]) -> list[str]:
    """Check what methods hold of prompts of these lengths, one for each prompt; plans are not asked.

    Returns notes about prompts that are too short for a ratio.

    Raises:
        UsageError: a method holds more than its size allows in some phase, or its ratio leaves less of every prompt
            than its policy always keeps.
    """
    shape, counts, notes = describe(loaded.model), Counter(lengths), list[str]()
    heads = len(shape.full_layers) * shape.kv_heads
    for method in methods:
        if method.size is not None and "plan" not in method.definition:
            notes += _short_prompts(method, method.size, counts, heads)
            for length in sorted(counts):
                _check_total(method, method.size, length, heads)
    return notes


def decode_entries(phase: PhaseProgram, length: int) -> int:
    """Return the entries of all governed layers and heads that a decode phase allows after `length` prompt tokens.

    A head that is never evicted counts as one more than the longest of the others and the prompt.
    """
    table = np.array(phase.table(length))
    grown = max(length, int(table.max())) + 1
    for row, (_, policy) in enumerate(sorted(phase.policies.items())):
        table[row] = [grown if policy.exempt(budget, grown) else budget for budget in table[row].tolist()]
    return int(table.sum())


def _check_total(method: ReadyMethod, size: Size, length: int, heads: int) -> None:
    total = size.held(length, heads)
    prefill, decode = method.program.prefill, method.program.decode
    found = [] if prefill is None else [("of", prefill.entries(length), min(total, length * heads))]
    found += [] if decode is None else [("while it replies to", decode_entries(decode, length), total)]
    for where, held, wanted in found:
        if held != wanted:
            raise UsageError(
                f"method {method.name} would hold {held} entries {where} a prompt of {length} tokens, {size.words} "
                f"are {wanted}: it never evicts some heads, leave it out or change its settings"
            )


def _short_prompts(method: ReadyMethod, size: Size, counts: Counter[int], heads: int) -> Iterator[str]:
    """Raise UsageError if a ratio leaves less of every prompt than the policy always keeps; if of some, note it."""
    policy = max(method.program.policies, key=lambda policy: policy.floor)
    least = policy.floor
    short = sorted(length for length in counts if size.held(length, heads) < least * heads)
    if size.budget is not None or not short:
        return
    if len(short) == len(counts):
        given = size.held(short[-1], heads) / heads
        raise UsageError(
            f"method {method.name}: ratio {size} leaves {given:.4g} entries per kv head of a prompt of {short[-1]} "
            f"tokens, which is below the {least} that {policy.name} always keeps ({policy.sink_count} sinks, "
            f"{policy.recent_count} recent): keep more, or lower them with --set"
        )
    few = sum(counts[length] for length in short)
    yield (
        f"{method.name} at ratio {size}: {few} of {counts.total()} prompts ({short[0]} to {short[-1]} tokens) are "
        f"so short that it holds less than the {least} entries per kv head that {policy.name} always keeps"
    )
