"""attach: run a plan under `generate()` without patching the model."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import warn_beyond
from kvsearch.models.memory import refuse_offloaded
from kvsearch.plan.saved import AUTO, load_plan
from kvsearch.runtime.attention import NAME, NO_DRAFTS_TAKEN_BACK
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.decode.steps import CompiledModel, stepping
from kvsearch.runtime.observe import reread
from kvsearch.runtime.program import Program, require_room
from kvsearch.runtime.shared_prefill import prefill_all
from kvsearch.runtime.stock import CACHE, CACHES, cache_of

if TYPE_CHECKING:
    from kvsearch.plan import Plan


class PlannedModel:
    """A model together with a plan: `generate` runs with a fresh `PlanCache` each time.

    Use it as a context manager; leaving it gives the model its attention implementation back. What else is asked of it
    is asked of the model, so that it can stand in the model's place: `transformers.pipeline(model=planned, ...)`.
    """

    def __init__(
        self, model: Any, program: Program, *, exact: bool = False, graphs: bool = True, compiled: bool = False
    ) -> None:
        self.model = model
        self.program = program
        self.exact = exact
        self.graphs = graphs
        self.compiled = CompiledModel(model) if compiled else None
        self.cache: PlanCache | None = None
        self._before: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's own protocols: copies
            raise AttributeError(name)
        return getattr(self.model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # pipelines look up what the class of a model can do
        return type(self.model)

    def __enter__(self) -> PlannedModel:
        self._before.append(self.model.config._attn_implementation)
        self.model.set_attn_implementation(NAME)
        return self

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self._before.pop())

    def new_cache(self, prompt_length: int | None = None) -> PlanCache:
        """Return an empty cache for one conversation (or one batch of them)."""
        return PlanCache(self.model, self.program, prompt_length=prompt_length, exact=self.exact)

    def read(self, input_ids: Tensor, attention_mask: Tensor | None = None, chunk: int | None = None) -> PlanCache:
        """Read prompts of token ids [B, T], padded on the left, into a new cache: to be saved, or asked many times.

        `attention_mask` [B, T] is 0 where padding. `generate` with the ids of a prompt and of what follows it, and the
        cache as `past_key_values`, goes on from it. With `chunk`, so many tokens are read at a time: see `prefill_all`.

        Raises:
            UsageError: outside the context.
            EnvironmentFault: the device has too little memory for what is kept.
        """
        self._require_attached()
        cache = self.new_cache()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        require_room(self.model, {"the plan": self.program}, [input_ids.shape[1]] * len(input_ids), chunk)
        prefill_all(self.model, [cache], input_ids, mask, chunk)
        return cache

    def generate(self, input_ids: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run `model.generate` under the plan; arguments and result are those of transformers.

        The cache used stays in `self.cache`. Pass it back as `past_key_values` to continue a conversation. On CUDA,
        greedy and sampled decode steps are captured in graphs and replayed, see `kvsearch.runtime.decode.steps`.

        Raises:
            UsageError: outside the context, or with a cache option the plan cannot honour.
            EnvironmentFault: the device has too little memory for what is kept of the prompt.
        """
        self._require_attached()
        config = generation_config or self.model.generation_config
        self._refuse_options(config, kwargs)
        kwargs.pop("cache_implementation", None)
        if config.cache_implementation is not None:
            generation_config = config = deepcopy(config)
            config.cache_implementation = None  # transformers takes a cache or the name of one
        if input_ids is None:
            input_ids = kwargs.pop("inputs", None)
        cache = cache_of(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHES}
        self.cache = self.new_cache() if cache is None else cache
        prompt = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if prompt is not None and not self.cache.get_seq_length():
            chunk = kwargs.get("prefill_chunk_size") or config.prefill_chunk_size
            require_room(self.model, {"the plan": self.program}, [prompt.shape[1]] * prompt.shape[0], chunk)
        if prompt is not None:
            self.cache.expect(prompt.shape[1])
        if input_ids is not None and not self.cache.get_seq_length():
            planned = self.cache.planned
            needs = (need for layer in planned.values() for need in layer.needs())
            for index, found in reread(self.model, needs, input_ids, kwargs.get("attention_mask")).items():
                if index in planned:
                    planned[index].rereads = found
        tokens = kwargs.get("max_new_tokens") or config.max_new_tokens
        with stepping(self.model, self.cache, tokens, self.graphs, self.compiled) as model:
            output = model.generate(input_ids, generation_config, *args, **{CACHE: self.cache}, **kwargs)
        self.cache.check_scores()
        warn_beyond(self.model, self.cache.get_seq_length())
        return output

    def _require_attached(self) -> None:
        if self.model.config._attn_implementation != NAME:
            raise UsageError("use attach(...) as a context manager: `with attach(model, plan) as planned:`")

    def _refuse_options(self, config: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("cache_implementation") or config.cache_implementation
        if asked not in (None, "dynamic"):
            raise UsageError(f"cache_implementation={asked!r} and a plan exclude each other: drop the option")
        if (config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]) is False:
            raise UsageError("use_cache=False and a plan exclude each other: drop the option")
        cache = cache_of(kwargs)
        if cache is not None and not isinstance(cache, PlanCache):
            raise UsageError(f"a plan needs its own cache, not a {type(cache).__name__}: use new_cache() or none")
        drafting = kwargs.get("prompt_lookup_num_tokens") or kwargs.get("assistant_model")
        drafting = drafting or getattr(config, "prompt_lookup_num_tokens", None)
        if drafting and self.program.decode is not None:
            raise UsageError(NO_DRAFTS_TAKEN_BACK)


def attach(
    model: Any,
    plan: Plan | Program | None = None,
    *,
    exact: bool = False,
    graphs: bool = True,
    compile: bool = False,  # noqa: A002 - what torch calls it
) -> PlannedModel:
    """Bind `plan` to `model` (checked against each other); see `PlanCache` for the arguments and errors.

    Without a plan it is the one that lies beside the model: `load_plan("auto", model)`.

    With `graphs`, decode steps are captured on CUDA where that is possible; with `compile`, they are compiled as one
    graph of operations first, on every device. Where that is not possible, the reason is said once.
    """
    refuse_offloaded(model, type(model).__name__)
    if plan is None:
        plan = load_plan(AUTO, model)
    program = plan if isinstance(plan, Program) else Program.from_plan(model, plan)
    return PlannedModel(model, program, exact=exact, graphs=graphs, compiled=compile)
