"""What an evaluation is made of, by content; two runs with equal configurations give equal reports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvsearch.core.canonical import sha256_of
from kvsearch.core.resources import version
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import Protocol
from kvsearch.strategies.compared import ReadyMethod
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import TaskPrompts, token_hash

PACKAGES = ("kvsearch", "torch", "transformers")


def content_of(
    loaded: LoadedModel,
    methods: Sequence[ReadyMethod],
    tasks: Sequence[TaskPrompts],
    protocol: Protocol,
    **settings: int | str | None,
) -> dict[str, Any]:
    """Return everything that the samples of a run depend on, as JSON; `settings` are further numbers as the seed."""
    return {
        **environment(loaded),
        "protocol": protocol,
        "methods": {one.label: {**one.definition, "sha256": sha256_of(one.definition)} for one in methods},
        "tasks": {
            task.task.name: {
                "category": task.coverage.category, "contexts": task.coverage.contexts,
                "questions": task.coverage.questions, "wanted": task.coverage.wanted, "rows_sha256": rows_hash(task),
            }
            for task in tasks
        },
        **settings,
    }  # fmt: skip


def environment(loaded: LoadedModel) -> dict[str, Any]:
    """Model, tokenizer, arithmetic and code."""
    return {
        "model": loaded.fingerprint.model_dump(mode="json", exclude={"dtype"}),
        "tokenizer_sha256": tokenizer_hash(loaded.tokenizer),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device.type),
        "versions": {package: version(package) for package in PACKAGES},
    }


def metric_of(task: Task) -> str:
    """Return the name of what scores a task's replies; of a task of one's own that names none, its class."""
    return str(getattr(task, "metric", type(task).__name__))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of what a tokenizer does: its vocabulary and rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = sorted(tokenizer.get_vocab().items()) if backend is None else json.loads(backend.to_str())
    known = {
        "class": type(tokenizer).__name__, "rules": rules, "special": str(sorted(tokenizer.special_tokens_map.items())),
        "chat_template": getattr(tokenizer, "chat_template", None),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def rows_hash(task: TaskPrompts) -> str:
    """SHA-256 of the questions of a task: prompts in token ids, and what counts as an answer."""
    rows = [
        [
            prompt.key, question.number, token_hash(prompt.with_question(question)), len(prompt.context),
            question.query.max_new_tokens, question.query.answers, question.query.options,
            *([question.query.written] if question.query.written else []),
        ]
        for prompt in task.prompts
        for question in prompt.questions
    ]  # fmt: skip
    return sha256_of([rows, task.task.stops])
