"""LongBench: 21 datasets of six categories, English and Chinese, and LongBench-E (Bai et al., arXiv 2308.14508).

LongBench v2: questions with four choices about texts of 8,000 to 2 million words (Bai et al., arXiv 2412.15204).
InfiniteBench: tasks on texts of 100,000 tokens and more, English and Chinese (Zhang et al., arXiv 2402.13718).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.dataset_task import DatasetSpec, DatasetTask, read_specs, read_texts
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.metrics.longbench import LETTERS, take_first_line

BUCKETS = {"0-4k": 4000, "4-8k": 8000, "8k+": None}  # LongBench-E: the length each ends before, in words
LONGBENCH_SPECS = read_specs("longbench")
V2_SPECS = read_specs("longbench_v2")
LONGBENCH_TASKS = tuple(LONGBENCH_SPECS)
LONGBENCH_ENGLISH = tuple(name for name, spec in LONGBENCH_SPECS.items() if not spec.chinese)
# LongBench-E has files of its own, with contexts of all lengths in like numbers
LONGBENCH_E = tuple(f"{name}_e" for name in LONGBENCH_ENGLISH if name not in ("narrativeqa", "musique", "qmsum"))

# LAVa tells tasks whose answer stands in the context, scored by F1 or accuracy, from those that write text or code,
# scored by ROUGE or edit similarity. It names some of each; the metric sorts the others (dureader is the one
# QA dataset that is scored by ROUGE). passage_count is in neither: LAVa has 20 datasets.
_GENERATES = ("rouge_l", "rouge_l_zh", "edit_similarity")
GENERATION = tuple(name for name, spec in LONGBENCH_SPECS.items() if spec.metric in _GENERATES)
EXTRACTION = tuple(name for name in LONGBENCH_TASKS if name not in (*GENERATION, "passage_count"))

# Plain means over datasets, not over categories or lengths. LAVa's tables differ in what they leave out.
AVERAGES: dict[str, tuple[str, ...]] = {
    "polykv": LONGBENCH_TASKS,
    "lukv": LONGBENCH_ENGLISH,
    "lava-mistral": tuple(name for name in LONGBENCH_TASKS if name != "passage_count"),
    "lava-qwen": LONGBENCH_TASKS,
    "lava-llama3": tuple(name for name in LONGBENCH_TASKS if name != "vcsum"),
    "lava-extraction": EXTRACTION,  # LAVa, Figure 2
    "lava-generation": GENERATION,
    "evolkv": LONGBENCH_ENGLISH,  # without the samples that were trained on: score a split other than "all"
}


class LongBenchRow(BaseModel):
    """A row of LongBench; `length` is in words (characters of Chinese)."""

    context: str
    input: str
    answers: tuple[str, ...]
    length: int | None = None
    dataset: str | None = None
    all_classes: tuple[str, ...] | None = None


class LongBenchTask(DatasetTask[LongBenchRow]):
    """A dataset of LongBench ("qasper") or LongBench-E ("qasper_e"), whose keys begin with their bucket."""

    benchmark: ClassVar[str] = "LongBench"
    specs: ClassVar[dict[str, DatasetSpec]] = LONGBENCH_SPECS | {
        name: LONGBENCH_SPECS[name.removesuffix("_e")] for name in LONGBENCH_E
    }
    row: ClassVar[type[LongBenchRow]] = LongBenchRow

    @property
    def base_name(self) -> str:
        return self.name.removesuffix("_e")

    def read(self) -> Sequence[LongBenchRow]:
        """Refuse rows of another dataset: files are named by the user, and must not be scored as what they are not."""
        rows = super().read()
        for row in rows:
            dataset = (row.dataset or "").removesuffix("_e")
            if dataset != self.base_name and dataset in LONGBENCH_TASKS:
                raise UsageError(f"{self.where} holds rows of {dataset!r}: give the file of {self.base_name!r}")
            if self.name in LONGBENCH_E and row.length is None:
                raise UsageError(f"{self.where} has rows without a length, which LongBench-E needs")
            if self.metric == "classification" and not row.all_classes:
                raise UsageError(f"{self.where} has rows without all_classes, the classes to choose from")
        return rows

    def row_problem(self, row: LongBenchRow) -> str | None:
        return self.find_missing(row.context, row.input, row.answers)

    def example(self, position: int, row: LongBenchRow) -> Example:
        key = str(position)
        length = row.length
        if self.name in LONGBENCH_E and length is not None:
            bucket = next(bucket for bucket, end in BUCKETS.items() if end is None or length < end)
            key = f"{bucket}/{position}"
        return self.make_example(key, row.context, row.input, row.answers, options=row.all_classes or ())

    def score(self, reply: str, query: Query) -> float:
        """Return the dataset's metric, best of the answers; few-shot replies count up to their first line's end."""
        return super().score(take_first_line(reply) if self.spec.first_line else reply, query)


class LongBenchV2Row(BaseModel):
    """A row of LongBench v2, whose answer is the letter of a choice."""

    id: str = Field(default="", alias="_id")
    domain: str
    length: str
    question: str
    choice_A: str  # noqa: N815
    choice_B: str  # noqa: N815
    choice_C: str  # noqa: N815
    choice_D: str  # noqa: N815
    answer: Literal["A", "B", "C", "D"]
    context: str

    @property
    def choices(self) -> list[str]:
        return [self.choice_A, self.choice_B, self.choice_C, self.choice_D]


class LongBenchV2Task(DatasetTask[LongBenchV2Row]):
    """The questions of LongBench v2 about texts of one length ("v2_short"); scores are by domain, too."""

    benchmark: ClassVar[str] = "LongBench v2"
    specs: ClassVar[dict[str, DatasetSpec]] = V2_SPECS
    row: ClassVar[type[LongBenchV2Row]] = LongBenchV2Row
    shared: ClassVar[bool] = True

    def read(self) -> Sequence[LongBenchV2Row]:
        """Return the rows of this length."""
        return [row for row in super().read() if self.name.endswith(f"_{row.length}")]

    def row_problem(self, row: LongBenchV2Row) -> str | None:
        if not all(choice.strip() for choice in row.choices):
            return "with a choice that is empty"
        return self.find_missing(row.context, row.question, (row.answer,))

    def example(self, position: int, row: LongBenchV2Row) -> Example:
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, row.choices, strict=True))
        question = f"{row.question}\nChoices:\n{choices}"
        written = f"The correct answer is ({row.answer})"
        return self.make_example(
            position, row.context, question, (row.answer,), id=row.id, category=row.domain, written=written
        )


# --- InfiniteBench ---------------------------------------------------------------------------------------------------

INFINITEBENCH_SPECS = read_specs("infinitebench")
INFINITEBENCH_TASKS = tuple(INFINITEBENCH_SPECS)
INFINITEBENCH_LAVA = ("longbook_sum_eng", "longbook_choice_eng", "longdialogue_qa_eng")  # LAVa, Table 12


class InfiniteBenchRow(BaseModel):
    """A row of InfiniteBench; `options` are empty where there is nothing to choose from."""

    context: str
    answer: Annotated[tuple[str, ...], BeforeValidator(read_texts)]
    input: str = ""
    options: tuple[str, ...] = ()


class InfiniteBenchTask(DatasetTask[InfiniteBenchRow]):
    """A dataset of InfiniteBench ("longbook_sum_eng").

    Contexts beyond a model's positions lose their middle, as in the official scripts.
    """

    benchmark: ClassVar[str] = "InfiniteBench"
    specs: ClassVar[dict[str, DatasetSpec]] = INFINITEBENCH_SPECS
    row: ClassVar[type[InfiniteBenchRow]] = InfiniteBenchRow

    def row_problem(self, row: InfiniteBenchRow) -> str | None:
        if not self.spec.options or not row.context.strip():
            return self.find_missing(row.context, row.input, row.answer)
        if not 2 <= len(row.options) <= len(LETTERS):
            return f"without 2 to {len(LETTERS)} options to choose from"
        return None if row.answer and row.answer[0] in row.options else "whose answer is none of the options"

    def example(self, position: int, row: InfiniteBenchRow) -> Example:
        question = row.input
        answers = tuple(answer for answer in row.answer if not is_blank(answer))
        if self.spec.options:
            options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, row.options, strict=False))
            question = f"{question}\n{options}" if question.strip() else options
            answers = answers[:1]  # rows may name the letter of the answer after its text
        return self.make_example(position, row.context, question, answers, options=row.options)
