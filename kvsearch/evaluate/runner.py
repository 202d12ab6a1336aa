"""Run examples under several programs: compress a batch of contexts once, then ask every question of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsearch.errors import IncompatibleError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import running
from kvsearch.tasks.base import Example, Task, TokenCount
from kvsearch.tasks.prompts import PromptFormat


@dataclass(frozen=True)
class Sample:
    """One reply of one method.

    `entries` and `bytes` are what the cache held after the context, `most` the most entries it held at a time from
    then until the reply was complete.
    """

    task: str
    method: str
    key: str
    question: int
    reply: str
    score: float
    context_tokens: int
    entries: int
    bytes: float
    most: int


class Replies:
    """Greedy replies of one compressed batch of contexts; questions follow each other without seeing one another.

    Contexts and questions of different lengths are padded on the left.
    """

    def __init__(self, model: Any, cache: PlanCache, contexts: Sequence[Tensor], pad: int, stop: set[int]) -> None:
        self.model, self.cache, self.pad, self.stop = model, cache, pad, stop
        ids, self.mask = left_padded(contexts, pad, model.device)
        limit = describe(model).max_positions
        if limit and ids.shape[1] >= limit:
            raise IncompatibleError(f"a context has {ids.shape[1]} tokens, the model takes at most {limit}: shorten it")
        self.lengths = self.mask.sum(-1, keepdim=True)
        self._forward(ids, self.mask, (self.mask.cumsum(-1) - 1).clamp(min=0))
        cache.activate_past_recording()  # sliding-window layers must be able to forget a question, too
        self._compressed = cache.mark()
        self.most = [0] * len(contexts)  # entries held at a time while the last questions were answered

    def ask(self, questions: Sequence[Tensor], max_new_tokens: Sequence[int]) -> list[list[int]]:
        """One question per context; each reply ends before a stop token or after its `max_new_tokens`."""
        ids, mask = left_padded(questions, self.pad, self.model.device)
        positions = self.lengths + (mask.cumsum(-1) - 1).clamp(min=0)
        seen = torch.cat([self.mask, mask], 1)
        steps: list[Tensor] = []
        ids, positions = self._forward(ids, seen, positions), positions[:, -1:]
        limits, stop = (torch.tensor(list(some), device=ids.device) for some in (max_new_tokens, sorted(self.stop)))
        running = torch.ones(len(questions), dtype=torch.bool, device=ids.device)
        while True:
            steps.append(ids)
            ended = running & (torch.isin(ids[:, 0], stop) | (len(steps) >= limits))
            running &= ~ended
            if bool(ended.any()):
                self._count(ended.tolist())
            if not bool(running.any()):
                break
            seen, positions = torch.cat([seen, torch.ones_like(ids)], 1), positions + 1
            ids = self._forward(ids, seen, positions)
        self.cache.rewind(self._compressed)
        replies = zip(torch.cat(steps, 1).tolist(), max_new_tokens, strict=True)
        return [_until(reply[:limit], self.stop) for reply, limit in replies]

    def _count(self, ended: list[bool]) -> None:
        """Note the most entries held at a time for the contexts whose reply has ended."""
        most = self._most_entries()
        self.most = [new if over else old for new, old, over in zip(most, self.most, ended, strict=True)]

    def _most_entries(self) -> list[int]:
        """The most entries held at a time so far, per context; layers outside the plan hold every token."""
        planned = self.cache.most_entries().sum((0, 2))
        shape = describe(self.model)
        tokens = self.cache.get_seq_length() - self.mask.shape[1] + self.lengths[:, 0].cpu()
        unplanned = (len(shape.full_layers) - len(self.cache.planned)) * shape.kv_heads
        return [int(most) for most in planned + unplanned * tokens]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, logits_to_keep=1
            ).logits
        if not bool(logits.isfinite().all()):
            raise IncompatibleError("the model emits NaN or infinite logits: check its dtype and weights")
        chosen: Tensor = logits[:, -1:].argmax(-1)
        return chosen


def run(
    loaded: LoadedModel,
    programs: Mapping[str, Program],
    tasks: Sequence[Task],
    samples: int,
    seed: int = 0,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Every program on the same `samples` examples of every task (question-agnostic protocol)."""
    results: list[Sample] = []
    batches = [(task, part) for task in tasks for part in _batches(task.examples(samples, seed, counter(loaded.tokenizer)), batch)]
    with running(loaded.model):
        for done, (task, examples) in enumerate(batches):
            for position, (method, program) in enumerate(programs.items()):
                results += answer_all(loaded, task, examples, method, program)
                if progress is not None:
                    progress(done * len(programs) + position + 1, len(batches) * len(programs))
    return results


def answer_all(
    loaded: LoadedModel, task: Task, examples: Sequence[Example], method: str, program: Program
) -> Iterator[Sample]:
    """All questions of a batch of contexts under one program; the model must run the attention "kvsearch"."""
    prompt = PromptFormat(loaded.tokenizer, task.prompt)
    cache = PlanCache(loaded.model, program)
    contexts = [prompt.context(example.context)[0] for example in examples]
    replies = Replies(loaded.model, cache, contexts, _pad_token(loaded.tokenizer), stop_tokens(loaded))
    entries = held_entries(loaded.model, cache, [len(row) for row in contexts])
    held = cache.nbytes() / len(examples)
    for asked in range(max(len(example.queries) for example in examples)):
        # a context without a question of that number repeats its first one, unheard
        queries = [example.queries[asked if asked < len(example.queries) else 0] for example in examples]
        tokens = [prompt.question(query.question)[0] for query in queries]
        answered = replies.ask(tokens, [query.max_new_tokens for query in queries])
        for row, (example, query) in enumerate(zip(examples, queries, strict=True)):
            if asked < len(example.queries):
                text = prompt.decode(answered[row])
                yield Sample(
                    task.name, method, example.key, asked, text, task.score(text, query),
                    len(contexts[row]), entries[row], held, replies.most[row],
                )  # fmt: skip


def counter(tokenizer: Any) -> TokenCount:
    """How many tokens a text has, without special ones."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def held_entries(model: Any, cache: PlanCache, lengths: Sequence[int]) -> list[int]:
    """Entries of all full-attention layers per sequence, right after its prompt of `lengths` tokens.

    Layers outside the plan hold their full cache.
    """
    shape = describe(model)
    unplanned = (len(shape.full_layers) - len(cache.planned)) * shape.kv_heads
    planned = cache.entries().sum((0, 2)).tolist()
    return [kept + unplanned * length for kept, length in zip(planned, lengths, strict=True)]


def left_padded(rows: Sequence[Tensor], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Stack rows of token ids, padded on the left: ids and attention mask, both [B, longest]."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :], mask[index, width - len(row) :] = row, 1
    return ids.to(device), mask.to(device)


def stop_tokens(loaded: LoadedModel) -> set[int]:
    """End-of-sequence tokens of the model's generation configuration and of the tokenizer."""
    configured = getattr(loaded.model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in [*several, loaded.tokenizer.eos_token_id] if token is not None}


def _pad_token(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


def _batches(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    for first in range(0, len(examples), size):
        yield examples[first : first + size]


def _until(reply: list[int], stop: set[int]) -> list[int]:
    """The reply without its stop token and what follows it."""
    end = next((index for index, token in enumerate(reply) if token in stop), len(reply))
    return reply[:end]
