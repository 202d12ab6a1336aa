"""Tasks of a user's own file: examples in rows, with a question and answers or with turns, or text to predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import describe_unknown
from kvsearch.core.parsing import list_validation_problems
from kvsearch.tasks.base import Example, Query, Task, TokenCount
from kvsearch.tasks.fields import Filled, Name, NotEmpty, is_blank, trim
from kvsearch.tasks.metrics import OF_ALL_ANSWERS, OF_BLANKS, SCORERS, find_metric
from kvsearch.tasks.prompts import PLACE, PLAIN_PROMPT
from kvsearch.tasks.rows import CellText, read_located, read_rows_or_text
from kvsearch.tasks.splits import ALL, OWN_SHARES, check_split, draw_items, select_split

MAX_SHOWN_FAULTS = 10
METRIC = "contains"
CATEGORY = "own"
SEVERAL = "several"  # the category of a file whose rows have several
TURNS_KEY = "turns"
OF_TURN = {"question", "answers", "max_new_tokens", "prefix", "options"}
PLAIN_TEXT = "is plain text: give it as ppl:FILE, or give context, question and answers"


# a cell of CSV has one text, or a list in writing
Texts = Annotated[
    tuple[Filled, ...], BeforeValidator(lambda value: value.items if isinstance(value, CellText) else value)
]


class JsonlRow(BaseModel):
    """One row of the file, or one of its `turns`. Rows with the same context share one compressed cache.

    `prefix` is how the reply begins, `options` are all classes there are, for metrics that need them. `category` is
    the group that tables average the question in, `id` a name that results carry, of this row alone. `metric` and
    `prompt` (how a question follows a context without a chat template) are the same in the whole file.
    """

    model_config = ConfigDict(extra="forbid")

    context: Filled
    question: Filled
    answers: Annotated[Texts, NotEmpty]
    max_new_tokens: int = Field(default=64, ge=1)
    prefix: str = ""
    options: Texts = ()
    metric: Name = METRIC
    prompt: str = PLAIN_PROMPT
    category: Name = CATEGORY
    id: Name | Annotated[int, Field(strict=True)] | None = None


@dataclass(frozen=True)
class JsonlTask(Task):
    """Examples of one file, which has one metric and prompt. No split divides a context.

    Where the rows have several categories, that of the task says so, and every query has its own.
    """

    name: str
    rows: tuple[Example, ...]
    metric: str = METRIC
    prompt: str = PLAIN_PROMPT
    category: str = CATEGORY
    split: str = ALL

    def __post_init__(self) -> None:
        find_metric(self.metric)
        check_split(self.split)

    @classmethod
    def load(cls, path: str | Path, split: str = ALL) -> JsonlTask:
        """Read and check a file.

        Raises:
            UsageError: there is no such file, or rows are bad; the message lists them.
            EnvironmentFault: a package that the metric needs is missing.
        """
        by_line, problems = _read(path)
        rows = [row for of_line, _ in by_line for row in of_line]
        metrics = sorted({row.metric for row in rows})
        prompts = {row.prompt for row in rows}
        categories = {row.category for row in rows}
        ids = Counter(str(row.id) for row in rows if row.id is not None)
        problems += [f"the id {name!r} is of {count} rows" for name, count in ids.items() if count > 1]
        problems += [f"prompt {prompt!r} lacks {PLACE}" for prompt in prompts if PLACE not in prompt]
        problems += [describe_unknown("metric", metric, list(SCORERS)) for metric in metrics if metric not in SCORERS]
        if len(metrics) > 1:
            problems.append(f"the rows name the metrics {', '.join(metrics)}: one file has one metric")
        if len(prompts) > 1:
            problems.append("the rows have different prompts: one file has one prompt")
        if not rows and not problems:
            problems.append("no rows")
        if problems:
            more = f"\n  and {len(problems) - MAX_SHOWN_FAULTS} more" if len(problems) > MAX_SHOWN_FAULTS else ""
            raise UsageError(f"{path} is not a usable task file:\n  " + "\n  ".join(problems[:MAX_SHOWN_FAULTS]) + more)
        several = len(categories) > 1 or any(turns for _, turns in by_line)
        category = SEVERAL if several else rows[0].category
        name = Path(path).stem
        return cls(name, _group(name, by_line, several), rows[0].metric, rows[0].prompt, category, split)

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Return up to `samples` contexts, drawn without replacement if the split has more."""
        return draw_items(
            select_split(self.rows, self.split, lambda example: example.key, self.name, OWN_SHARES), samples, seed
        )


JsonlLine = tuple[list[JsonlRow], bool]  # its row, or those of its turns


def _read(path: str | Path) -> tuple[list[JsonlLine], list[str]]:
    """Return the good rows of a file, and what is wrong with the others."""
    lines = []
    problems = []
    for place, row in read_located(path):
        if isinstance(row, UsageError):
            problems.append(str(row))
            continue
        row = _drop_missing_values(row)
        turn_place = place
        try:
            if "text" in row and "question" not in row:
                problems.append(f"{place}: {PLAIN_TEXT}")
            elif TURNS_KEY not in row:
                lines.append(([JsonlRow.model_validate(row)], False))
            else:
                turns = []
                for turn, content in enumerate(_split_turns(row, place), 1):
                    turn_place = f"{place}, turn {turn}"
                    turns.append(JsonlRow.model_validate(content))
                lines.append((turns, True))
        except ValidationError as error:
            problems += [
                f"{turn_place}: {problem}"
                for problem in list_validation_problems(error, [*JsonlRow.model_fields, TURNS_KEY])
            ]
        except UsageError as error:
            problems.append(str(error))
    return lines, problems


