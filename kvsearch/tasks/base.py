"""The Task seam: examples with a context, a question and answers, and a metric."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import is_none
from kvsearch.tasks.metrics import SCORERS

Answers = Literal["own", "given"]  # teacher-forced after a question, see `runtime.replay.forced_answers`
TokenCount = Callable[[str], int]  # how many tokens a text has


@dataclass(frozen=True)
class Query:
    """One question about a context, the answers that count as right, and how many tokens a reply may have.

    `prefix` is how the reply begins: it is given to the model, not generated. `options` are all classes there are, or
    what a rule is about, for metrics that need them. `id` is what its author calls it, `category` the group that it is
    averaged in; empty ones are none, and that of the task. `written` is a right reply in full, in the form that the
    task asks for, where no single answer is one: all answers of a list, or the steps that lead to the answer.
    """

    question: str
    answers: tuple[str, ...]
    max_new_tokens: int = 64
    prefix: str = ""
    options: tuple[str, ...] = ()
    id: str = ""
    category: str = ""
    written: str = ""

    @property
    def right_reply(self) -> str | None:
        """A right reply in full: as it is `written`, else the first answer; None where no answers are named."""
        return self.written or next(iter(self.answers), None)


@dataclass(frozen=True)
class Example:
    """A context and the questions asked of it, after it was compressed or as its end.

    In `turns`, every question follows those before it and the replies to them; else none sees another. `system` is
    the system prompt before the context, for models with a chat template.
    """

    task: str
    key: str  # unique and stable, for paired statistics
    context: str
    queries: tuple[Query, ...]
    turns: bool = False
    system: str = ""


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled: temperature, nucleus (`top_p`) and the number of replies per question.

    Every reply has a seed of its own: it depends neither on its batch nor on the method, so methods are compared on the
    same random numbers. UsageError for a temperature or a share that is none.
    """

    temperature: float
    top_p: float = 1.0
    replies: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.temperature < math.inf and 0 < self.top_p <= 1):
            values = f"got {self.temperature:g} and {self.top_p:g}"
            raise UsageError(f"replies are drawn at a temperature above 0, from a top-p above 0 and up to 1: {values}")

    def derive_seed(self, *place: str | int) -> int:
        """Derive the seed of one reply from the base seed and the reply's place (task, key, question, number)."""
        return int(hash_json([self.seed, *place])[:16], 16)


class Task(ABC):
    """A named source of examples with a metric in [0, 1].

    Replies of a `traced` task are traces of thought: models may think, and how long replies are is reported. A task
    that is registered by itself (see `kvsearch.tasks.catalog.TASKS`) says by `reads` which options of the command line
    are which of its parameters, such as {"length": "length", "split": "split"}, and by `texts` where its texts are
    from.
    """

    name: str
    traced: ClassVar[bool] = False
    reads: ClassVar[Mapping[str, str]] = {}
    texts: ClassVar[str] = "generated"

    @property
    @abstractmethod
    def prompt(self) -> str:
        """How a question follows the context where the tokenizer has no chat template, with `{question}` in it."""

    @property
    @abstractmethod
    def category(self) -> str:
        """The group that tables average the task in."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """The name of what scores replies."""

    @property
    def chat(self) -> bool:
        """Whether prompts go through the tokenizer's chat template, where there is one."""
        return True

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which a reply ends, besides the end-of-sequence token.

        Leading white space of a reply is dropped before they are looked for, so a stop such as a newline counts only
        after something else was said; a stop with words in it counts wherever it stands.
        """
        return ()

    @abstractmethod
    def examples(self, samples: int, seed: int, count: TokenCount) -> Sequence[Example]:
        """Return the first `samples` examples of the split that `seed` names, or all if there are fewer.

        Tasks that fill contexts to a length do so in the tokens of `count`.
        """

    def score(self, reply: str, query: Query) -> float:
        """Return the quality of a reply to a query, 0 to 1."""
        return SCORERS[self.metric](reply, query)


@dataclass(frozen=True)
class Coverage:
    """How many contexts and questions of a task an evaluation uses, and what it left out."""

    task: str
    category: str
    wanted: int  # contexts that the evaluation asked for
    found: int  # contexts that the task has
    contexts: int  # contexts with a usable question
    truncated: int  # contexts whose middle was cut out
    questions: int
    excluded: dict[str, int]  # questions left out, by reason
    used: int = 0  # contexts left out as something was fitted or chosen on them
    split: str | None = None  # part of the examples, of tasks that have parts
    shortest: int | None = None  # tokens of the shortest context, as asked
    longest: int | None = None
    metric: Annotated[str | None, Field(exclude_if=is_none)] = None  # what replies were scored by, in an evaluation

    @property
    def shortfall(self) -> str | None:
        """Describe how many contexts are missing where the task has fewer than `wanted`; else None."""
        if self.found >= self.wanted:
            return None
        others = f" others than the {self.used} that something here was fitted or chosen on" if self.used else ""
        return f"{self.task}: {self.wanted} contexts were asked for, it has {self.found}{others}"

    @property
    def cut(self) -> str | None:
        """Describe how many contexts were too long and lost their middle; None if no context did."""
        if not self.truncated:
            return None
        return f"{self.task}: the middle of {self.truncated} of {self.contexts} contexts was cut out"
