"""Reads a document of the synthetic language the way a perfect reader would, and answers from its evidence alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvsearch.tasks.synthetic.language import BOS, NUMBERS, ORDINALS

Sentence = tuple[str, ...]
FACTS = ("code", "item", "set", "vote")


def evidence(words: Sequence[str]) -> int:
    """How many words carry what may be asked, be it asked or not."""
    return sum(len(sentence) for sentence in sentences(words) if sentence[0] in FACTS)


def sentences(words: Sequence[str]) -> list[Sentence]:
    """Split a document at its full stops."""
    found: list[Sentence] = []
    current: list[str] = []
    for word in words:
        if word == BOS:
            continue
        current.append(word)
        if word == ".":
            found.append(tuple(current))
            current = []
    if current:
        raise ValueError(f"the document ends in the middle of a sentence: {current}")
    return found


def answer(words: Sequence[str], prompt: Sequence[str]) -> Sentence:
    """The one right answer to `prompt`; sentences that begin with `recall` are not used."""
    told = sentences(words)
    question = tuple(prompt)
    if question[:2] == ("?", "code"):
        return (*_code(told, question[2]), ".")
    if question[:2] == ("?", "both"):
        one, two = question[2:4]
        return ("code", one, *_code(told, one), "code", two, *_code(told, two), ".")
    if question[:2] == ("?", "item"):
        key = question[2]
        values = {s[2]: s[3] for s in told if s[:2] == ("item", key)}
        parts = [word for ordinal in ORDINALS for word in (key, ordinal, values[ordinal])]
        return (*parts[1:], ".")
    if question[:2] == ("?", "set"):
        return _walk({s[1]: s[3] for s in told if s[0] == "set"}, question[2])
    if question == ("?", "vote"):
        (first, most), *others = Counter(s[1] for s in told if s[0] == "vote").most_common()
        if others and most < others[0][1] + 2:
            raise ValueError("the winner is less than two votes ahead")
        return (first, ".")
    if question == ("?", "bell"):
        return (NUMBERS[sum(s == ("bell", ".") for s in told) - 1], ".")
    raise ValueError(f"unknown question {' '.join(prompt)}")


def _code(told: Sequence[Sentence], key: str) -> Sentence:
    (fact,) = [s for s in told if s[:2] == ("code", key)]
    return fact[2:4]


def _walk(links: dict[str, str], name: str) -> Sentence:
    steps: list[str] = []
    while links[name] in links:
        name = links[name]
        steps += [name, "set", name, "="]
    return (*steps, links[name], ".")
