"""attach: run a plan under `generate()` without patching the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, wraps
from inspect import ismethod, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import (
    find_class_name,
    find_decoder,
    find_family,
    find_rotary_switch,
    find_text_config,
    is_beyond_switch,
    is_wrapper,
    require_same_rotary,
    unwrap,
    warn_beyond,
)
from kvsearch.models.memory import refuse_offloaded
from kvsearch.plan.saved import AUTO, load_plan
from kvsearch.runtime.attention import NAME, NO_DRAFTS_TAKEN_BACK
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.decode.steps import CompiledModel, use_steps
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.observe import PromptLayer, read_again
from kvsearch.runtime.program import Program, require_room
from kvsearch.runtime.shared_prefill import prefill_all
from kvsearch.runtime.stock import CACHE, CACHES, find_cache

if TYPE_CHECKING:
    from kvsearch.plan import Plan


USE_PLANNED = (
    "the model is attached to a plan, and this call of it brings another cache, so the plan would not run: call "
    "planned.generate(...), or planned(...) for a forward pass, of `with attach(model, plan) as planned:`; the full "
    "cache runs outside of it"
)
# families whose code in transformers reads a sequence anew when it passes `original_max_position_embeddings`, whether
# its rotary factors change there or not; a cache without a token is dropped for longer prompts, too
READ_ANEW = ("phi3", "phi4_multimodal", "phimoe")
NEW_TOKENS = 20  # that `generate` makes if nobody says how many

_planned_call: ContextVar[bool] = ContextVar("planned_call", default=False)  # whether one is on its way in this thread


class PlannedModel:
    """A model with a plan attached: `generate` and forward calls run with a fresh `PlanCache` each time.

    Use it as a context manager; leaving it gives the model its attention implementation back. All other attributes are
    the model's own, so that it can stand in the model's place: `transformers.pipeline(model=planned, ...)`; methods by
    which a model returns itself (`to`, `eval`, `half`) return this object. Within the context the model itself refuses
    calls with another cache, such as `model.generate` makes.
    """

    def __init__(
        self, model: Any, program: Program, *, exact: bool = False, graphs: bool = True, compiled: bool = False
    ) -> None:
        # Past `__setattr__`, which hands names that are not here on to the model.
        own = vars(self)
        own["model"] = model
        own["program"] = program
        own["exact"] = exact
        own["graphs"] = graphs
        own["compiled"] = CompiledModel(model) if compiled else None
        own["cache"] = None
        own["_before"] = []  # what leaving gives back

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's own protocols: copies
            raise AttributeError(name)
        attribute = getattr(self.model, name)
        return self._returning_itself(attribute) if ismethod(attribute) else attribute

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            object.__setattr__(self, name, value)
        else:  # as `generation_config`
            setattr(self.model, name, value)

    def _returning_itself(self, method: Any) -> Any:
        @wraps(method)
        def call_method(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            return self if output is self.model else output

        return call_method

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # pipelines look up what the class of a model can do
        return type(self.model)

    def __enter__(self) -> PlannedModel:
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        self._before.append(
            (before, find_decoder(self.model).register_forward_pre_hook(_require_planned, with_kwargs=True))
        )
        return self

    def __exit__(self, *_: object) -> None:
        before, guard = self._before.pop()
        guard.remove()
        self.model.set_attn_implementation(before)

    def new_cache(self, prompt_length: int | None = None) -> PlanCache:
        """Return an empty cache for one conversation (or one batch of them)."""
        return PlanCache(self.model, self.program, prompt_length=prompt_length, exact=self.exact)

    def read(self, input_ids: Tensor, attention_mask: Tensor | None = None, chunk: int | None = None) -> PlanCache:
        """Read prompts of token ids [B, T], padded on the left, into a new cache: to be saved, or asked many times.

        `attention_mask` [B, T] is 0 where padding. `generate` with the ids of a prompt and of what follows it, and the
        cache as `past_key_values`, goes on from it. With `chunk`, so many tokens are read at a time: see `prefill_all`.

        Raises:
            UsageError: outside the context.
            IncompatibleError: prompts with different rotary factors, see `require_same_rotary`.
            EnvironmentFault: the device has too little memory for what is kept.
        """
        self._require_attached()
        cache = self.new_cache()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        require_same_rotary(self.model, mask.sum(-1))
        require_room(self.model, {"the plan": self.program}, [input_ids.shape[1]] * len(input_ids), chunk)
        with _find_planned():
            prefill_all(self.model, [cache], input_ids, mask, chunk)
        return cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of the model under the plan; arguments and result as of the model itself.

        Without a cache a new one is filled, and returned with the output; given back, it goes on from there. The prompt
        is evicted once its pass is over, so its logits are the full cache's: a perplexity that is taken in the pass
        that fills the cache, or of single passes over whole texts, is blind to eviction. With `use_cache=False` the
        model keeps nothing, as ever.

        Raises:
            UsageError: outside the context, or with a cache of another kind.
            IncompatibleError: the sequences have different rotary factors, see `require_same_rotary`.
            EnvironmentFault: the device has too little memory for what is kept of the prompt.
        """
        self._require_attached()
        kwargs |= zip(signature(unwrap(self.model).forward).parameters, args, strict=False)
        cache = find_cache(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHES}
        if cache is None and kwargs.get("use_cache") is False:
            with _find_planned():
                return self.model(**kwargs)
        self._take(cache)
        prompt = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]
        if prompt is not None:
            columns = self.cache.get_seq_length() + prompt.shape[1]
            self._begin(prompt, columns, kwargs.get("attention_mask"))
        with _find_planned():
            output = self.model(**{CACHE: self.cache}, **{**kwargs, "use_cache": True})
        if prompt is not None:
            self._require_read(columns)
        self.cache.check_scores()
        return output

    def generate(self, input_ids: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run `model.generate` under the plan; arguments and result as in transformers.

        The cache used stays in `self.cache`. Pass it back as `past_key_values` to continue a conversation. On CUDA,
        greedy and sampled decode steps are captured in graphs and replayed, see `kvsearch.runtime.decode.steps`. What a
        checkpoint says of caches (`use_cache`, `cache_implementation`) are defaults, in whose place the plan stands.

        Raises:
            UsageError: outside the context, or with a cache option the plan cannot honour.
            IncompatibleError: the rotary factors of the model would change on the way, see `require_same_rotary`, or
                its code does without the cache that it is given.
            EnvironmentFault: the device has too little memory for what is kept of the prompt.
        """
        self._require_attached()
        generation_config = self._without_cache_options(generation_config, kwargs)
        if input_ids is None:
            input_ids = kwargs.pop("inputs", None)
        self._take(find_cache(kwargs))
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHES}
        settings = GenerateSettings(kwargs, generation_config, self.model.generation_config)
        prompt = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        if prompt is not None:
            mask = kwargs.get("attention_mask")
            columns = max(prompt.shape[1], 0 if mask is None else mask.shape[-1])
            later = settings.new_tokens(prompt.shape[1]) - 1
            self._begin(prompt, columns, mask, later, settings("prefill_chunk_size"))
            self._require_kept(columns, later)
            self.cache.set_prompt_length(prompt.shape[1])
        keeping = _keep_settings(self.model)
        tokens = settings("max_new_tokens")
        with _find_planned(), use_steps(keeping, self.cache, tokens, self.graphs, self.compiled) as model:
            output = model.generate(input_ids, generation_config, *args, **{CACHE: self.cache}, **kwargs)
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        if sequences is not None and prompt is not None:
            # of embeddings alone, the output has no tokens; beams may have read more than they return
            before = 0 if input_ids is not None else prompt.shape[1]
            # The last token was made and never read.
            self._require_read(before + sequences.shape[1] - 1)
        self.cache.check_scores()
        warn_beyond(self.model, self.cache.get_seq_length())
        return output

    def _require_attached(self) -> None:
        if self.model.config._attn_implementation != NAME:
            raise UsageError("use attach(...) as a context manager: `with attach(model, plan) as planned:`")

    def _take(self, cache: Any) -> None:
        """Use the given cache for this call, or a new one."""
        if cache is not None and not isinstance(cache, PlanCache):
            raise UsageError(f"a plan needs its own cache, not a {type(cache).__name__}: use new_cache() or none")
        self.cache = self.new_cache() if cache is None else cache

    def _without_cache_options(self, config: Any, kwargs: dict[str, Any]) -> Any:
        """Return the caller's generation configuration without cache options; refuse options that a plan excludes.

        Such options are taken out of `kwargs`, too.
        """
        defaults = self.model.generation_config
        for name, allowed in (("cache_implementation", (None, "dynamic")), ("use_cache", (None, True))):
            wish = kwargs.pop(name, None)
            # What the caller's configuration merely took over from the checkpoint is no wish of his.
            if wish is None and config is not None and getattr(config, name) != getattr(defaults, name):
                wish = getattr(config, name)
            if wish not in allowed:
                raise UsageError(f"{name}={wish!r} and a plan exclude each other: drop the option")
        drafting = kwargs.get("prompt_lookup_num_tokens") or kwargs.get("assistant_model")
        drafting = drafting or getattr(config or defaults, "prompt_lookup_num_tokens", None)
        if drafting and self.program.decode is not None:
            raise UsageError(NO_DRAFTS_TAKEN_BACK)
        if config is None and not is_wrapper(self.model):
            return None  # that of the model, see `_keep_settings`
        return _drop_cache_arguments(config or defaults)

    def _begin(
        self, prompt: Tensor, columns: int, mask: Tensor | None, later: int = 0, chunk: int | None = None
    ) -> None:
        """Check that a call fits (rotary factors, memory), and read the prompt again for policies that need it.

        `prompt` is [B, T] token ids or [B, T, D] embeddings, `columns` counts the tokens read before and these, `mask`
        [B, columns] is 0 where padding, and at most `later` tokens are read after them.
        """
        cache = self.cache
        seen = cache.get_seq_length()
        self._require_same_rotary(prompt.shape[0], columns, mask, later, chunk)
        if seen:
            return
        require_room(self.model, {"the plan": self.program}, [prompt.shape[1]] * prompt.shape[0], chunk)
        if prompt.dim() == 2:
            planned = cache.planned
            needs = (need for layer in planned.values() for need in layer.needs())
            with _find_planned():
                again = read_again(self.model, needs, prompt, mask)
            for index in again.keys() & planned.keys():
                planned[index].rereads = again[index]

    def _require_same_rotary(
        self, batch: int, columns: int, mask: Tensor | None, later: int, chunk: int | None
    ) -> None:
        """Refuse sequences whose rotary factors change on the way, so that cached keys would not fit; see `_begin`."""
        if find_rotary_switch(self.model) is None:
            return
        real = torch.ones(batch, columns) if mask is None or mask.dim() != 2 else mask
        seen = self.cache.get_seq_length()
        read = real[:, : seen or columns].sum(-1)
        longest = int(real.sum(-1).max())
        require_same_rotary(self.model, read, longest - int(read.max()) + later)
        if not seen and chunk is not None and chunk < columns and is_beyond_switch(self.model, longest):
            raise IncompatibleError(
                f"prefill_chunk_size={chunk}: {find_class_name(self.model)} "
                f"would rotate the first tokens of {longest:,} "
                "as those of a short sequence: read the prompt at once, or with planned.read(ids, chunk=...)"
            )

    def _require_kept(self, columns: int, later: int) -> None:
        """Refuse a sequence at which transformers' code drops the cache and reads all anew; see `READ_ANEW`."""
        config = find_text_config(self.model)
        limit = getattr(config, "original_max_position_embeddings", None)
        read = self.cache.get_seq_length() or columns
        if find_family(config) not in READ_ANEW or not limit or columns + later <= limit:
            return
        if is_wrapper(self.model) and not self.cache.get_seq_length():
            raise IncompatibleError(
                f"transformers' code for {config.model_type} drops an empty cache beyond {limit:,} tokens, and in a "
                f"{type(self.model).__name__} that is not seen: put the adapter into the weights (merge_and_unload())"
            )
        if read <= limit:
            raise IncompatibleError(
                f"transformers' code for {config.model_type} drops the cache when a sequence passes {limit:,} tokens, "
                f"padding counted, and this one may come to {columns + later:,}: ask for {columns + later - limit:,} "
                f"less, or begin with more than {limit:,}"
            )

    def _require_read(self, tokens: int) -> None:
        """Raise if the model has put fewer than `tokens` tokens into the cache: then it ran without the plan."""
        read = min((layer.seen for layer in self.cache.planned.values()), default=tokens)
        if read < tokens:
            raise IncompatibleError(
                f"{find_class_name(self.model)} did without the cache that it was given, which has read {read:,} of "
                f"{tokens:,} tokens: the plan did not run (models drop caches in training with gradient checkpointing)"
            )


@dataclass(frozen=True)
class GenerateSettings:
    """Looks up options of `generate`: in its arguments, then the caller's configuration, then the model's."""

    arguments: Mapping[str, Any]
    config: Any
    defaults: Any

    def __call__(self, name: str) -> Any:
        """Return the value of an option that `generate` will use; None if it is set nowhere."""
        values = (self.arguments.get(name), getattr(self.config, name, None), getattr(self.defaults, name, None))
        return next((value for value in values if value is not None), None)

    def new_tokens(self, columns: int) -> int:
        """Return the most tokens that `generate` makes after a prompt of so many columns."""
        tokens = self("max_new_tokens")
        if tokens is None:
            length = self("max_length")
            tokens = NEW_TOKENS if length is None else length - columns
        return max(int(tokens), 1)


@contextmanager
def _find_planned() -> Iterator[None]:
    """Allow calls of an attached model with other caches for a while: reference passes, and models that draft."""
    # A context variable, so that threads and tasks do not see each other's calls.
    token = _planned_call.set(True)
    try:
        yield
    finally:
        _planned_call.reset(token)


def _require_planned(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a forward call of an attached model with a cache that is not kvsearch's (a pre-hook of the decoder)."""
    cache = kwargs.get(CACHE)
    if isinstance(cache, PlanCache) or _planned_call.get():
        return
    layers = getattr(find_cache(kwargs), "layers", ())
    if not any(isinstance(layer, EvictingLayer | PromptLayer) for layer in layers):
        raise UsageError(USE_PLANNED)


def _drop_cache_arguments(config: Any) -> Any:
    """Return a generation configuration without its cache options, which a plan replaces."""
    if config.cache_implementation is None and config.use_cache is not False:
        return config
    config = deepcopy(config)
    config.cache_implementation = None  # transformers takes a cache or the name of one
    config.use_cache = True
    return config


@lru_cache(maxsize=32)
def _make_keeping_class(kind: Any) -> type[Any]:
    """Make a subclass of a model's class that keeps a `PlanCache` where transformers' code would drop it."""

    @wraps(kind.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = kind.prepare_inputs_for_generation(self, *args, **kwargs)
        cache = find_cache(kwargs)
        if isinstance(cache, PlanCache) and find_cache(inputs) is not cache:
            if read := cache.get_seq_length():
                raise IncompatibleError(
                    f"{kind.__name__} drops the cache that it is given after {read:,} tokens and reads all anew, so "
                    "the plan would not run: stop before, or begin with a longer prompt"
                )
            # Nothing was read before this, so a prompt may start in it.
            inputs[CACHE] = cache  # nothing was read: it takes the prompt as any other would
        return inputs

    def generation_config(self: Any) -> Any:
        own = vars(self).get("generation_config")
        return _drop_cache_arguments(kind.__getattr__(self, "generation_config") if own is None else own)

    def set_generation_config(self: Any, config: Any) -> None:
        vars(self)["generation_config"] = config

    members = {
        "prepare_inputs_for_generation": prepare_inputs_for_generation,
        "generation_config": property(generation_config, set_generation_config),
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), members)


def _keep_settings(model: Any) -> Any:
    """Return a view of a model (the same `__dict__`) whose `generate` keeps the cache of a plan.

    PEFT's wrapper is returned as it is.
    """
    if is_wrapper(model):
        return model
    kind: Any = type(model)
    view = object.__new__(_make_keeping_class(kind))
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def attach(
    model: Any,
    plan: Plan | Program | None = None,
    *,
    exact: bool = False,
    graphs: bool = True,
    compile: bool = False,  # noqa: A002 - what torch calls it
) -> PlannedModel:
    """Attach a plan to a model: a context manager whose `generate` evicts cache entries as the plan says.

    The two are checked against each other; see `PlanCache` for the arguments and errors.

    Without a plan it is the one that lies beside the model: `load_plan("auto", model)`.

    With `graphs`, decode steps are captured on CUDA where that is possible; with `compile`, they are compiled as one
    graph of operations first, on every device. Where that is not possible, the reason is said once. A model that
    `torch.compile` has wrapped is attached without its wrapper.

    Raises:
        UsageError: it is no model of transformers, such as one that `DataParallel` has wrapped.

    Examples:
        >>> import torch
        >>> from kvsearch.models.loading import load
        >>> from kvsearch.policies import create_policy
        >>> from kvsearch.runtime import Program, attach
        >>> model = load("bundled").model
        >>> program = Program.uniform(model, create_policy("snapkv"), entries=lambda length: 40)  # or a plan
        >>> with attach(model, program) as planned:
        ...     output = planned.generate(torch.arange(100)[None], min_new_tokens=4, max_new_tokens=4)
        >>> output.shape[1]
        104
        >>> int(planned.cache.entries().max())  # 40 of the prompt, and what came after it but for the last token
        43
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "config"):
        raise UsageError(f"a {type(model).__name__} is no model of transformers: give the one that it wraps")
    refuse_offloaded(model, find_class_name(model))
    if plan is None:
        plan = load_plan(AUTO, model)
    program = plan if isinstance(plan, Program) else Program.from_plan(model, plan)
    return PlannedModel(model, program, exact=exact, graphs=graphs, compiled=compile)
