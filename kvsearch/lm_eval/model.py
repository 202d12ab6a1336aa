"""A model under a plan for lm-evaluation-harness: replies and log-likelihoods from the compressed cache.

The harness hands over whole prompts, so all of it is question-aware. Its own Hugging Face model scores context and
continuation in one forward pass, in which nothing is evicted; here a continuation is predicted from what the cache
holds of its context.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from kvsearch.core.errors import IncompatibleError, KvsearchWarning, NonFiniteError, UsageError
from kvsearch.core.items import Progress, group_by_key, with_progress
from kvsearch.evaluation.likelihood import count_compressible, score
from kvsearch.models.architecture import is_beyond_switch, require_same_rotary
from kvsearch.models.foreign import CheckpointError, name_text_on_error
from kvsearch.models.loading import LoadedModel
from kvsearch.runtime import Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.next_tokens import Draws
from kvsearch.runtime.decode.replies import find_stop_tokens
from kvsearch.runtime.shared_prefill import compress_prompts, make_batches
from kvsearch.tasks.base import Sampling
from kvsearch.tasks.encode import compute_token_limit
from kvsearch.tasks.prompts import count_ending

METHOD = "plan"
ROLLING = (
    "it asks for the likelihood of whole texts (loglikelihood_rolling), with no context before them that a plan could "
    "compress: leave it out"
)
DRAWN = {"temperature", "top_p"}
WITHOUT_EFFECT = {*DRAWN, "top_k", "min_p"}  # as long as nothing is drawn


# --- requests in token ids, tokenised and cut as the harness' own model does it -------------------------------------


class Generation:
    """Settings of a reply, from the generation options of a task.

    It ends before the first of `stops`, or after `max_new_tokens`, and is drawn by `sampling` (None: greedy).

    Raises:
        UsageError: options that cannot be honoured.
    """

    def __init__(self, options: Mapping[str, Any], where: str, seed: int = 0) -> None:
        settings = dict(normalize_gen_kwargs(dict(options)))
        drawn = settings.pop("do_sample") and settings.get("temperature") != 0
        self.sampling: Sampling | None = None
        if drawn:
            try:
                self.sampling = Sampling(settings.get("temperature", 1.0), settings.get("top_p", 1.0), seed=seed)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from error
        self.stops = tuple(stop for stop in settings.pop("until") if stop)
        self.max_new_tokens: int = settings.pop("max_gen_toks")
        if settings.get("num_beams") == 1:
            del settings["num_beams"]
        other = sorted(settings.keys() - (DRAWN if drawn else WITHOUT_EFFECT))
        if other:
            how = "drawn" if drawn else "greedy"
            raise UsageError(f"{where} has generation options that {how} replies cannot honour: {', '.join(other)}")
        if self.max_new_tokens < 1:
            raise UsageError(
                f"{where} allows replies of {self.max_new_tokens} tokens: it needs max_gen_toks of 1 or more"
            )


class HarnessText(NamedTuple):
    """A prompt, or a context that one or more requests continue: the token ids that fit.

    `truncated`: its beginning is cut off.
    """

    task: str
    ids: tuple[int, ...]
    truncated: bool


def place(request: Instance) -> str:
    """Say where a request comes from, for error messages."""
    return f"task {request.task_name}, document {request.doc_id}"


def _cut_to_room(request: Instance, ids: Sequence[int], room: int | None) -> HarnessText:
    """Return the last token ids of a request that there is room for; None: for all of them."""
    kept = ids if room is None else ids[-room:]
    return HarnessText(str(request.task_name), tuple(kept), len(kept) < len(ids))


# --- the model --------------------------------------------------------------------------------------------------------


class PlannedLM(LM):  # type: ignore[misc]
    """A model for `lm_eval.simple_evaluate(model=...)` that runs under `program`; tasks say how replies are drawn.

    Args:
        loaded: the model that the program is for.
        program: what is evicted.
        batch: prompts per forward pass.
        max_length: most tokens of prompt and reply together; at most, and by default, what the model takes. Longer
            prompts lose their beginning, as under the harness' own model.
        progress: told the batches done and to do, for each kind of request.
        seed: with task, document and repeat, of what is drawn for a reply, whatever else is in its batch.

    Raises:
        IncompatibleError: from requests that the model cannot serve; the message names task and document.
        UsageError: from requests that have no meaning under a plan.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        program: Program,
        *,
        batch: int = 8,
        max_length: int | None = None,
        progress: Progress | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.loaded = loaded
        self.program = program
        self.batch = batch
        self.progress = progress
        self.seed = seed
        self.tokenizer: Any = loaded.tokenizer
        self.max_length = compute_token_limit(loaded.model, max_length)
        self.held: dict[str, Counter[str]] = {}  # sums over the prompts and contexts of a task
        self.serving = False  # requests are being answered, or broke off
        self._device = loaded.device
        self._system_refused = False

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return one reply per request; each prompt is compressed as a whole."""
        replies: dict[int, str] = {}
        repeats = Counter[tuple[str, int, int]]()
        places = []
        for request in requests:
            document = (str(request.task_name), int(request.doc_id or 0), request.idx)
            places.append((*document, repeats[document]))  # with how often it was there before
            repeats[document] += 1
        with self._serving():
            prompts = [self._prompt(request) for request in requests]
            kinds = [(generation.stops, generation.sampling) for _, generation in prompts]
            for batch in self._batches([text for text, _ in prompts], kinds):
                with _naming([requests[number] for number in batch]):
                    texts = self._replies([prompts[number] for number in batch], [places[number] for number in batch])
                replies.update(zip(batch, texts, strict=True))
        return [replies[index] for index in range(len(requests))]

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return log-probabilities in nats, and whether greedy decoding agrees; a shared context is read once."""
        answers: dict[int, tuple[float, bool]] = {}
        with self._serving():
            pairs = [self.encode_pair(request) for request in requests]
            sharing = group_by_key(range(len(pairs)), lambda index: pairs[index][0])
            contexts = list(sharing)
            for batch in self._batches(contexts, [None] * len(contexts)):
                shared = [sharing[contexts[number]] for number in batch]
                texts = [contexts[number] for number in batch]
                with _naming([requests[indices[0]] for indices in shared]):
                    continuations = [[pairs[index][1] for index in indices] for indices in shared]
                    scored = score(self.loaded.model, self.program, [text.ids for text in texts], continuations)
                for text, indices, (likelihoods, entries) in zip(texts, shared, scored, strict=True):
                    self._note_held(text, count_compressible(text.ids), entries)
                    answers.update(zip(indices, likelihoods, strict=True))
        return [answers[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        raise UsageError(f"task {requests[0].task_name}: {ROLLING}")

    def set_cache_hook(self, cache_hook: object) -> None:  # noqa: ARG002
        raise UsageError(
            "the harness' response cache (use_cache) does not know the plan, it would hand replies made under one plan "
            "to another: leave it out"
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Put a conversation into a prompt; a system message that the template refuses is left out, with a warning."""
        if not self.tokenizer.chat_template:
            raise UsageError("the tokenizer has no chat template: do not ask for it to be applied")
        render = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return str(render(chat_history))
        except CheckpointError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
        prompt = str(render(rest))
        if not self._system_refused:
            self._system_refused = True
            warnings.warn("the chat template refuses system messages: left out", KvsearchWarning, stacklevel=2)
        return prompt

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    @property
    def _start(self) -> int | None:
        """The token that stands before a text without a context."""
        start: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    # --- requests in token ids, tokenised and cut as the harness' own model does it -----------------------------------

    def _prompt(self, request: Instance) -> tuple[HarnessText, Generation]:
        """Encode a request for a reply, so that there is room for it."""
        text, options = request.args[:2]
        generation = Generation(options, place(request), self.seed)
        with name_text_on_error(place(request)):
            ids = self._encode(text)
        if not ids:
            raise IncompatibleError(f"{place(request)}: the prompt is empty once it is tokenised")
        # The harness cuts prompts on the left so that the longest reply still fits: so do we, to score what it scores.
        room = None if self.max_length is None else self.max_length - generation.max_new_tokens
        if room is not None and room < 1:
            raise IncompatibleError(
                f"{place(request)}: a reply of up to {generation.max_new_tokens} tokens leaves no room for its prompt "
                f"within {self.max_length}"
            )
        return _cut_to_room(request, ids, room), generation

    def encode_pair(self, request: Instance) -> tuple[HarnessText, tuple[int, ...]]:
        """Return a context, and the token ids of what is to follow it; IncompatibleError where one is empty."""
        with name_text_on_error(place(request)):
            context, continuation = self._split(*request.args[:2])
        if not context:
            raise IncompatibleError(f"{place(request)}: the context is empty, and the tokenizer has no start of a text")
        if not continuation:
            raise IncompatibleError(f"{place(request)}: the continuation is empty once it is tokenised")
        # the last token is only predicted: it takes no room
        room = None if self.max_length is None else self.max_length + 1 - len(continuation)
        if room is not None and room < 1:
            raise IncompatibleError(
                f"{place(request)}: a continuation of {len(continuation)} tokens is longer than the {self.max_length} "
                "that there is room for"
            )
        return _cut_to_room(request, context, room), tuple(continuation)

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return token ids of both, cut out of the ids of the whole text; white space between is the continuation's."""
        lead = self._encode(context.rstrip()) if context else []
        # Encoded together and cut apart: a token may span both, and alone they would be other tokens.
        rest = self._encode(context + continuation, special=bool(context))[len(lead) :]
        if lead or self._start is None:
            return lead, rest
        return [self._start], rest[1:] if rest[:1] == [self._start] else rest

    def _encode(self, text: str, special: bool = True) -> list[int]:
        """Return token ids, with special ones unless the text brings the first of them along (chat templates do)."""
        first = "" if self._start is None else self.tokenizer.decode([self._start])
        wanted = special and not (first and text.startswith(first))
        ids: list[int] = self.tokenizer(text, add_special_tokens=wanted, verbose=False)["input_ids"]
        return ids[: len(ids) - self._ending] if wanted else ids

    @cached_property
    def _ending(self) -> int:
        return count_ending(self.tokenizer)

    # --- answers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _serving(self) -> Iterator[None]:
        self.serving = True
        with run_attention(self.loaded.model):
            yield
        self.serving = False

    def _batches(self, texts: Sequence[HarnessText], kinds: Sequence[Hashable]) -> Iterator[list[int]]:
        """Put texts of one kind and of similar length together, by their numbers, the longest first."""
        # The batch that needs most memory comes first, so that a lack of it shows at once.
        longest_first = sorted(range(len(texts)), key=lambda number: -len(texts[number].ids))

        def alike(number: int) -> Hashable:
            return kinds[number], is_beyond_switch(self.loaded.model, len(texts[number].ids))

        together = list(make_batches(longest_first, self.batch, alike))
        return with_progress(together, len(together), self.progress)

    def _replies(
        self, batch: Sequence[tuple[HarnessText, Generation]], places: Sequence[tuple[str | int, ...]]
    ) -> list[str]:
        end = "" if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        shared = batch[0][1]
        stops = [*shared.stops, *([end] if end else [])]

        def finished(reply: list[int]) -> bool:
            text = self.tokenizer.decode(reply)  # special tokens included: they may be stops
            return any(stop in text for stop in stops)

        ids = [torch.tensor(prompt.ids) for prompt, _ in batch]
        stop = find_stop_tokens(self.loaded)
        limits = [generation.max_new_tokens for _, generation in batch]
        require_same_rotary(self.loaded.model, [len(prompt) for prompt in ids], max(limits) - 1)  # before they are read
        joint = next(compress_prompts(self.loaded.model, {METHOD: self.program}, ids, stop, finished))
        for (prompt, _), entries in zip(batch, joint.entries[METHOD], strict=True):
            self._note_held(prompt, len(prompt.ids), entries)
        if shared.sampling is not None:
            joint.replies.draws = Draws(
                shared.sampling, [shared.sampling.derive_seed(*document) for document in places]
            )
        replies = joint.replies.reply(limits)
        texts = [self.tokenizer.decode(reply, skip_special_tokens=True) for reply in replies]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _note_held(self, text: HarnessText, tokens: int, entries: int) -> None:
        """Count the entries that the cache held of a text once its `tokens` were compressed."""
        held = self.held.setdefault(text.task, Counter())
        held["prompts"] += 1
        held["truncated"] += text.truncated
        held["single_tokens"] += tokens == 1
        held["tokens"] += tokens
        held["entries"] += entries


@contextmanager
def _naming(requests: Sequence[Instance]) -> Iterator[None]:
    """Name the request of a batch for which the model computed NaN."""
    try:
        yield
    except NonFiniteError as error:
        raise IncompatibleError(f"{place(requests[error.row])}: {error}") from error
