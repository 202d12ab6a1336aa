"""One reply from a compressed context, for `kvsearch generate`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import BUNDLED, LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.files import read_bytes
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import running
from kvsearch.runtime.program import full_cache
from kvsearch.runtime.replies import stop_tokens
from kvsearch.runtime.shared_prefill import held_entries, read
from kvsearch.tasks.prompts import PLAIN_PROMPT, PromptFormat
from kvsearch.tasks.synthetic.language import Document
from kvsearch.tasks.synthetic.suite import SyntheticTask


@dataclass(frozen=True)
class Reply:
    """A reply and what the cache held after the context; `full_bytes` is what transformers' own cache would hold."""

    text: str
    context_tokens: int
    entries: int
    full_entries: int
    bytes: int
    full_bytes: int
    most: int  # entries held at a time from then until the reply was complete


def read_text(value: str) -> str:
    """Return the text itself, or the content of FILE for "@FILE"."""
    return read_bytes(Path(value[1:])).decode("utf-8", "replace") if value.startswith("@") else value


def expected_reply(seed: int) -> str:
    """Return the right answer to the bundled models' own example."""
    return " ".join(_own_example(seed).questions[0].answer)


def _own_example(seed: int) -> Document:
    return SyntheticTask("multikey").document(random.Random(seed))


def example_for(model: str, context: str | None, prompt: str | None, seed: int) -> tuple[str, str, str]:
    """Return context, prompt and plain prompt format; bundled models have an example of their own.

    Raises:
        UsageError: another model, and no text to read.
    """
    if model in BUNDLED:
        if context is None:
            document = _own_example(seed)
            context, asked = " ".join(document.words[1:]), " ".join(document.questions[0].prompt)
            return context, prompt or asked, SyntheticTask.prompt
        return context, prompt or "", SyntheticTask.prompt
    if context is None and prompt is None:
        raise UsageError("there is nothing to read: give --context (compressed), --prompt, or both")
    if context is None:
        return str(prompt), "", "{question}"
    return context, prompt or "", PLAIN_PROMPT if prompt else "{question}"


def answer(
    loaded: LoadedModel,
    plan: Plan | None,
    context: str,
    prompt: str,
    plain: str,
    max_new_tokens: int,
    *,
    exact: bool = False,
) -> Reply:
    """Compress `context` as `plan` says (None: keep all), then answer `prompt` greedily.

    Raises:
        UsageError: there is no prompt, and of the context's tokens none is left to compress.
        IncompatibleError: the model and the plan or the context do not fit.
    """
    program = full_cache(loaded.model) if plan is None else Program.from_plan(loaded.model, plan)
    formatted = PromptFormat(loaded.tokenizer, plain)
    ids = formatted.context(context)
    question = formatted.question(prompt)
    if question.shape[1] == 0:  # a bare continuation: the last token of the context starts it
        ids, question = ids[:, :-1], ids[:, -1:]
    if ids.shape[1] == 0:
        raise UsageError("there is nothing to compress: give a longer context or prompt")
    shape = describe(loaded.model)
    with running(loaded.model):
        cache = PlanCache(loaded.model, program, exact=exact)
        replies = read(loaded.model, cache, [ids[0]], 0, stop_tokens(loaded))
        entries, held = held_entries(loaded.model, cache, [ids.shape[1]])[0], cache.nbytes()
        sliding = sum(cache.layer_nbytes(index) for index in range(shape.layers) if index not in shape.full_layers)
        tokens = replies.ask([question[0]], [max_new_tokens])[0]
        most = replies.most[0]
    full = len(shape.full_layers) * shape.kv_heads * ids.shape[1]
    full_bytes = full * 2 * shape.head_dim * loaded.model.dtype.itemsize + sliding
    return Reply(formatted.decode(tokens), ids.shape[1], entries, full, held, full_bytes, most)
