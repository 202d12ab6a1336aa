"""kvsearch bench: what plans save on this machine, beside the full cache."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from kvsearch.config.options import Option, Repeated
from kvsearch.errors import EnvironmentFault, IncompatibleError, UsageError
from kvsearch.jobs.groups import GIGABYTE, Loading, Numbers
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk
from kvsearch.plan.size import Size

if TYPE_CHECKING:
    from kvsearch.evaluation.cache_costs import CacheCosts
    from kvsearch.models.loading import LoadedModel
    from kvsearch.report.speed import SpeedView
    from kvsearch.runtime import Program

LENGTH = 1024
GPU_SHARE = 0.95  # of what is free, for the largest batch
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Numbers, Field(min_length=1)]


class BenchOptions(Loading):
    """What is measured, and on which prompts."""

    job: ClassVar[str] = "bench"

    model: Annotated[
        str | None,
        Option("A hub id, a local directory, `bundled` or `bundled-redundant`; none with --shape.", argument=True),
    ] = None
    shape: Annotated[
        str | None,
        Option("In place of a model: random weights in the shape of llama-3.1-8b, qwen3-8b or mistral-7b, bfloat16."),
    ] = None
    layers: Annotated[int | None, Field(ge=1), Option("With --shape: its first layers only.")] = None
    plan: Annotated[tuple[Path, ...], Repeated, Option("A plan file; repeatable.", repeated=True)] = ()
    policy: Annotated[str, Option("With --budget: the policy that keeps so many entries.")] = "snapkv"
    budget: Annotated[int | None, Field(ge=1), Option("Entries per kv head, in place of a plan.")] = None
    ratio: Annotated[
        float | None, Field(gt=0, lt=1), Option("In place of --budget: share of the cache to evict, at every length.")
    ] = None
    phases: Annotated[str, Option("With --policy: when to evict, prefill, decode or both.")] = "prefill"
    skewed: Annotated[
        bool, Option("With --policy: budgets of kv heads that differ as calibrated ones do, from a fifth to 2.5 times.")
    ] = False
    largest_batch: Annotated[
        bool, Option("Measure the largest batch that fits, too, for every cache and length, and its tokens per second.")
    ] = False
    max_memory: Annotated[
        float | None,
        Field(gt=0),
        Option("With --largest-batch: gigabytes for caches.", shown="8 on a CPU, what a GPU has free"),
    ] = None
    batch: Annotated[Sizes, Option("Prompts at a time; several are measured in turn.", metavar="N[,N...]")] = (1,)
    length: Annotated[
        Sizes | None,
        Option("Tokens of a prompt; several are measured in turn.", metavar="N[,N...]", shown=str(LENGTH)),
    ] = None
    new_tokens: Annotated[int, Field(ge=1), Option("Tokens that are decoded in every round.")] = 32
    rounds: Annotated[int, Field(ge=1), Option("Rounds that are counted; one more warms up.")] = 5

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of prompts, in tokens."""
        return self.length or (LENGTH,)

    @property
    def size(self) -> Size | None:
        """The size of what is measured in place of a plan."""
        return None if self.budget is None and self.ratio is None else Size(self.budget, self.ratio)

    def check(self) -> None:
        """Raise UsageError unless there is one model, and something to measure on it."""
        if (self.model is None) == (self.shape is None):
            raise UsageError("give a MODEL or a --shape, one of them")
        if self.layers is not None and self.shape is None:
            raise UsageError("--layers is of a --shape")
        if self.shape is not None and self.plan:
            raise UsageError(
                "a plan is of one model, and a --shape has random weights: give the MODEL of the plan, or --policy and "
                "--budget in place of the plan"
            )
        if self.budget is not None and self.ratio is not None:
            raise UsageError("--budget and --ratio are two sizes: give one of them")
        if not self.plan and self.size is None:
            raise UsageError("there is nothing to compare with the full cache: give --plan, --budget or --ratio")
        if self.size is None and (self.skewed or self.phases != "prefill"):
            raise UsageError("--skewed and --phases are of --policy: give its --budget or --ratio")
        if self.max_memory is not None and not self.largest_batch:
            raise UsageError("--max-memory is for --largest-batch, which is not given")


@job(BenchOptions, dry=True)
def dry_run(options: BenchOptions, talk: Talk) -> dict[str, Any]:
    """Return what would be measured and the bytes that it takes at most, as JSON; errors as `bench`.

    A model is loaded, and plans are checked against it; a `shape` takes no memory.
    """
    loaded, programs = _prepared(options, talk, weights=False)
    largest = _required_memory(options, loaded, programs)
    return {
        "model": loaded.name, "batch": list(options.batch), "length": list(options.lengths),
        "new_tokens": options.new_tokens, "rounds": options.rounds, **largest,
    }  # fmt: skip


