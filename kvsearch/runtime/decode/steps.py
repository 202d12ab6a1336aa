"""CUDA graphs and compilation of decode steps, for greedy and sampled generation.

Of a step the host decides how many entries leave where and whether scores are made anew
(`PlanCache.reserve_positions`); for every such decision that comes up twice there is a graph. The tensors that graphs
read and write stay where they are until room has run out or sequences are rearranged; then the graphs are dropped and
captured anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import warn_once
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.stock import CACHE, CACHES, find_cache
from kvsearch.runtime.store.blocks import MAX_ROOM

MOST_GRAPHS = 32  # of one cache
SYNCHRONIZES = "called a synchronizing CUDA operation"
MOST_COMPILED = 64  # steps of models in a process, and of lengths for which room was made
MIN_CAPTURED_TOKENS = 16  # tokens for which capturing pays
WITHOUT = "decode steps run without CUDA graphs (attach(..., graphs=False) is silent about it)"
UNCOMPILED = "decode steps are not compiled"
INPUTS = ("input_ids", "position_ids", "attention_mask", "inputs_embeds", *CACHES)
PLAIN_TYPES = (type(None), bool, int, float, str)  # other arguments: they are part of what a step is


class CudaGraphs:
    """CUDA graphs in one pool of memory, so that an output holds until another step is done."""

    waited = False  # in the last step that was run the host waited for the device, which cannot be captured

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.drop()

    def drop(self) -> None:
        """Use another memory pool for the graphs to come: the last output of the dropped ones is still in use."""
        self.pool: Any = torch.cuda.graph_pool_handle()

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step on the stream that steps are captured on, so that libraries are initialised there."""
        # What is queued now comes before the step, and whatever follows waits for it.
        now = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream), warn_of_waits() as waits:
            output = step()
        now.wait_stream(self.stream)
        self.waited = bool(waits)
        return output

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a step without running it; return a function that replays it. Its like was run before.

        Raises:
            RuntimeError: it does what cannot be captured; all tensors are as they were.
        """
        # Thread-local: other threads may go on calling CUDA while a step is captured.
        graph = torch.cuda.CUDAGraph()
        now = torch.cuda.current_stream(self.stream.device)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                output = step()
        except BaseException:
            # torch leaves its stream the current one, and before 2.12 all memory on its way to the pool
            torch.cuda.set_stream(now)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.stream.device_index, self.pool)
            raise

        def replay() -> Any:
            graph.replay()
            return output

        return replay


@contextmanager
def warn_of_waits() -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings of operations that wait for the device; pass other warnings on."""
    before = torch.cuda.get_sync_debug_mode()
    waits: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as said:
            torch.cuda.set_sync_debug_mode("warn")  # an error would leave a step half done
            said.clear()  # what torch says of the mode itself, the first time
            warnings.filterwarnings("always", message=SYNCHRONIZES)
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for warning in said:
        if SYNCHRONIZES in str(warning.message):
            waits.append(warning)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class RepeatedStep:
    """A step that repeats but for the contents of its tensors: run first, then captured as a CUDA graph and replayed.

    It is `refused`, and run as ever, where it cannot be captured, or the host waited for the device twice: in a first
    run it may wait for what is made once.
    """

    def __init__(self, graphs: CudaGraphs, step: Callable[[], Any]) -> None:
        self.graphs = graphs
        self.step = step
        self.refused = False
        self._captured: Callable[[], Any] | None = None
        self._runs = 0
        self._ready = False

    def __call__(self) -> Any:
        # The run before has made what is made once (workspaces, tables, compiled kernels): a capture must not do so.
        if self._ready and self._captured is None and not self.refused:
            try:
                self._captured = self.graphs.capture(self.step)
            except RuntimeError as error:
                self._refuse(f"they cannot be captured ({str(error).splitlines()[0]})")
        if self._captured is not None:
            return self._captured()
        output = self.graphs.run(self.step)
        self._ready = not self.graphs.waited
        self._runs += 1
        if self.graphs.waited and self._runs > 1:
            self._refuse("the code of the model waits for the device in every step")
        return output

    def _refuse(self, reason: str) -> None:
        warn_once(f"{WITHOUT}: {reason}")
        self.refused = True


def repeat_steps(model: Any, step: Callable[[], Any], tokens: int) -> RepeatedStep | None:
    """Make a step that is captured and replayed, for `tokens` tokens; None where that cannot be, or does not pay."""
    graphs = find_graphs(model.device) if tokens >= MIN_CAPTURED_TOKENS and not is_spread(model) else None
    return None if graphs is None else RepeatedStep(graphs, step)


