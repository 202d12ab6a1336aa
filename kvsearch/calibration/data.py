"""Calibration data: texts with questions and answers, from one JSON file; data of tasks are made in `prompts`.

Methods that need no questions also take contexts without them, and plain text files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from kvsearch.core.errors import UsageError
from kvsearch.core.fields import Record
from kvsearch.core.files import read_text
from kvsearch.core.parsing import describe_validation_error, parse_json
from kvsearch.core.resources import find_resource
from kvsearch.models.loading import BUNDLED
from kvsearch.plan.origin import ContextSet, hash_context
from kvsearch.tasks.fields import Filled, NotEmpty, is_blank, trim
from kvsearch.tasks.prompts import PLACE, PLAIN_PROMPT
from kvsearch.tasks.rows import is_plain, parse_rows
from kvsearch.tasks.splits import group_by_text

DEFAULT, OF_BUNDLED = "data/calibration/texts.json", "data/calibration/bundled.json"
TakeTokens = Callable[[list[int]], list[int]]


class Pair(Record):
    """A question and the answer that is teacher-forced while importance is measured.

    `prefix` is how the reply begins; it is given to the model. `max_new_tokens`, if any, is how long a reply may be:
    room is left for it, and of an answer or the model's own reply no more is taken. `kind` is for readers of the file.
    """

    question: Filled
    answer: Filled
    prefix: str = ""
    max_new_tokens: int = Field(default=0, ge=0)
    kind: Filled | None = None

    @property
    def content(self) -> list[str | int]:
        """Content that identifies the pair, for hashes."""
        more = [self.prefix, self.max_new_tokens]
        return [self.question, self.answer, *(more if any(more) else ())]


class Text(Record):
    """One context: its text, or a text file (relative to the JSON file), and its questions."""

    text: Filled | None = None
    text_file: Filled | None = None
    kind: Filled | None = None
    questions: Annotated[tuple[Pair, ...], Field(validate_default=True)] = ()

    @field_validator("questions")
    @classmethod
    def _asks(cls, questions: tuple[Pair, ...], info: ValidationInfo) -> tuple[Pair, ...]:
        context: Any = info.context
        if not questions and not context["bare"]:
            raise ValueError("must not be empty")
        return questions

    @field_validator("text_file")
    @classmethod
    def _holds_text(cls, name: str | None, info: ValidationInfo) -> str | None:
        context: Any = info.context
        if name is not None:
            try:
                _read_text(context["folder"] / name)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return name

    @model_validator(mode="after")
    def _one_source(self) -> Text:
        if (self.text is None) == (self.text_file is None):
            raise ValueError("give either text or text_file")
        return self


class CalibrationFile(Record):
    """The file format: a name, the prompt that puts a question after a context, and the contexts."""

    name: Filled
    prompt: Filled = PLAIN_PROMPT
    contexts: Annotated[tuple[Text, ...], NotEmpty]

    @field_validator("prompt")
    @classmethod
    def _asks(cls, prompt: str) -> str:
        if PLACE not in prompt:
            raise ValueError(f"needs {PLACE}, the place of the question")
        return prompt


@dataclass(frozen=True)
class Context:
    """A context with its questions, ready to be tokenised.

    `prompt` is how a question follows it without a chat template (None: as in the whole data); `chat` says whether a
    chat template is used where there is one, `verbatim` that answers are parts of a text, see `PromptFormat`.
    `recorded` is what the context is known by, see `kvsearch.plan.origin` (none: its text). `taken` has for every
    question what is teacher-forced of the model's own reply, nothing where it is not right, and `ended` says whether a
    reply has ended; both in token ids. Without a metric every reply is taken.
    """

    text: str
    questions: tuple[Pair, ...]
    prompt: str | None = None
    chat: bool = True
    recorded: tuple[str, ...] = ()
    taken: tuple[TakeTokens, ...] = ()
    ended: Callable[[list[int]], bool] | None = None
    verbatim: bool = False

    @property
    def hashes(self) -> tuple[str, ...]:
        """Hashes that identify the context, equal for two contexts of one text.

        Worked examples, which all contexts of a task share, say nothing about its questions: then it is these.
        """
        return self.recorded or (hash_context(self.text),)


@dataclass(frozen=True)
class CalibrationData:
    """All contexts of a calibration; `sha256` identifies their content."""

    name: str
    prompt: str
    contexts: tuple[Context, ...]
    sha256: str

    @property
    def questions(self) -> int:
        return sum(len(context.questions) for context in self.contexts)

    @property
    def hashes(self) -> list[str]:
        """Hashes that identify the contexts, see `kvsearch.plan.origin`."""
        return [digest for context in self.contexts for digest in context.hashes]

    @property
    def by_text(self) -> list[list[int]]:
        """Numbers of the contexts of each distinct text."""
        return group_by_text(context.hashes for context in self.contexts)

    @property
    def asked(self) -> ContextSet:
        """The contexts as a set of hashes, for records."""
        return ContextSet.of(self.hashes)

    def limit_questions(self, questions: int | None) -> CalibrationData:
        """Keep only the first `questions` questions, in the order of the contexts; None: all."""
        if questions is None:
            return self
        if not self.questions:
            raise UsageError(f"the contexts of {self.name} have no questions to limit: leave --questions out")
        kept = []
        remaining = questions
        for context in self.contexts:
            if remaining > 0:
                kept.append(replace(context, questions=context.questions[:remaining], taken=context.taken[:remaining]))
                remaining -= len(kept[-1].questions)
        return CalibrationData(self.name, self.prompt, tuple(kept), self.sha256)


def find_default_data(model: str) -> Path:
    """Find the shipped calibration data for `model`: bundled models have their own, others get English."""
    return find_resource(OF_BUNDLED if model in BUNDLED else DEFAULT)


def load_calibration_data(path: str | Path, bare: bool = False) -> CalibrationData:
    """Read and check a calibration file.

    With `bare`, contexts may have no questions, and `path` may be a plain text file, several with commas between them,
    or a folder of .txt files: one context each.

    Raises:
        UsageError: there is no such file, or it is not valid; the message lists all that is wrong with it.
    """
    parts = _list_files(path)
    contents = [read_text(part) for part in parts]
    plain = list(map(_require_text, contents, parts))
    document = _parse_document(parts[0], contents[0]) if len(parts) == 1 else None
    if document is None:
        if not bare:
            raise UsageError(
                f"{path} is plain text, without questions, which only --method probe and query_bank take: give a "
                "calibration file with questions and answers"
            )
        texts = tuple(Context(text, ()) for text in plain)
        name = parts[0].stem if len(parts) == 1 else f"{len(parts)} text files"
        return CalibrationData(name, PLAIN_PROMPT, texts, hash_contexts(PLAIN_PROMPT, texts))
    folder = parts[0].parent
    try:
        parsed = CalibrationFile.model_validate(document, context={"folder": folder, "bare": bare})
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, str(path))) from error
    contexts = tuple(
        Context(
            _read_text(folder / str(item.text_file)) if item.text is None else item.text,
            tuple(pair.model_copy(update={"answer": trim(pair.answer)}) for pair in item.questions),
        )
        for item in parsed.contexts
    )
    return CalibrationData(parsed.name, parsed.prompt, contexts, hash_contexts(parsed.prompt, contexts))


def _list_files(path: str | Path) -> list[Path]:
    """List the files of `path`: one file, several joined by commas, or all .txt files of a folder."""
    given = Path(path)
    if given.is_dir():
        if not (texts := sorted(given.glob("*.txt"))):
            raise UsageError(f"{path} is a folder without .txt files: name a calibration file, or a folder of texts")
        return texts
    parts = [Path(part) for part in str(path).split(",")]
    return parts if not given.exists() and any(part.exists() for part in parts) else [given]


def _parse_document(path: Path, text: str) -> Any:
    """Parse the JSON of a calibration file; None for plain text, which may begin with a bracket, too."""
    if is_plain(text, str(path)):
        return None
    try:
        return parse_json(text, str(path))
    except UsageError as error:
        has_rows = False
        with suppress(UsageError):  # of damaged JSON the place is told, below
            has_rows = isinstance(next(iter(parse_rows(text, str(path))), ("", error))[1], dict)
        if has_rows:
            raise UsageError(
                f"{path} has rows, and a calibration file is one object with name and contexts: give it as "
                f"--tasks jsonl:{path}, or ppl:{path} where they are texts"
            ) from error
        raise


def hash_contexts(prompt: str, contexts: Sequence[Context]) -> str:
    """Hash the prompt, the texts and the questions of contexts, SHA-256."""
    content = [
        [
            context.text,
            [pair.content for pair in context.questions],
            *([] if context.prompt is None else [context.prompt, context.chat]),
        ]
        for context in contexts
    ]
    return hashlib.sha256(json.dumps([prompt, content]).encode()).hexdigest()


def _read_text(path: Path) -> str:
    return _require_text(read_text(path), path)


def _require_text(text: str, path: Path) -> str:
    if is_blank(text):
        raise UsageError(f"{path} is empty: a calibration context needs text")
    return text.strip()
