"""Needles in a haystack: the eight niah tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kvsearch.tasks.ruler.draft import Draft, Stream, insert, listed
from kvsearch.tasks.ruler.haystacks import Essay, Noise
from kvsearch.tasks.ruler.names import Fresh, Maker, most_words, number, uuid4, word

_MAKERS: Final[dict[str, Maker]] = {"word": word, "number": number, "uuid": uuid4}
_INTROS: Final = (
    "Somewhere the text below tells a secret {kind}. Remember it: a question about it follows the text.",
    "The text below tells secret {kind}s in several places. Remember them: a question about them follows the text.",
)


@dataclass(frozen=True)
class NeedleSpec:
    """The haystack ("noise", "essay" or "needles"), what keys and values are, and how many there are of each.

    The first `queries` keys are asked for; a haystack of needles has further keys, one for every unit.
    """

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH: Final[dict[str, NeedleSpec]] = {
    "niah_single_1": NeedleSpec("noise"),
    "niah_single_2": NeedleSpec("essay"),
    "niah_single_3": NeedleSpec("essay", value="uuid"),
    "niah_multikey_1": NeedleSpec("essay", keys=4),
    "niah_multikey_2": NeedleSpec("needles"),
    "niah_multikey_3": NeedleSpec("needles", key="uuid", value="uuid"),
    "niah_multivalue": NeedleSpec("essay", values=4),
    "niah_multiquery": NeedleSpec("essay", keys=4, queries=4),
}


@dataclass(frozen=True)
class Needles:
    """Examples of one niah task; without an essay or noise the haystack is made of needles."""

    spec: NeedleSpec
    haystack: Essay | Noise | None
    size: ClassVar[int | None] = None

    def draft(self, stream: Stream) -> Draft:
        spec = self.spec
        fresh = Fresh(stream.rng(), self.haystack.text if self.haystack else "")
        keys = [fresh.draw(_MAKERS[spec.key]) for _ in range(spec.keys)]
        facts = [(key, fresh.draw(_MAKERS[spec.value])) for key in keys for _ in range(spec.values)]
        told = list(zip(stream.depths(len(facts)), [self._needle(*fact) for fact in facts], strict=True))
        answers = tuple(value for key, value in facts if key in keys[: spec.queries])
        many = len(answers) > 1
        intro = _INTROS[many].format(kind=spec.value)
        asked = f"{spec.value}{'s' if many else ''} of {listed(keys[: spec.queries])}"
        verb = "are" if many else "is"

        def context(units: int) -> str:
            if self.haystack is None:
                return "\n".join((intro, *insert(self._others(units, stream, fresh.taken), told)))
            return f"{intro}\n{self.haystack.separator.join(insert(self.haystack.sentences(units), told))}"

        return Draft(
            context,
            f"What {verb} the secret {asked} that the text above tells?",
            f"The secret {asked} that the text above tells {verb}",
            answers,
            listed(answers) if many else "",
            most=most_words() if self.haystack is None and spec.key == "word" else None,
        )

    def _needle(self, key: str, value: str) -> str:
        return f"One secret {self.spec.value} of {key} is {value}."

    def _others(self, units: int, stream: Stream, taken: set[str]) -> list[str]:
        """Return needles with keys and values of their own."""
        fresh = Fresh(stream.rng("haystack"), taken=taken)
        key, value = _MAKERS[self.spec.key], _MAKERS[self.spec.value]
        return [self._needle(fresh.draw(key), fresh.draw(value)) for _ in range(units)]
