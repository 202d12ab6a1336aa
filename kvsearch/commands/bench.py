"""kvsearch bench: what plans save on this machine, beside the full cache."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from kvsearch.benchmark.break_even import choose_checks, list_lengths
from kvsearch.commands.groups import MODEL, ModelOptions
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.plan import load_checked_plan
from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import QUESTIONS, SIZE, Listed, Repeated, option
from kvsearch.core.errors import IncompatibleError, KvsearchError, UsageError
from kvsearch.core.files import write_atomically
from kvsearch.evaluation.names import FULL
from kvsearch.models.loading import LoadedModel
from kvsearch.models.shapes import find_device, make_random_model
from kvsearch.models.work import StageCost, Work
from kvsearch.plan import Size, parse_phases
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import parse_policy
from kvsearch.report.artifacts import LoadedArtifact
from kvsearch.report.break_even import BreakEvenView, make_break_even_figures
from kvsearch.report.costs import Forecast, SpeedView, describe_machine
from kvsearch.report.draw import check_picture_target, write_row
from kvsearch.report.page import check_page_target, group_by_model, render

if TYPE_CHECKING:
    from kvsearch.benchmark.cache_costs import CacheCosts
    from kvsearch.runtime import Program

CURVE_BATCHES = (1, 4, 16)
CURVE_STEPS = 8
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Listed, Field(min_length=1)]


class BenchOptions(ModelOptions):
    """Options of `bench`: plans, shapes and prompts."""

    model: str | None = option(None, MODEL, help=f"{MODEL.help.removesuffix('.')}; none with --shape.")
    shape: str | None = option(
        None, "In place of a model: random weights in the shape of llama-3.1-8b, llama-3.1-70b or qwen3-8b, bfloat16."
    )
    layers: int | None = option(None, "With --shape: its first layers only.", ge=1)
    plan: Annotated[tuple[Path, ...], Repeated] = option((), "A plan file; repeatable.", SIZE, repeated=True)
    policy: str = option("snapkv", "With --budget: the policy that keeps so many entries.", SIZE)
    budget: int | None = option(None, "Entries per kv head, in place of a plan.", SIZE, ge=1)
    ratio: float | None = option(None, "In place of --budget: share of the cache to evict, at every length.", SIZE)
    phases: str = option("prefill", "With --policy: when to evict, prefill, decode or both.")
    skewed: bool = option(
        False, "With --policy: budgets of kv heads that differ as calibrated ones do, from a fifth to 2.5 times."
    )
    largest_batch: bool = option(
        False, "Also measure the largest batch that fits, for every cache and length, and its tokens per second."
    )
    compile: bool = option(
        False, "Also measure tokens with decode steps compiled by torch.compile, which takes a minute or more."
    )
    curve: Path | None = option(
        None,
        "Measure decode steps over several lengths and batches, and write from where on a plan pays as a picture "
        "(.svg, .png, .pdf) or page (.html).",
        SIZE,
        metavar="FILE",
    )
    batch: Sizes = option(
        (1,), "Prompts at a time; several are measured in turn.", QUESTIONS, metavar="N[,N...]",
        shown="1; with --curve 1,4,16",
    )  # fmt: skip
    length: Sizes = option(
        (1024,), "Tokens of a prompt; several are measured in turn.", QUESTIONS, metavar="N[,N...]",
        shown="1024; with --curve four lengths that are read in time",
    )  # fmt: skip
    new_tokens: int = option(32, "Tokens that are decoded in every round.", QUESTIONS, shown="32; with --curve 8", ge=1)
    rounds: int = option(5, "Rounds that are counted; one more warms up.", ge=1)

    @property
    def size(self) -> Size | None:
        """The size that is measured in place of a plan."""
        return None if self.budget is None and self.ratio is None else Size(self.budget, self.ratio)

    def check(self) -> None:
        """Raise UsageError unless there is one model, and something to measure on it."""
        size = self.size
        mistakes = (
            ((self.model is None) == (self.shape is None), "give a MODEL or a --shape, one of them"),
            (self.layers is not None and self.shape is None, "--layers is of a --shape"),
            (
                self.shape is not None and bool(self.plan),
                "a plan is of one model, and a --shape has random weights: give the MODEL of the plan, or --policy and "
                "--budget in place of the plan",
            ),
            (
                not self.plan and size is None,
                "there is nothing to compare with the full cache: give --plan, --budget or --ratio",
            ),
            (
                size is None and (self.skewed or self.phases != "prefill"),
                "--skewed and --phases are of --policy: give its --budget or --ratio",
            ),
            (
                self.curve is not None and (self.compile or self.largest_batch),
                "--curve measures steps of its own: leave --compile and --largest-batch out",
            ),
            (
                self.curve is not None and "batch" in self.model_fields_set and len(set(self.batch)) == 1,
                "--curve is fitted over several batches: give two or more, such as --batch 1,4",
            ),
            (
                self.curve is not None and "length" in self.model_fields_set and not choose_checks(self.length, [1]),
                "--curve is fitted over several lengths and checked between them: give such as --length 512,2048",
            ),
        )
        for is_made, mistake in mistakes:
            if is_made:
                raise UsageError(mistake)
        if self.curve is not None and self.curve.suffix == ".html":
            check_page_target(self.curve)
        elif self.curve is not None:
            check_picture_target(self.curve)

    def fill_curve(self, model: Any, programs: dict[str, Program]) -> BenchOptions:
        """Return these options with lengths, batches and tokens of a curve where none are given; errors as `bench`."""
        from kvsearch.benchmark.capacity import choose_lengths

        if self.curve is None:
            return self
        given = self.model_fields_set
        batches = tuple(sorted(set(self.batch))) if "batch" in given else CURVE_BATCHES
        steps = self.new_tokens if "new_tokens" in given else CURVE_STEPS
        lengths = sorted(set(self.length)) if "length" in given else choose_lengths(model, programs, batches, steps)
        return self.model_copy(update={"batch": batches, "length": tuple(lengths), "new_tokens": steps})

    @property
    def points(self) -> list[tuple[int, int]]:
        """Lengths and batches that are measured, with those that a curve is checked at last."""
        checks = choose_checks(self.length, self.batch) if self.curve is not None else []
        return [*product(self.length, self.batch), *checks]


def dry_run(options: BenchOptions, reporter: Reporter, models: ModelLoader) -> Forecast:
    """Forecast `bench`: its measurements, maximum bytes and costs; errors as `bench`.

    A model is loaded, and plans are checked against it; a `shape` takes no memory, so its time is not known.
    """
    options, loaded, programs, memory = _load(options, reporter, models, weights=False)
    content = {
        "model": loaded.name, "batch": list(options.batch), "length": list(options.length),
        "new_tokens": options.new_tokens, "rounds": options.rounds, **memory,
    }  # fmt: skip
    steps = options.new_tokens
    times = (1 + len(programs)) * options.rounds  # of the full cache, too
    stages = []
    for length, batch in options.points:
        prompts = batch if options.curve is None else 1 / len(options.batch)  # which are read once for all batches
        work = Work(prompts / batch + steps, prompts * length + batch * steps, prompts * length**2 / 2, longest=length)
        stages.append(StageCost(f"batch {batch}, {length:,} tokens", batch, 0, work * times))
    return Forecast(content, stages, loaded.model if options.shape is None else None)


@job(BenchOptions)
def bench(options: BenchOptions, reporter: Reporter, models: ModelLoader) -> SpeedView | BreakEvenView:
    """Measure plans and the full cache side by side: see `kvsearch.benchmark.speed.CacheCosts`; with `curve`, fit them.

    Raises:
        UsageError: no model, no plan, or a plan that cannot be used.
        IncompatibleError: the model and a plan do not fit, or a prompt is too long for it.
        EnvironmentFault: there is too little memory for the weights, or for all that is there at once.
    """
    for name, level in (("KINETO_LOG_LEVEL", "99"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, level)  # read as torch is loaded: its profiler talks on standard error
    options, loaded, programs, _ = _load(options, reporter, models)
    if options.curve is not None:
        view = _measure_curve(options, loaded, programs, reporter)
        try:
            if options.curve.suffix == ".html":
                page = render(group_by_model([LoadedArtifact(options.curve, "break-even", view)]))
                write_atomically(options.curve, page)
            else:
                write_row(list(make_break_even_figures(view)), options.curve)
        except KvsearchError:
            reporter.say(f"what was measured, as --json prints it: {json.dumps(view.as_json())}")
            raise
        return view
    from kvsearch.benchmark.capacity import find_largest_batches
    from kvsearch.benchmark.speed import Workload, list_cache_kinds, measure, measure_roofline
    from kvsearch.runtime.decode.steps import CompiledModel

    steps = options.new_tokens
    rounds = options.rounds
    costs: list[CacheCosts] = []
    roofline = measure_roofline(loaded.model.device, loaded.model.dtype)
    compiled = CompiledModel(loaded.model) if options.compile else None
    with reporter.progress("measuring: turn") as progress:
        for length in options.length:
            kinds = list_cache_kinds(loaded.model, programs, length + steps)
            for batch in options.batch:
                work = Workload(batch, length, steps, rounds)
                costs += measure(loaded.model, kinds, work, roofline, progress, compiled)
    if options.largest_batch:
        prompts = [Workload(1, length, steps, rounds) for length in options.length]
        with reporter.progress("finding the largest batch: cache") as progress:
            capacities = find_largest_batches(loaded.model, programs, prompts, progress)
        costs = [
            replace(cost, largest_batch=batch, largest_tokens_per_second=rate)
            for cost in costs
            for batch, rate in [capacities[cost.length, cost.cache]]
        ]
    return SpeedView.of(loaded, costs, steps, rounds, roofline)


def _measure_curve(
    options: BenchOptions, loaded: LoadedModel, programs: dict[str, Program], reporter: Reporter
) -> BreakEvenView:
    """Measure and fit the costs of steps, check them at points that were left out, and foretell the curve."""
    from kvsearch.benchmark.capacity import fit_forecaster, measure_steps
    from kvsearch.benchmark.speed import Workload
    from kvsearch.models.architecture import describe

    works = [Workload(batch, length, options.new_tokens, options.rounds) for length, batch in options.points]
    with reporter.progress("measuring: point") as progress:
        costs = measure_steps(loaded.model, programs, works, progress)
    grid = set(product(options.length, options.batch))
    measured = [cost for cost in costs if (cost.length, cost.batch) in grid]
    forecaster = fit_forecaster(loaded.model, programs, measured)
    shown = list_lengths(options.length, describe(loaded.model).max_positions)
    return BreakEvenView(
        machine=describe_machine(loaded, options.new_tokens, options.rounds),
        memory=forecaster.memory,
        measured=tuple(measured),
        checks=tuple(forecaster.costs[cost.cache].check(cost) for cost in costs if cost not in measured),
        costs=dict(forecaster.costs),
        points=tuple(
            forecaster.foretell(cache, length, batch, max(options.length))
            for cache, length, batch in product((FULL, *programs), shown, options.batch)
        ),
        break_evens=tuple(
            forecaster.find_break_even(plan, batch, shown[0], shown[-1])
            for plan, batch in product(programs, options.batch)
        ),
    )


def _load(
    options: BenchOptions, reporter: Reporter, models: ModelLoader, *, weights: bool = True
) -> tuple[BenchOptions, LoadedModel, dict[str, Program], dict[str, Any]]:
    """Load the model; return it with the programs to measure by name, and the bytes of the largest workload as JSON.

    The options returned are filled in where a curve's depend on the model.

    A shape is loaded with its `weights` only if these are wanted.
    """
    options.check()
    plans = {str(path): load_checked_plan(path) for path in options.plan}
    if options.shape is None:
        loaded = models.load(str(options.model))
    else:
        with reporter.loading(options.shape):
            loaded = make_random_model(options.shape, options.layers, options.device, options.dtype, weights=weights)
    from kvsearch.benchmark.capacity import require_memory
    from kvsearch.benchmark.speed import Workload, make_program
    from kvsearch.models.architecture import describe, require_same_rotary
    from kvsearch.runtime import Program

    programs = {name: Program.from_plan(loaded.model, plan) for name, plan in plans.items()}
    size = options.size
    if size is not None:
        parts_of_name = [options.policy, f"{100 * size.ratio:g}% evicted" if size.ratio else f"{size.budget} per head"]
        if options.skewed:
            parts_of_name.append("skewed")
        if options.phases != "prefill":
            parts_of_name.append(options.phases)
        policy = create_policy(*parse_policy(options.policy))
        program = make_program(loaded.model, policy, size, parse_phases(options.phases), options.skewed)
        programs[", ".join(parts_of_name)] = program
    options = options.fill_curve(loaded.model, programs)
    tokens = max(options.length) + options.new_tokens
    limit = describe(loaded.model).max_positions
    if limit and tokens > limit:
        raise IncompatibleError(f"{loaded.name} takes {limit} tokens, not {tokens}: lower --length or --new-tokens")
    for length in options.length:
        require_same_rotary(loaded.model, [length], options.new_tokens)
    largest = Workload(max(options.batch), max(options.length), options.new_tokens, options.rounds)
    return options, loaded, programs, require_memory(loaded.model, programs, largest, find_device(options.device))
