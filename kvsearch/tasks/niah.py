"""Needle in a haystack: one sentence hidden in a long text, over a grid of lengths and depths (Kamradt, 2023)."""

from __future__ import annotations

import math
import random
import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

from kvsearch.core.errors import KvsearchWarning, UsageError, require
from kvsearch.tasks.base import Example, Query, Task, TokenCount
from kvsearch.tasks.metrics import find_metric
from kvsearch.tasks.prompts import PLAIN_PROMPT
from kvsearch.tasks.ruler.needles import STORY_FILE, read_haystack
from kvsearch.tasks.splits import ALL, check_split, select_split

NEEDLE_TEXT = "Every Thursday the keeper of Orrin Light eats rye bread with pickled plums on the north gallery at dusk."
NEEDLE_QUESTION = (
    "What does the keeper of Orrin Light eat every Thursday, where, and when? Answer in the words of the text."
)
ANSWER = "rye bread with pickled plums on the north gallery at dusk"
NEEDLE_ANSWERS = (ANSWER, f"{ANSWER}.")  # a metric of words tells "dusk." from "dusk"
LENGTHS = (1000, 2000, 4000, 8000)
DEPTH_PERCENTS = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)  # ten even steps
# words with the white space before them; Chinese has none between sentences
_WORD = re.compile(r"\s*[^\s。！？]+[。！？]?|\s*[。！？]")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’)\]]*$")
_TITLE = re.compile(r"\W*(Mr|Mrs|Ms|Dr|St|Prof|[A-Z])\.$")
_KEY = re.compile(r"length=(\d+) depth=(\d+)")


class GridCell(NamedTuple):
    """A place in the grid: context length in tokens, and how deep the needle is in it, 0 (top) to 100 (end)."""

    length: int
    depth: int

    @property
    def key(self) -> str:
        return f"length={self.length} depth={self.depth}"

    @classmethod
    def parse(cls, key: str) -> GridCell:
        """Return the cell of an example's key; UsageError if it is none."""
        problem = f"{key!r} is no key of a needle in a haystack, such as {GridCell(1000, 50).key!r}"
        match = require(_KEY.fullmatch(key), problem)
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class NiahTask(Task):
    """One example per length and depth. The haystack is the shipped story or a text file, repeated where it is short.

    Contexts hold whole sentences and the needle, as many as fit into `length` tokens; the needle stands between the
    two sentences that are nearest to its depth. Everything is the same in every run.

    Raises:
        UsageError: a bad grid, an unknown metric or split, or a haystack that cannot be used.
    """

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[int, ...] = DEPTH_PERCENTS
    haystack: Path | None = None
    needle: str = NEEDLE_TEXT
    metric: str = "niah_recall"
    split: str = ALL
    name: str = "niah"
    category: ClassVar[str] = "retrieval"
    prompt: ClassVar[str] = PLAIN_PROMPT
    texts: ClassVar[str] = "generated in a story, or --haystack"
    reads: ClassVar[Mapping[str, str]] = {
        "length": "lengths", "depths": "depths", "haystack": "haystack", "metric": "metric", "split": "split",
    }  # fmt: skip

    def __post_init__(self) -> None:
        _require_steps("lengths", self.lengths, 1, None)
        _require_steps("depths", self.depths, 0, 100)
        find_metric(self.metric)
        check_split(self.split)
        if self.needle in "".join(self._sentences):
            raise UsageError(f"{self.haystack or STORY_FILE} holds the needle already: give another text")

    def list_cells(self) -> tuple[GridCell, ...]:
        """Return the cells of the split, depths of the first length first."""
        grid = [GridCell(length, depth) for length in self.lengths for depth in self.depths]
        return tuple(select_split(grid, self.split, lambda cell: cell, self.name))

    def examples(self, samples: int, seed: int, count: TokenCount) -> list[Example]:
        """Return up to `samples` cells, in the order of `list_cells`.

        If there are more, a KvsearchWarning says so, and those taken cover lengths and depths as evenly as they can.
        Under one seed, fewer samples are some of more.

        Raises:
            UsageError: a length does not hold the needle and one sentence.
        """
        cells = self.list_cells()
        chosen = spread_cells(cells, samples, seed)
        if len(chosen) < len(cells):
            warnings.warn(
                f"{self.name}: {len(chosen)} of {len(cells)} cells are asked, spread over lengths and depths: "
                f"ask for {len(cells)} samples to fill the grid",
                KvsearchWarning,
                stacklevel=2,
            )
        fitting = {length: self._fill_context(length, count) for length in {cell.length for cell in chosen}}
        examples = []
        for cell in chosen:
            sentences = fitting[cell.length]
            context = self._hide_needle(sentences, cell.depth)
            while count(context) > cell.length:  # the needle may break a token in two
                sentences = sentences[:-1]
                context = self._hide_needle(sentences, cell.depth)
            examples.append(Example(self.name, cell.key, context, (Query(NEEDLE_QUESTION, NEEDLE_ANSWERS),)))
        return examples

    def _hide_needle(self, sentences: Sequence[str], depth: int) -> str:
        ends = [0, *accumulate(map(len, sentences))]
        place = min(range(len(ends)), key=lambda index: abs(ends[index] - ends[-1] * depth / 100))
        return "".join([*sentences[:place], " ", self.needle, *sentences[place:]]).strip()

    def _fill_context(self, length: int, count: TokenCount) -> Sequence[str]:
        """Return the sentences that fill a context of `length` tokens together with the needle."""
        sentences = list(self._sentences)
        while count(self._hide_needle(sentences, 100)) <= length:
            sentences *= 2
        number = (
            bisect_right(range(len(sentences)), length, key=lambda n: count(self._hide_needle(sentences[:n], 100))) - 1
        )
        if number < 1:
            raise UsageError(
                f"{length} tokens do not hold the needle and a sentence of {self.haystack or STORY_FILE}: use more"
            )
        return sentences[:number]

    @cached_property
    def _sentences(self) -> tuple[str, ...]:
        """The haystack; each sentence begins with the white space before it."""
        return tuple(_split("\n\n" + read_haystack(self.haystack).strip()))


