"""The files that the qa tasks read: SQuAD's and HotpotQA's own JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError, model_validator

from kvsearch.errors import UsageError
from kvsearch.plan.limits import MOST_DATA
from kvsearch.plan.parsing import describe_validation_error, read_json
from kvsearch.tasks.fields import Filled, NotEmpty

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class QaQuestion:
    """A question, its answers, the documents it is about and those that are nearest to them, by number."""

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class QaFile:
    """All documents and questions of a file, in its order."""

    documents: tuple[str, ...]
    questions: tuple[QaQuestion, ...]


class _SquadAnswer(BaseModel):
    text: Filled


class _SquadQuestion(BaseModel):
    question: Filled
    answers: tuple[_SquadAnswer, ...]
    is_impossible: bool = False


class _SquadParagraph(BaseModel):
    context: Filled
    qas: tuple[_SquadQuestion, ...]

    @model_validator(mode="after")
    def _holds_answers(self) -> _SquadParagraph:
        for asked in self.qas:
            if not asked.is_impossible and not any(answer.text in self.context for answer in asked.answers):
                raise ValueError(f"holds no answer to {asked.question!r}: set is_impossible or correct the answers")
        return self


class _SquadArticle(BaseModel):
    paragraphs: Annotated[tuple[_SquadParagraph, ...], NotEmpty]


class _Squad(BaseModel):
    data: Annotated[tuple[_SquadArticle, ...], NotEmpty]


class _HotpotQuestion(BaseModel):
    question: Filled
    answer: Filled
    context: Annotated[tuple[tuple[str, tuple[str, ...]], ...], NotEmpty]  # title and sentences of each paragraph


_HOTPOT: Final = TypeAdapter(Annotated[tuple[_HotpotQuestion, ...], NotEmpty])


def read_squad(path: Path) -> QaFile:
    """Read data > paragraphs > context and qas, without the questions that are marked as impossible.

    Raises:
        UsageError: there is no such file, or it is not of this format; the message lists what is wrong.
    """
    file = _checked(_Squad.model_validate, path)
    documents: dict[str, int] = {}
    questions = []
    for article in file.data:
        numbers = [documents.setdefault(part.context, len(documents)) for part in article.paragraphs]
        for number, part in zip(numbers, article.paragraphs, strict=True):
            near = tuple(dict.fromkeys(other for other in numbers if other != number))
            questions += [
                QaQuestion(asked.question, tuple(dict.fromkeys(a.text for a in asked.answers)), (number,), near)
                for asked in part.qas
                if not asked.is_impossible
            ]
    return QaFile(tuple(documents), tuple(questions))


def read_hotpot(path: Path) -> QaFile:
    """Read a list of question, answer and context, the paragraphs of each as pairs of title and sentences.

    Raises:
        UsageError: there is no such file, or it is not of this format; the message lists what is wrong.
    """
    documents: dict[str, int] = {}
    questions = []
    for asked in _checked(_HOTPOT.validate_python, path):
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in asked.context]
        own = tuple(dict.fromkeys(documents.setdefault(text, len(documents)) for text in texts))
        questions.append(QaQuestion(asked.question, (asked.answer,), own))
    return QaFile(tuple(documents), tuple(questions))


def _checked(validate: Callable[[object], Parsed], path: Path) -> Parsed:
    try:
        return validate(read_json(path, MOST_DATA))
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, str(path))) from error
