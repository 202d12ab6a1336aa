"""Variable tracking (vt): a chain of assignments hidden in noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsearch.tasks.base import Query, TokenCount
from kvsearch.tasks.ruler.draft import Draft, Stream, find_largest_fit, format_worked_example, insert
from kvsearch.tasks.ruler.needles import NOISE_SENTENCES, make_noise
from kvsearch.tasks.ruler.words import Fresh, draw_amount, make_variable_maker

HOPS = 4
CHAIN_LENGTH = HOPS + 1
LONGEST_EXAMPLE = 500  # tokens
_INTRO = (
    "The text below hides assignments to variables: the first one gets a value, every further one gets that of "
    "another variable. Follow the chain from variable to variable."
)


def draft_tracing(length: int, count: TokenCount, stream: Stream) -> Draft:
    """Return an example of vt: a worked example with a chain of its own, then the chain that is asked for.

    The worked example has at most 500 tokens, or a quarter of the length; its assignments are evenly spread.
    """
    fresh = Fresh(stream.make_rng(), "\n".join((*NOISE_SENTENCES, _INTRO)))
    chain, query = _hide_chain(fresh, 5, stream.draw_depths(CHAIN_LENGTH))
    shift = stream.make_rng("example").random()
    shown, answered = _hide_chain(fresh, 3, [(place + shift) / CHAIN_LENGTH for place in range(CHAIN_LENGTH)])

    def example(units: int) -> str:
        return format_worked_example(shown(units), answered)

    room = min(LONGEST_EXAMPLE, length // 4)
    solved = example(find_largest_fit(lambda units: count(example(units)), room, minimum=0))
    return Draft(lambda units: solved + chain(units), (query,))


def _hide_chain(fresh: Fresh, letters: int, depths: Sequence[float]) -> tuple[Callable[[int], str], Query]:
    """Return a text by its sentences of noise, with a chain of variables of so many letters, and the question for them.

    Assignments are at the depths.
    """
    value = fresh.draw(draw_amount)
    names = [fresh.draw(make_variable_maker(letters)) for _ in range(CHAIN_LENGTH)]

    def context(units: int) -> str:
        assignments = [f"LET {left} = {right}" for left, right in zip(names, [value, *names], strict=False)]
        lines = insert(make_noise(units), list(zip(sorted(depths), assignments, strict=True)))
        return "\n".join((_INTRO, *lines))

    query = Query(
        f"Question: Which variables have the value {value} at the end of the text above? Name all of them.",
        tuple(names),
        prefix=f"Answer: By the chain in the text above, the {CHAIN_LENGTH} variables with the value {value} are",
        written=", ".join(names),
    )
    return context, query
