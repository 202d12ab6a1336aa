"""Questions about documents among other documents (qa_1 and qa_2)."""

from __future__ import annotations

from dataclasses import dataclass

from kvsearch.tasks.ruler.draft import Draft, Stream
from kvsearch.tasks.ruler.qa_files import QaFile, QaQuestion
from kvsearch.tasks.splits import Shares, part

_INTRO = "Answer the question from the documents below. Reply with the answer only, in as few words as it takes."
_QUESTION = "Answer the question from the documents above. Reply with the answer only.\n\nQuestion: "
_PREFIX = "Answer:"


@dataclass(frozen=True)
class QaDocuments:
    """Examples of a qa task, one a question, in an order of their own for every seed."""

    documents: tuple[str, ...]
    questions: tuple[QaQuestion, ...]

    @classmethod
    def of(cls, file: QaFile, split: str, shares: Shares, source: str) -> QaDocuments:
        """Return the questions of one split, which shares no document that is asked about with another one."""
        return cls(file.documents, tuple(part(file.questions, split, shares, lambda asked: asked.own, source)))

    @property
    def size(self) -> int:
        return len(self.questions)

    def draft(self, stream: Stream) -> Draft:
        """Return the question's own documents, then those of the same article, then any others, all in random order."""
        order = Stream(stream.name, 0).rng("questions").sample(range(self.size), self.size)
        question = self.questions[order[stream.index]]

        def context(units: int) -> str:
            rng = stream.rng("documents")
            first = [*question.own, *rng.sample(question.near, len(question.near))][:units]
            # so many that enough are left without those that come first
            others = rng.sample(range(len(self.documents)), min(len(self.documents), units))
            chosen = [self.documents[number] for number in list(dict.fromkeys((*first, *others)))[:units]]
            stream.rng("order").shuffle(chosen)
            told = (f"Document {place}:\n{text}" for place, text in enumerate(chosen, 1))
            return "\n\n".join((_INTRO, *told))

        return Draft(
            context,
            _QUESTION + question.text,
            _PREFIX,
            question.answers,
            least=len(question.own),
            most=len(self.documents),
        )