def find_graphs(device: torch.device) -> CudaGraphs | None:
    """Return the CUDA graphs of a device; None if it has none."""
    return CudaGraphs(device) if device.type == "cuda" else None


class CompiledModel:
    """A model whose calls torch.compile makes one graph each; where it cannot, it warns, and they run as ever."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.failed = False
        self._compiled: Any = torch.compile(model.__call__, fullgraph=True)

    def __call__(self, **given: Any) -> Any:
        if not self.failed:
            from torch._dynamo import config
            from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

            # Every plan of a step is a variant, and torch allows few before it gives up.
            limit: Any = config.patch(recompile_limit=MOST_COMPILED)
            try:
                with limit:
                    return self._compiled(**given)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before any of it was done
                said, _, _ = str(error).partition("\n\n")  # behind it is advice for developers of PyTorch
                warn_once(f"{UNCOMPILED}: {' '.join(said.split())}")
                self.failed = True
        return self.model(**given)


class DecodeSteps:
    """Decode steps of `model` with `cache`: compiled, captured by `graphs`, or both (None: not).

    `tokens` are the most that will come.
    """

    def __init__(
        self,
        model: Any,
        cache: PlanCache,
        graphs: CudaGraphs | None,
        tokens: int | None = None,
        compiled: CompiledModel | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.graphs = graphs
        self.compiled = compiled
        self.without = WITHOUT if compiled is None else UNCOMPILED
        self.room = min(MAX_ROOM, MAX_ROOM if tokens is None else max(tokens, 1))
        self.stopped = False
        self._entered = False  # a step was done since these calls began
        self._known: dict[Hashable, RepeatedStep] = {}
        self._holders: list[Any] = []  # what planned layers held at the first step
        self._packed: list[int] = []  # how often they had made their tensors anew, when steps were captured
        self._inputs: Any = None  # ids, positions and mask, tensors that stay where they are

    def serve(self, given: Mapping[str, Any]) -> Any | None:
        """Run a call of the model with these arguments if it is a decode step; None, and nothing done, if not."""
        output = None
        if not self.stopped and self._serves(given):
            self._enter(given["input_ids"], given.get("position_ids"))
            with self.cache.reserve_positions(self._inputs[1]):
                output = self._done({name: value for name, value in given.items() if name not in INPUTS})
        if self.stopped:
            self.close()
        return output

    def leave(self) -> None:
        """Reserve no more room; captured steps stay for later calls with the same tensors."""
        if self._entered:
            self.cache.reserve(0)
        self._entered = False

    def close(self) -> None:
        """Reserve no more room, and drop the graphs."""
        self.leave()
        self._known = {}
        self._holders = []
        self._inputs = None
        self.stopped = True

    def _serves(self, given: Mapping[str, Any]) -> bool:
        ids = given.get("input_ids")
        positions = given.get("position_ids")
        planned = self.cache.planned.values()
        holders = [layer.holder for layer in planned]
        # First what is none of our steps, and no reason to stop: they may come later.
        if find_cache(given) is not self.cache or ids is None or None in holders:
            return False  # of another model that drafts, or the prompt
        # Then what will not get better: tokens that are taken back, or rows that move between the steps.
        changed = self._entered and (ids.shape[1] != 1 or holders != self._holders)
        if changed or any(layer.drafts for layer in planned):
            return self._stop("several tokens come at a time, or sequences are rearranged between them")
        # A question of several tokens runs as ever, and single tokens follow it.
        if ids.shape[1] != 1 or given.get("inputs_embeds") is not None:
            return False
        if (positions is not None and positions.dim() != 2) or torch.is_grad_enabled() or self.model.training:
            return False
        unserved = [name for name in ("output_attentions", "output_hidden_states") if given.get(name)]
        if unserved:
            return self._stop(f"what {' and '.join(unserved)} asks for would be overwritten by the next step")
        mask = given.get("attention_mask")
        # `generate` adds to a mask what comes, and hides no more
        if (
            not self._entered
            and mask is not None
            and not (mask.dim() == 2 and self.cache.read_mask.shows_all(mask.bool()))
        ):
            return self._stop("the attention_mask hides tokens that were read before")
        # A graph would keep whatever such an argument held when it was captured.
        strange = [key for key, value in given.items() if key not in INPUTS and not isinstance(value, PLAIN_TYPES)]
        return self._stop(f"they are given {', '.join(sorted(strange))}") if strange else True

    def _stop(self, reason: str) -> bool:
        warn_once(f"{self.without}: {reason}")
        self.stopped = True
        return False

    def _enter(self, ids: Tensor, positions: Tensor | None) -> None:
        """Copy a step's tokens and positions to where graphs read them; None: the model's default positions."""
        if positions is None:
            positions = torch.full((1, 1), self.cache.get_seq_length(), device=ids.device)
        if not self._entered:
            holders = [layer.holder for layer in self.cache.planned.values()]
            if holders != self._holders or self._inputs[1].shape != positions.shape:
                # a mask of four dimensions is taken as it is; planned layers have no use for one
                mask = torch.ones(len(ids), 1, 1, 1, dtype=torch.bool, device=ids.device)
                self._inputs = torch.empty_like(ids), torch.empty_like(positions), mask
                self._holders = holders
                self._packed = []
            self.cache.reserve(self.room)
            self._entered = True
        self._inputs[0].copy_(ids)
        self._inputs[1].copy_(positions)

    def _done(self, others: Mapping[str, Any]) -> Any:
        """Run the prepared step."""
        if self.graphs is None:
            return self._step(others)
        plan = self.cache.step_plan()
        packed = [holder.packed for holder in self._holders]
        # Graphs hold addresses: once a tensor was made anew, none of them is right.
        if packed != self._packed:
            self._known.clear()
            self.graphs.drop()
            self._packed = packed
        key = plan, tuple(sorted(others.items()))
        step = self._known.get(key) or RepeatedStep(self.graphs, lambda: self._step(others))
        # What will not come again, or would be one too many, runs without being remembered.
        if plan is not None and len(self._known) < MOST_GRAPHS:
            self._known[key] = step
        output = step()
        # The answer is frozen in what was captured, and wrong from the next step on.
        if self.cache.asked:
            self._stop("the code of the model asks how long the sequence is in every step")
        if step.refused:
            self.graphs = None
            self.stopped |= self.compiled is None
        return output

    def _step(self, others: Mapping[str, Any]) -> Any:
        ids, positions, mask = self._inputs
        call = self.model if self.compiled is None else self.compiled
        return call(input_ids=ids, position_ids=positions, attention_mask=mask, **{CACHE: self.cache}, **others)


def find_capture_problem(model: Any, cache: PlanCache) -> str | None:
    """Say why no decode step of a model and a cache can be captured; None: it can be tried."""
    if any(layer.exact for layer in cache.planned.values()):
        return "`exact` attention is that of transformers, which copies all keys for every token"
    if others := sorted({type(layer).__name__ for layer in cache.layers} - {"EvictingLayer"}):
        return f"layers of the model that the plan leaves alone have caches that move ({', '.join(others)})"
    return "the model is spread over several devices" if is_spread(model) else None


def is_spread(model: Any) -> bool:
    """Return whether a model is on several devices."""
    return len({tensor.device for tensor in (*model.parameters(), *model.buffers())}) > 1


@lru_cache(maxsize=32)
def _make_stepping_class(kind: Any) -> type[Any]:
    """Return a subclass of a model's class whose calls may be decode steps that were captured."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = None if args else self._kvsearch_steps.serve(kwargs)
        return kind.__call__(self, *args, **kwargs) if output is None else output

    members = {"__slots__": ("_kvsearch_steps",), "__call__": call, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


@contextmanager
def use_steps(
    model: Any,
    cache: PlanCache,
    tokens: int | None = None,
    captured: bool = True,
    compiled: CompiledModel | None = None,
    kept: list[DecodeSteps] | None = None,
) -> Iterator[Any]:
    """Yield a model, or a view of it (the same `__dict__`) whose decode steps are captured or compiled.

    The model itself stays as it is. Where neither is possible the reason is said once. Steps are `kept` in a list for
    the next time with the same model and cache.
    """
    pays = tokens is None or tokens >= MIN_CAPTURED_TOKENS
    graphs = find_graphs(model.device) if captured and pays else None
    wanted = pays and (graphs is not None or compiled is not None)
    reason = find_capture_problem(model, cache) if wanted else None
    if reason is not None:
        warn_once(f"{WITHOUT if compiled is None else UNCOMPILED}: {reason}")
    if not wanted or reason is not None:
        yield model
        return
    steps = kept.pop() if kept else DecodeSteps(model, cache, graphs, tokens, compiled)
    # The view shares the model's `__dict__`, so that weights, hooks and settings are the model's own. Only its class is
    # another one, whose calls may be replays, and the model itself is never patched.
    kind: Any = type(model)
    view = object.__new__(_make_stepping_class(kind))
    object.__setattr__(view, "__dict__", model.__dict__)
    object.__setattr__(view, "_kvsearch_steps", steps)
    try:
        yield view
    finally:
        if kept is None or steps.stopped:
            steps.close()
        else:
            steps.leave()
            kept.append(steps)