def _drop_missing_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row states: a table has null or NaN where it states nothing."""
    return {key: value for key, value in row.items() if value is not None and value == value}


def _split_turns(row: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Return each turn of a row as a row of its own; UsageError if they are no list of objects with keys of a turn."""
    turns = row[TURNS_KEY]
    if isinstance(turns, list):
        turns = [_drop_missing_values(turn) if isinstance(turn, dict) else turn for turn in turns]
    shared = {key: value for key, value in row.items() if key != TURNS_KEY}
    is_list = isinstance(turns, list) and turns and all(isinstance(turn, dict) and {*turn} <= OF_TURN for turn in turns)
    if not is_list or {*shared} & OF_TURN:
        known = ", ".join(sorted(OF_TURN))
        raise UsageError(f"{place}: turns is a list of objects with question and answers, which alone have {known}")
    names = [{"id": f"{row['id']}, turn {number}"} if "id" in row else {} for number in range(1, len(turns) + 1)]
    return [{**shared, **turn, **name} for turn, name in zip(turns, names, strict=True)]


def _group(task: str, lines: Sequence[JsonlLine], several: bool) -> tuple[Example, ...]:
    """Return an example per context, and one per line with turns.

    Queries name their category where there are `several`; that of a turn is its number.
    """
    by_context: dict[tuple[str, int], list[Query]] = {}
    for number, (rows, turns) in enumerate(lines, 1):
        for turn, row in enumerate(rows, 1):
            category = f"turn {turn}" if turns else row.category
            as_written = row.metric in OF_BLANKS
            answers, options = (
                texts if as_written else tuple(map(trim, texts)) for texts in (row.answers, row.options)
            )
            query = Query(
                row.question,
                answers,
                row.max_new_tokens,
                row.prefix,
                options,
                id="" if row.id is None else str(row.id),
                category=category if several else "",
                written=", ".join(answers) if row.metric in OF_ALL_ANSWERS else "",
            )
            by_context.setdefault((row.context, number if turns else 0), []).append(query)
    return tuple(
        Example(task, str(key), context, tuple(queries), turns=number > 0)
        for key, ((context, number), queries) in enumerate(by_context.items())
    )


# --- perplexity on plain text: a window is compressed, and the text that follows it is predicted ---------------------

DEFAULT_LENGTH = 512
LEAD = 8  # tokens that follow a context where other tasks have a question
CONTINUATION = 64  # tokens after these, which are predicted
SPARE_TEXT = 1.25  # times as much text is taken for a continuation, so that it has so many tokens
COUNTED_CHARACTERS = 100_000  # characters that tell how long a token is
LONGEST_WORD = 40  # characters to look for a space in; some scripts have none


@dataclass(frozen=True)
class TextTask(Task):
    """Windows of a text, one after the other: about `length` tokens of context, a few more, and what is predicted.

    Parts end where a word does, in scripts that divide words by spaces, and are the text's own, white space included.
    """

    name: str
    text: str
    length: int = DEFAULT_LENGTH
    split: str = ALL
    metric = "likelihood"
    prompt = PLACE
    category = "text"
    chat = False

    def __post_init__(self) -> None:
        check_split(self.split)

    @classmethod
    def load(cls, path: str | Path, length: int = DEFAULT_LENGTH, split: str = ALL) -> TextTask:
        """Read a text file, or one of rows such as `{"text": ...}`, which are joined by blank lines.

        Raises:
            UsageError: there is no such file, it is no text, it is empty, or a row has no text.
        """
        content = read_rows_or_text(path)
        if not isinstance(content, str):
            rows = [row.get("text") for row in content]
            if not all(isinstance(row, str) for row in rows):
                raise UsageError(f'{path} has rows without a text: give rows such as {{"text": "..."}}')
            content = "\n\n".join(map(str, rows))
        if is_blank(content):
            raise UsageError(f"{path} is empty: give text")
        return cls(Path(path).stem, content, length, split)

    def examples(self, samples: int, seed: int, count: TokenCount) -> list[Example]:
        """Return up to `samples` windows of the split, drawn without replacement if it has more.

        Raises:
            UsageError: the text is shorter than a window.
        """
        sample = self.text[:COUNTED_CHARACTERS]
        characters = len(sample) / max(count(sample), 1)
        windows = list(self._windows(characters))
        if not windows:
            raise UsageError(
                f"{self.name} has about {round(len(self.text) / characters)} tokens, and a window needs "
                f"{self.length + LEAD + round(SPARE_TEXT * CONTINUATION)}: give more text, or lower --length"
            )
        return draw_items(
            select_split(windows, self.split, lambda window: window.context, self.name, OWN_SHARES), samples, seed
        )

    def _windows(self, characters: float) -> Iterator[Example]:
        """Yield the windows of the text, whose tokens have so many `characters`; a rest that is too short is left."""
        start = 0
        while True:
            lead = self._space_after(start + self.length * characters)
            gap = self._space_after(lead + LEAD * characters)
            end = self._space_after(gap + SPARE_TEXT * CONTINUATION * characters)
            if end > len(self.text):
                return
            continuation = self.text[gap:end]
            if continuation.strip():
                query = Query(self.text[lead:gap], (continuation,), max_new_tokens=CONTINUATION)
                yield Example(self.name, str(start), self.text[start:lead], (query,))
            start = end

    def _space_after(self, place: float) -> int:
        """Return where the next word ends, or the place itself where no word does."""
        at = round(place)
        space = self.text.find(" ", at, at + LONGEST_WORD)
        return at if space < 0 else space
