"""kvsearch bench: what plans save on this machine, beside the full cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from kvsearch.config.options import Option, Repeated
from kvsearch.errors import EnvironmentFault, IncompatibleError, UsageError
from kvsearch.jobs.groups import Loading, Numbers
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.models.loading import LoadedModel
    from kvsearch.report.speed import SpeedView
    from kvsearch.runtime import Program

LENGTH = 1024
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
        if not self.plan and self.budget is None:
            raise UsageError("there is nothing to compare with the full cache: give --plan, or --budget")


@job(BenchOptions)
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read as torch is loaded: its profiler talks on standard error
    loaded, programs = _prepared(options, talk)
    _required_memory(options, loaded, programs)
    from kvsearch.evaluation.speed import Workload, cache_kinds, measure
    from kvsearch.report.speed import SpeedView

    steps, found = options.new_tokens, []
    with talk.progress("measurements") as progress:
        for length in options.lengths:
            kinds = cache_kinds(loaded.model, programs, length + steps)
            for batch in options.batch:
                found += measure(loaded.model, kinds, Workload(batch, length, steps, options.rounds), progress)
    return SpeedView.of(loaded, found, steps, options.rounds)


def _prepared(options: BenchOptions, talk: Talk, *, weights: bool = True) -> tuple[LoadedModel, dict[str, Program]]:
    """Return the model, a shape only with its `weights` if these are wanted, and what is measured on it, by name."""
    from kvsearch.jobs.plan_files import checked_plan

    options.check()
    plans = {str(path): checked_plan(path) for path in options.plan}
    loaded = _model(options, talk, weights=weights)
    from kvsearch.runtime import Program

    programs = {name: Program.from_plan(loaded.model, plan) for name, plan in plans.items()}
    if options.budget is not None:
        programs[f"{options.policy}, {options.budget} per head"] = _uniform(loaded, options.policy, options.budget)
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


def _uniform(loaded: LoadedModel, policy: str, budget: int) -> Program:
    from kvsearch.policies import create_policy
    from kvsearch.runtime import Program

    made = create_policy(policy)
    if budget < made.floor:
        raise UsageError(f"--budget {budget} is below the {made.floor} entries that {policy} always keeps")
    return Program.uniform(loaded.model, made, lambda _: budget)


def _check_length(loaded: LoadedModel, tokens: int) -> None:
    from kvsearch.models.architecture import describe

    limit = describe(loaded.model).max_positions
    if limit and tokens > limit:
        raise IncompatibleError(f"{loaded.name} takes {limit} tokens, not {tokens}: lower --length or --new-tokens")