@job(BenchOptions)
def bench(options: BenchOptions, talk: Talk) -> SpeedView:
    """Measure plans and the full cache side by side: see `kvsearch.evaluation.speed.CacheCosts`.

    Raises:
        UsageError: no model, no plan, or a plan that cannot be used.
        IncompatibleError: the model and a plan do not fit, or a prompt is too long for it.
        EnvironmentFault: there is too little memory for the weights, or for all caches at once.
    """
    for name, level in (("KINETO_LOG_LEVEL", "99"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, level)  # read as torch is loaded: its profiler talks on standard error
    loaded, programs = _prepared(options, talk)
    _required_memory(options, loaded, programs)
    from kvsearch.evaluation.speed import Workload, cache_kinds, measure
    from kvsearch.report.speed import SpeedView

    found: list[CacheCosts] = []
    steps = options.new_tokens
    with talk.progress("measurements") as progress:
        for length in options.lengths:
            kinds = cache_kinds(loaded.model, programs, length + steps)
            for batch in options.batch:
                found += measure(loaded.model, kinds, Workload(batch, length, steps, options.rounds), progress)
    if options.largest_batch:
        found = _with_capacities(options, loaded, programs, found, talk)
    return SpeedView.of(loaded, found, steps, options.rounds)


def _with_capacities(
    options: BenchOptions, loaded: LoadedModel, programs: dict[str, Program], costs: list[CacheCosts], talk: Talk
) -> list[CacheCosts]:
    """Return costs with the largest batch of each cache at each length; EnvironmentFault if none fits."""
    from kvsearch.evaluation.capacity import PROBED, largest_batch
    from kvsearch.evaluation.speed import Workload, cache_kinds
    from kvsearch.models.memory import default_memory
    from kvsearch.runtime.attention import using

    model, steps = loaded.model, options.new_tokens
    given = None if options.max_memory is None else int(options.max_memory * GIGABYTE)
    memory = default_memory(model.device, gpu_share=GPU_SHARE) if given is None else given
    kinds = [
        (length, kind) for length in options.lengths for kind in cache_kinds(model, programs, length + steps + PROBED)
    ]
    found = {}
    with talk.progress("largest batches") as progress, using(model, model.config._attn_implementation):
        for number, (length, kind) in enumerate(kinds, 1):
            found[length, kind.name] = largest_batch(model, kind, Workload(1, length, steps, options.rounds), memory)
            progress(number, len(kinds))
    return [
        replace(one, largest_batch=at.batch, largest_tokens_per_second=at.tokens_per_second)
        for one in costs
        for at in [found[one.length, one.cache]]
    ]


def _prepared(options: BenchOptions, talk: Talk, *, weights: bool = True) -> tuple[LoadedModel, dict[str, Program]]:
    """Return the model, a shape only with its `weights` if these are wanted, and what is measured on it, by name."""
    from kvsearch.jobs.plan_files import checked_plan

    options.check()
    plans = {str(path): checked_plan(path) for path in options.plan}
    loaded = _model(options, talk, weights=weights)
    from kvsearch.runtime import Program

    programs = {name: Program.from_plan(loaded.model, plan) for name, plan in plans.items()}
    if options.size is not None:
        programs |= _in_place_of_a_plan(options, loaded, options.size)
    _check_length(loaded, max(options.lengths) + options.new_tokens)
    return loaded, programs


def _model(options: BenchOptions, talk: Talk, *, weights: bool) -> LoadedModel:
    if options.shape is None:
        return options.load(str(options.model), talk)
    from kvsearch.models.shapes import random_model

    dtype = options.loading().dtype
    with talk.loading(options.shape):
        return random_model(options.shape, options.layers, options.device, dtype, weights=weights)


def _required_memory(options: BenchOptions, loaded: LoadedModel, programs: dict[str, Program]) -> dict[str, Any]:
    """Return what the caches of the largest workload take, and what is free; EnvironmentFault if that is less."""
    from kvsearch.evaluation.speed import Workload, cache_bytes
    from kvsearch.models.memory import free_bytes
    from kvsearch.models.shapes import device_of

    work = Workload(max(options.batch), max(options.lengths), options.new_tokens, options.rounds)
    caches = cache_bytes(loaded.model, programs, work)
    weights = sum(one.nbytes for one in loaded.model.parameters() if one.is_meta)  # that will be there, too
    devices = {one.device for one in loaded.model.parameters() if not one.is_meta} or {device_of(options.device)}
    free, needed = sum(map(free_bytes, devices)) - weights, sum(caches.values())
    if needed > free:
        raise EnvironmentFault(
            f"the caches of batch {work.batch} at {work.length:,} tokens, all in memory at once, take "
            f"{needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: lower --batch or --length, or measure fewer plans"
        )
    return {"bytes": caches, "needed_bytes": needed, "free_bytes": free}


def _in_place_of_a_plan(options: BenchOptions, loaded: LoadedModel, size: Size) -> dict[str, Program]:
    from kvsearch.evaluation.bench_programs import program_at
    from kvsearch.plan import phases_of
    from kvsearch.policies import create_policy

    at = f"{size.budget} per head" if size.ratio is None else f"{100 * size.ratio:g}% evicted"
    phases = phases_of(options.phases)
    name = ", ".join([options.policy, at, *["skewed"] * options.skewed, *[options.phases] * (phases != ("prefill",))])
    return {name: program_at(loaded.model, create_policy(options.policy), size, phases, options.skewed)}


def _check_length(loaded: LoadedModel, tokens: int) -> None:
    from kvsearch.models.architecture import describe

    limit = describe(loaded.model).max_positions
    if limit and tokens > limit:
        raise IncompatibleError(f"{loaded.name} takes {limit} tokens, not {tokens}: lower --length or --new-tokens")
