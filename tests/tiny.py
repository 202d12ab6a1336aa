"""Tiny random models that know the bundled vocabulary, short documents and calibration data for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvsearch.calibration.data import CalibrationData, Context, Pair
from kvsearch.core.canonical import hash_json
from kvsearch.core.items import Progress
from kvsearch.evaluation.runner import run_encoded
from kvsearch.evaluation.samples import Sample
from kvsearch.models.fingerprint import compute_fingerprint
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.origin import ContextRecord
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.runtime import Program
from kvsearch.tasks.base import Example, Query, Task, TokenCount
from kvsearch.tasks.encode import encode_tasks
from kvsearch.tasks.metrics import SCORERS
from kvsearch.tasks.synthetic.language import WORDS, Document, Names, compose_document, make_code_facts
from scripts.train_bundled import tokenizer
from tests.families import build
from tests.plan.builders import PROVENANCE, make_plan

CHAT_TEMPLATE = (
    "{{ bos_token }} {% for message in messages %}recall {{ message['content'] }} .{% endfor %}"
    "{% if add_generation_prompt %} mark ={% endif %}"
)


def loaded(family: str = "llama", **changes: Any) -> LoadedModel:
    """A random model with the bundled tokenizer; `changes` are those of its configuration."""
    return wrap(build(family, vocab_size=len(WORDS), **changes))


def wrap(model: Any) -> LoadedModel:
    return LoadedModel("tiny", model, tokenizer(), compute_fingerprint(model, "tiny"))


def chat_tokenizer(template: str = CHAT_TEMPLATE) -> Any:
    """The bundled tokenizer with a chat template in words of its vocabulary."""
    made = tokenizer()
    made.chat_template = template
    return made


def document(length: int, seed: int = 0, facts: int = 3) -> Document:
    """A document of at most `length` words with a few code facts."""
    rng = random.Random(seed)
    return compose_document(rng, length, [make_code_facts(rng, Names(rng), facts)])


def task_file(path: Path, contexts: int, length: int, facts: int) -> Path:
    """Write questions for `jsonl:FILE`: contexts of at most `length` words, with two questions each."""
    rows = []
    for seed in range(contexts):
        made = document(length, seed, facts)
        for question in made.questions[:2]:
            row = {"context": " ".join(made.words[1:]), "question": question.question, "answers": question.answers}
            rows.append({**row, "max_new_tokens": question.max_new_tokens, "metric": "exact", "prompt": " {question}"})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def calibration_data(*lengths: int, questions: int = 2) -> CalibrationData:
    """A context of each length with some questions."""
    contexts = []
    for seed, length in enumerate(lengths):
        made = document(length, seed, questions)
        pairs = tuple(Pair(question=q.question, answer=q.answers[0]) for q in made.questions)
        contexts.append(Context(" ".join(made.words[1:]), pairs))
    return CalibrationData("tiny", " {question}", tuple(contexts), hash_json(repr(contexts)))


def calibration_file(path: Path, contexts: int, length: int = 100) -> Path:
    """Write calibration data: so many contexts of some `length` words, with two questions each."""
    texts = [
        {"text": one.text, "questions": [{"question": pair.question, "answer": pair.answer} for pair in one.questions]}
        for one in calibration_data(*(length + number for number in range(contexts))).contexts
    ]
    path.write_text(json.dumps({"name": "tiny", "prompt": " {question}", "contexts": texts}))
    return path


@dataclass(frozen=True)
class Listed(Task):
    """A task of given examples; a reply is right if it begins with an answer, or by another `metric`."""

    name: str
    rows: tuple[Example, ...]
    prompt: str = " {question}"
    category: str = "listed"
    chat: bool = False
    stops: tuple[str, ...] = ()
    metric: str = "exact"

    def examples(self, samples: int, seed: int, count: TokenCount) -> Sequence[Example]:
        return self.rows[:samples]

    def score(self, reply: str, query: Query) -> float:
        return SCORERS[self.metric](reply, query)


@dataclass(frozen=True)
class Lottery(Listed):
    """Any reply has some score: a random model's are never right."""

    def score(self, reply: str, query: Query) -> float:
        return sum(map(ord, reply)) % 11 / 10


def listed(*shapes: tuple[int, int], name: str = "listed") -> Listed:
    """A context for each (length, questions); the questions differ in length and in how long a reply may be."""
    rows = []
    for seed, (length, questions) in enumerate(shapes):
        made = document(length, seed, max(3, questions))
        queries = tuple(
            Query("mark " * (index % 2) + q.question, q.answers, 3 + (seed + index) % 3)
            for index, q in enumerate(made.questions[:questions])
        )
        rows.append(Example(name, str(seed), " ".join(made.words[1:]), queries))
    return Listed(name, tuple(rows))


def plan_for(model: LoadedModel, budgets: list[list[int] | None], **changes: Any) -> Plan:
    """A plan of `model` with these budgets for prompts of 40 tokens, under SnapKV with a small window."""
    policy = {"name": "snapkv", "params": {"window": 4, "kernel": 3, "sinks": 2}}
    layers = [None if budget is None else {"policy": policy, "budget": budget} for budget in budgets]
    origin = {**PROVENANCE, "contexts": ContextRecord()}
    content = {"model": model.fingerprint.model_dump(), "prefill": {"layers": layers}, "provenance": origin, **changes}
    return make_plan(budgets, **content)


def ids_of(text: str) -> torch.Tensor:
    """Token ids [1, T] of a context."""
    return torch.tensor([tokenizer()(text)["input_ids"]])


def run(
    model: LoadedModel,
    programs: Mapping[str, Program],
    tasks: Sequence[Task],
    samples: int,
    batch: int = 8,
    progress: Progress | None = None,
    *,
    seed: int = 0,
    protocol: Protocol = QUESTION_AGNOSTIC,
    max_length: int | None = None,
) -> list[Sample]:
    """Run every program on the same `samples` examples of every task."""
    encoded = encode_tasks(model, tasks, samples, seed, max_length)
    return run_encoded(model, programs, encoded, protocol, batch, progress)
