"""The 13 tasks of RULER, generated for any tokenizer and any length, and its multiquery in turns (SCBench's setting).

The benchmark is that of "RULER: What's the Real Context Size of Your Long-Context Language Models?" (Hsieh et al.,
2024). What equals the official data:

- the tasks, their names, their structure and their difficulty: kinds and numbers of needles, keys, values and queries;
  one chain of four hops (vt); ten common words, 30 against 3 times, and below 4096 tokens 6 against once (cwe); coded
  words whose counts fall with the square of their rank, rank 1 being dots that do not count (fwe); paragraphs of
  other questions around the paragraphs of the question (qa_1: SQuAD, qa_2: HotpotQA);
- needles in an essay lie between sentences, at 40 evenly spaced depths; worked examples come before the list of cwe
  and the text of vt (there of at most 500 tokens, with variables of three letters);
- tokens to generate, the metrics, and that context, question, start of the reply and tokens to generate together have
  at most `length` tokens. A chat template's own and special tokens come on top.

What differs, so that scores may be compared with each other but not with published ones:

- the wording of instructions, needles, filler and questions is our own, and so are the word lists. Where cwe needs
  more words than they hold, nouns are joined in pairs;
- the essay haystack is the story that kvsearch also calibrates on, from its beginning and repeated where it is too
  short, or a text file of yours (`haystack`): take one to keep calibration and evaluation apart;
- contexts are filled to within about two percent, not in large steps, and every example on its own. vt's example takes
  at most a quarter of `length`, so that short lengths are possible;
- depths are dealt, not drawn: 40 / needles examples in a row use every depth once. Noise, needles and vt have the
  same 40 depths as essays, where the official data takes any place;
- nothing repeats by accident: no key, value or variable occurs twice or in the haystack, no common word is part of
  another word of its list, and the three most frequent coded words are three. qa alone keeps distractors as they are,
  and some may hold an answer too;
- there are splits: "train", "select" and "report" share no example, and do not ask about the same paragraph of a qa
  file. "all" is the whole file, and one more set of examples for the other tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from pydantic import BaseModel, Field

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import delegate, require_known
from kvsearch.tasks.base import Example, Query, Task, TokenCount
from kvsearch.tasks.dataset_task import DatasetSpec, DatasetTask, read_specs
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.ruler.draft import Draft, Stream, find_largest_fit
from kvsearch.tasks.ruler.frequency import draft_coded_words, draft_common_words
from kvsearch.tasks.ruler.needles import NIAH, Essay, draft_needles, draft_tracing
from kvsearch.tasks.ruler.qa import read_hotpot, read_squad
from kvsearch.tasks.splits import check_split

FILLED = 0.95  # the least share of its length that an example has
RULER_SPECS: Final = read_specs("ruler")
NIAH_TURNS: Final = "niah_turns"  # multiquery in turns: SCBench's setting, none of RULER's own tasks
RULER_TASKS: Final = tuple(name for name in RULER_SPECS if name != NIAH_TURNS)
QA_FORMATS: Final = {
    "qa_1": ("SQuAD's", "data > paragraphs > context, qas", read_squad),
    "qa_2": ("HotpotQA's", "a list of question, answer, context", read_hotpot),
}


@dataclass(frozen=True)
class RulerTask(Task):
    """One task of RULER, or its `NIAH_TURNS`, at a whole prompt of at most `length` tokens, those to generate included.

    `haystack` is a text file for the tasks that hide needles in an essay (without: the story shipped with kvsearch).
    `qa_file` is what qa_1 (SQuAD's format) and qa_2 (HotpotQA's) ask about. The other tasks make other examples for
    every split, "all" being one more.

    Raises:
        UsageError: an unknown name or split, or a qa task without its file.
    """

    name: str
    length: int = 4096
    split: str = "report"
    haystack: Path | None = None
    qa_file: Path | None = None
    prompt: ClassVar[str] = f"\n{PLACE} "

    def __post_init__(self) -> None:
        require_known("RULER task", self.name, RULER_SPECS)
        check_split(self.split)
        for path in (self.haystack, self.qa_file):
            if path is not None and not path.is_file():
                raise UsageError(f"there is no file {path}: check the path")
        if self.name in QA_FORMATS and self.qa_file is None:
            whose, what, _ = QA_FORMATS[self.name]
            raise UsageError(f"{self.name} needs questions: give qa_file, a JSON file in {whose} format ({what})")

    @property
    def spec(self) -> DatasetSpec:
        return RULER_SPECS[self.name]

    category = delegate("spec.category")
    metric = delegate("spec.metric")

    def examples(self, samples: int, seed: int, count: TokenCount) -> list[Example]:
        """Return the first `samples` examples of a seed; qa has no more than its file has questions for the split.

        Raises:
            UsageError: `length` is too short, a qa file too small, or a file cannot be used.
        """
        drafts = self._make_drafts(samples, seed, count)
        needed = max(
            (count(draft.context(draft.least)) + self._count_rest(draft, count) for draft in drafts), default=0
        )
        if needed > self.length:
            raise UsageError(
                f"{self.name}: {self.length} tokens are too few, with this tokenizer a prompt takes {needed} or more: "
                "ask for a larger length"
            )
        examples = []
        for index, draft in enumerate(drafts):
            queries = tuple(replace(query, max_new_tokens=self.spec.max_new_tokens) for query in draft.queries)
            context = self._fill_context(draft, count)
            examples.append(Example(self.name, f"{seed}-{index}", context, queries, turns=len(queries) > 1))
        return examples

    def _make_drafts(self, samples: int, seed: int, count: TokenCount) -> list[Draft]:
        draft: Callable[[Stream], Draft]
        if self.name in NIAH:
            spec = NIAH[self.name]
            draft = partial(draft_needles, spec, Essay.load(self.haystack) if spec.haystack == "essay" else None)
        elif self.name == "vt":
            draft = partial(draft_tracing, self.length, count)
        elif self.name == "cwe":
            draft = partial(draft_common_words, self.length)
        elif self.name == "fwe":
            draft = draft_coded_words
        else:
            assert self.qa_file is not None  # see `__post_init__`
            file = QA_FORMATS[self.name][2](self.qa_file).select_split(self.split, f"{self.name} of {self.qa_file}")
            samples = min(samples, len(file.questions))
            draft = file.draft
        stream = partial(Stream, f"{self.split}/{self.name}/{self.length}/{seed}")
        return [draft(stream(index)) for index in range(samples)]

    def _fill_context(self, draft: Draft, count: TokenCount) -> str:
        """Return the context of a draft, filled up to the length."""
        rest = self._count_rest(draft, count)
        units = find_largest_fit(
            lambda units_tried: count(draft.context(units_tried)), self.length - rest, draft.least, draft.largest
        )
        context = draft.context(units)
        if units == draft.largest and (filled := count(context) + rest) < FILLED * self.length:
            raise UsageError(f"{self.name} has material for {filled} of {self.length} tokens: ask for a smaller length")
        return context

    def _count_rest(self, draft: Draft, count: TokenCount) -> int:
        """Count the tokens of questions, of the beginnings of replies and of what is to be generated."""
        endings = (self.prompt.replace(PLACE, query.question) + query.prefix for query in draft.queries)
        return sum(count(text) + self.spec.max_new_tokens for text in endings)


class DrawnRow(BaseModel):
    """A row of RULER as kvpress publishes it (`simonjegou/ruler`): drawn once, for everybody the same."""

    task: str
    context: str
    question: str
    answer_prefix: str
    answer: list[str]
    max_new_tokens: int = Field(gt=0)


class DrawnRulerTask(DatasetTask[DrawnRow]):
    """One task of RULER whose examples others have drawn: rows with context, question, answer_prefix and answer."""

    benchmark: ClassVar[str] = "RULER"
    specs: ClassVar[dict[str, DatasetSpec]] = RULER_SPECS
    row: ClassVar[type[DrawnRow]] = DrawnRow
    shared: ClassVar[bool] = True

    def read(self) -> Sequence[DrawnRow]:
        """Return the rows of this task."""
        return [row for row in super().read() if row.task == self.name]

    def row_problem(self, row: DrawnRow) -> str | None:
        return self.find_missing(row.context, row.question, row.answer)

    def example(self, position: int, row: DrawnRow) -> Example:
        query = Query(row.question, tuple(row.answer), row.max_new_tokens, row.answer_prefix)
        return Example(self.name, str(position), row.context, (query,))