def spread_cells(cells: Sequence[GridCell], samples: int, seed: int) -> list[GridCell]:
    """Return `samples` of the cells, all of them if there are no more, in their order.

    Of a whole grid, no length is taken more than once oftener than another, and no depth. Under one seed, fewer cells
    are some of more.
    """
    if samples >= len(cells):
        return list(cells)
    left = _order_by_diagonals(cells, seed)
    lengths = Counter[int]()
    depths = Counter[int]()
    chosen = set[GridCell]()
    for _ in range(samples):
        cell = min(
            left, key=lambda candidate: lengths[candidate.length] + depths[candidate.depth]
        )  # the first of the least
        left.remove(cell)
        chosen.add(cell)
        lengths[cell.length] += 1
        depths[cell.depth] += 1
    return [cell for cell in cells if cell in chosen]


def _order_by_diagonals(cells: Sequence[GridCell], seed: int) -> list[GridCell]:
    """Return the cells in an order in which all lengths, and all depths, come once before any comes again.

    That is so for whole grids: lengths and depths, shuffled, both advance at each step. After as many steps as both
    repeat in, the next diagonal begins one depth further.
    """
    rng = random.Random(seed)
    lengths, depths = ([*dict.fromkeys(steps)] for steps in zip(*cells, strict=True))
    rng.shuffle(lengths)
    rng.shuffle(depths)
    period = math.lcm(len(lengths), len(depths))
    present = set(cells)
    steps = range(len(lengths) * len(depths))
    grid = (GridCell(lengths[n % len(lengths)], depths[(n + n // period) % len(depths)]) for n in steps)
    return [cell for cell in grid if cell in present]


def _split(text: str) -> Iterator[str]:
    """Yield the sentences and lines of a text, which they add up to."""
    words: list[str] = []
    for word in _WORD.findall(text):
        if words and "\n" in word:
            yield "".join(words)
            words = []
        words.append(word)
        if _SENTENCE_END.search(word) and not _TITLE.match(word):
            yield "".join(words)
            words = []
    if words:
        yield "".join(words)


def _require_steps(name: str, steps: Sequence[int], low: int, high: int | None) -> None:
    rising = all(first < second for first, second in pairwise(steps))
    if not steps or not rising or steps[0] < low or (high is not None and steps[-1] > high):
        bounds = f"from {low}" + (f" to {high}" if high is not None else "")
        raise UsageError(f"{name} must be rising whole numbers {bounds}, got {', '.join(map(str, steps)) or 'none'}")
