"""Variable tracking (vt): a chain of assignments hidden in noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsearch.tasks.base import TokenCount
from kvsearch.tasks.ruler.draft import Draft, Stream, insert, largest, worked_example
from kvsearch.tasks.ruler.needles import NOISE, noise_sentences
from kvsearch.tasks.ruler.words import Fresh, amount, variable

HOPS = 4
VARIABLES = HOPS + 1
LONGEST_EXAMPLE = 500  # tokens
_INTRO = (
    "The text below hides assignments to variables: the first one gets a value, every further one gets that of "
    "another variable. Follow the chain from variable to variable."
)


@dataclass(frozen=True)
class Chain:
    """A value and the variables that have it, in the order in which they got it."""

    value: str
    names: Sequence[str]

    @classmethod
    def draw(cls, fresh: Fresh, letters: int) -> Chain:
        return cls(fresh.draw(amount), [fresh.draw(variable(letters)) for _ in range(VARIABLES)])

    @property
    def question(self) -> str:
        return f"Question: Which variables have the value {self.value} at the end of the text above? Name all of them."

    @property
    def prefix(self) -> str:
        return f"Answer: By the chain in the text above, the {VARIABLES} variables with the value {self.value} are"

    @property
    def reply(self) -> str:
        return ", ".join(self.names)

    def hidden(self, depths: Sequence[float], units: int) -> str:
        """Return the instruction and `units` sentences of noise, with the assignments in order at the depths."""
        sides = (self.value, *self.names)
        told = [f"LET {left} = {right}" for left, right in zip(self.names, sides, strict=False)]
        lines = insert(noise_sentences(units), list(zip(sorted(depths), told, strict=True)))
        return "\n".join((_INTRO, *lines))


def draft_tracing(length: int, count: TokenCount, stream: Stream) -> Draft:
    """Return an example of vt: a worked example with a chain of its own, then the chain that is asked for.

    The worked example has at most 500 tokens, or a quarter of the length; its assignments are evenly spread.
    """
    fresh = Fresh(stream.rng(), "\n".join((*NOISE, _INTRO)))
    chain = Chain.draw(fresh, letters=5)
    shown = Chain.draw(fresh, letters=3)
    shift = stream.rng("example").random()
    even = [(place + shift) / VARIABLES for place in range(VARIABLES)]

    def example(units: int) -> str:
        return worked_example(shown.hidden(even, units), shown.question, shown.prefix, shown.reply)

    room = min(LONGEST_EXAMPLE, length // 4)
    solved = example(largest(lambda units: count(example(units)), room, least=0))
    depths = stream.depths(VARIABLES)
    return Draft(
        lambda units: solved + chain.hidden(depths, units),
        chain.question,
        chain.prefix,
        tuple(chain.names),
        chain.reply,
    )
