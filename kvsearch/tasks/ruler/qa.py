"""Questions about documents among other documents: qa_1 in SQuAD's JSON, qa_2 in HotpotQA's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, TypeAdapter

from kvsearch.core.limits import MOST_DATA
from kvsearch.core.parsing import read_json, validate_content
from kvsearch.tasks.base import Query
from kvsearch.tasks.fields import Filled, Name, NotEmpty
from kvsearch.tasks.ruler.draft import Draft, Stream
from kvsearch.tasks.splits import select_split


@dataclass(frozen=True)
class QaQuestion:
    """A question, its answers, the documents it is about and those that are nearest to them, by number."""

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


class _SquadAnswer(BaseModel):
    text: Name


class _SquadQuestion(BaseModel):
    question: Filled
    answers: tuple[_SquadAnswer, ...]
    is_impossible: bool = False


class _SquadParagraph(BaseModel):
    context: Filled
    qas: tuple[_SquadQuestion, ...]


class _SquadArticle(BaseModel):
    paragraphs: Annotated[tuple[_SquadParagraph, ...], NotEmpty]


class _Squad(BaseModel):
    data: Annotated[tuple[_SquadArticle, ...], NotEmpty]


class _HotpotQuestion(BaseModel):
    question: Filled
    answer: Name
    context: Annotated[tuple[tuple[str, tuple[str, ...]], ...], NotEmpty]  # title and sentences of each paragraph


_HOTPOT: Final = TypeAdapter(Annotated[tuple[_HotpotQuestion, ...], NotEmpty])


def read_squad(path: Path) -> QaDocuments:
    """Read data > paragraphs > context and qas, without the questions that are marked as impossible or have no answers.

    Raises:
        UsageError: there is no such file, or it is not of this format; the message lists what is wrong.
    """
    file = validate_content(_Squad.model_validate, read_json(path, MOST_DATA), str(path))
    documents: dict[str, int] = {}
    questions = []
    for article in file.data:
        numbers = [documents.setdefault(paragraph.context, len(documents)) for paragraph in article.paragraphs]
        for number, paragraph in zip(numbers, article.paragraphs, strict=True):
            near = tuple(dict.fromkeys(other for other in numbers if other != number))
            questions += [
                QaQuestion(question.question, tuple(dict.fromkeys(a.text for a in question.answers)), (number,), near)
                for question in paragraph.qas
                if question.answers and not question.is_impossible
            ]
    return QaDocuments(tuple(documents), tuple(questions))


def read_hotpot(path: Path) -> QaDocuments:
    """Read a list of question, answer and context, the paragraphs of each as pairs of title and sentences.

    Raises:
        UsageError: there is no such file, or it is not of this format; the message lists what is wrong.
    """
    documents: dict[str, int] = {}
    questions = []
    for item in validate_content(_HOTPOT.validate_python, read_json(path, MOST_DATA), str(path)):
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in item.context]
        documents_of_item = tuple(dict.fromkeys(documents.setdefault(text, len(documents)) for text in texts))
        questions.append(QaQuestion(item.question, (item.answer,), documents_of_item))
    return QaDocuments(tuple(documents), tuple(questions))


_INTRO = "Answer the question from the documents below. Reply with the answer only, in as few words as it takes."
_QUESTION = "Answer the question from the documents above. Reply with the answer only.\n\nQuestion: "
_PREFIX = "Answer:"


@dataclass(frozen=True)
class QaDocuments:
    """Documents and questions of a file: examples of a qa task, one a question, in their own order for every seed."""

    documents: tuple[str, ...]
    questions: tuple[QaQuestion, ...]

    def select_split(self, split: str, source: str) -> QaDocuments:
        """Return the questions of one split; no two splits have questions about the same document."""
        return replace(
            self, questions=tuple(select_split(self.questions, split, lambda question: question.own, source))
        )

    def draft(self, stream: Stream) -> Draft:
        """Return the question's own documents, then others of the same article, then any, all in random order."""
        order = Stream(stream.name, 0).make_rng("questions").sample(range(len(self.questions)), len(self.questions))
        question = self.questions[order[stream.index]]

        def context(units: int) -> str:
            rng = stream.make_rng("documents")
            first = [*question.own, *rng.sample(question.near, len(question.near))][:units]
            # so many that enough are left without those that come first
            others = rng.sample(range(len(self.documents)), min(len(self.documents), units))
            chosen = [self.documents[number] for number in list(dict.fromkeys((*first, *others)))[:units]]
            stream.make_rng("order").shuffle(chosen)
            sections = (f"Document {place}:\n{text}" for place, text in enumerate(chosen, 1))
            return "\n\n".join((_INTRO, *sections))

        query = Query(_QUESTION + question.text, question.answers, prefix=_PREFIX)
        return Draft(context, (query,), least=len(question.own), largest=len(self.documents))
