"""kvsearch plan: make plans without calibration, change plans, and write them for people to edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.plan_checks import check_plan
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.commands.groups import BUDGET, MODEL, RATIO, ModelOptions, format_command
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import RESULT, RULE, SIZE, JobOptions, Params, option
from kvsearch.core.errors import UsageError
from kvsearch.core.files import check_output, read_text, write_atomically
from kvsearch.core.limits import MOST_YAML
from kvsearch.plan import Plan, Size, arithmetic, load_plan, parse_phases, save_plan
from kvsearch.plan.size import LAID_OUT
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.fitted import parse_policy
from kvsearch.report.plans import DifferenceView


class SizeOptions(JobOptions):
    """Options of the size of a plan."""

    ratio: float | None = option(None, RATIO)
    budget: int | None = option(None, BUDGET, ge=1)
    length: int | None = option(None, "Prompt length that a ratio's integer budgets are for.", ge=1)

    @property
    def size(self) -> Size:
        """The size of the plan; UsageError if there is none, or two, or one out of range."""
        return Size(self.budget, self.ratio, self.length)


class PlanOptions(JobOptions):
    """Options of jobs that write a plan."""

    output: Path = option(..., "The plan file.", RESULT, short="-o", recorded=False)
    force: bool = option(False, "Replace the plan file.", recorded=False)

    def evaluation_options(self) -> JobOptions:
        """Return the options for evaluating the plan and loading its model."""
        return self


def make_checked_plan(options: PlanOptions, make: Callable[[], Plan]) -> Plan:
    """Make a plan and check it without writing it, as a dry run does.

    Raises:
        UsageError: the file cannot be written, which is found out before there is a plan, or parts do not fit together.
    """
    check_output(options.output, options.force)
    plan = make()
    check_plan(plan, f"the plan for {options.output}")
    return plan


def write_plan(plan: Plan, options: PlanOptions) -> Plan:
    """Write a plan to the file that the options name, and return it; EnvironmentFault if it cannot be written."""
    save_plan(plan, options.output, overwrite=options.force)
    return plan


def resolve_size(budget: int | None, ratio: float | None, length: int | None, measured: Sequence[int]) -> Size:
    """Resolve the size: the given one, else the one that was `measured`; UsageError if there is none or several."""
    if budget is not None or ratio is not None or not measured:
        return Size(budget, ratio, length)
    if len(measured) == 1:
        return Size(measured[0], length=length)
    known = ", ".join(map(str, measured))
    raise UsageError(f"signals were measured at {known} entries per kv head: say how many to keep with --budget")


def load_checked_plan(path: Path) -> Plan:
    """Load a plan file and check its policies; errors of the file are raised before torch is loaded.

    Raises:
        UsageError: the file, a policy or a budget of it cannot be used.
    """
    plan = load_plan(path)
    check_plan(plan, str(path))
    return plan


class UniformOptions(PlanOptions, SizeOptions, ModelOptions):
    """One policy, how much it keeps, and when."""

    model: str = option(..., MODEL)
    policy: str = option(
        ..., "Eviction policy; see `kvsearch policies`.", SIZE, completes="kvsearch.policies.registry:list_policy_names"
    )
    settings: Params | None = option(
        None, "A policy parameter, as in --set window=16; repeatable.", flag="--set", repeated=True
    )
    length: int | None = option(
        None, "Prompt length that a ratio's integer budgets are for; they follow the prompt at hand.",
        shown=str(LAID_OUT), ge=1,
    )  # fmt: skip
    phases: str = option("prefill", "When to evict: prefill, decode or both.", RULE)
    allocation: str = option(
        "static",
        "Static budgets, or adakv, cake or lava, which divide their total for each "
        "prompt. With options: lava:layers=planned,floor_share=0.",
    )

    def make_allocator(self, policy: Policy) -> Uniform | Pyramid:  # noqa: ARG002 - as a pyramid has it
        """Make the allocator that divides the total among layers and kv heads."""
        return Uniform()


class PyramidOptions(UniformOptions):
    """One policy, how much it keeps, when, and how steep the pyramid is."""

    beta: float = option(20.0, "The mean budget divided by that of the last layer, without protected entries.")

    def make_allocator(self, policy: Policy) -> Uniform | Pyramid:
        """Return a pyramid; UsageError if beta is below 1."""
        return Pyramid(self.beta, policy.least)


class ScaleOptions(PlanOptions, SizeOptions):
    """The plan, and its new size."""

    plan: Path = option(..., "The plan to scale.", argument=True)
    length: int | None = option(None, "Prompt length the integer budgets are for.", shown="that of the plan", ge=1)


class BuildOptions(PlanOptions):
    """The plan as people edit it."""

    strategy: Path = option(..., "A YAML file as `plan yaml` writes it.", argument=True)


class YamlOptions(JobOptions):
    """The plan, and where its YAML is written to."""

    plan: Path = option(..., "The plan file.", argument=True)
    output: Path = option(..., "The YAML file.", short="-o", recorded=False)
    force: bool = option(False, "Replace the YAML file.", recorded=False)

    def make(self) -> str:
        """Return the text of the file; UsageError if it cannot be written."""
        check_output(self.output, self.force)
        return plan_to_yaml(load_plan(self.plan))

    def next_command(self) -> str:
        """Return the line that makes a plan of the file again, without replacing one."""
        plan = self.output.with_suffix(".json")
        if plan.exists():
            plan = plan.with_stem(f"{plan.stem}-edited")
        return format_command("plan", "build", self.output, "-o", plan)


class DiffOptions(JobOptions):
    """The plans to compare."""

    before: Path = option(..., "A plan.", metavar="A", argument=True)
    after: Path = option(..., "Another plan.", metavar="B", argument=True)


# --- the plans --------------------------------------------------------------------------------------------------------


def make_direct(options: UniformOptions, reporter: Reporter, models: ModelLoader) -> Plan:  # noqa: ARG001
    """Make the plan of `uniform` or `pyramid`; what can be checked without a model is checked before one is loaded."""

    def make() -> Plan:
        name, params = parse_policy(options.policy)
        policy = create_policy(name, {**params, **(options.settings or {})})
        from kvsearch.evaluation.methods import check_request, make_direct_plan, parse_allocation

        allocation = parse_allocation(options.allocation)
        phases = parse_phases(options.phases)
        allocator = options.make_allocator(policy)
        size = options.size
        check_request(policy, size, allocation)
        return make_direct_plan(models.load(options.model), policy, size, phases, allocator, allocation)

    return make_checked_plan(options, make)


def make_scaled(options: ScaleOptions, reporter: Reporter) -> Plan:  # noqa: ARG001
    """Make the plan of `scale`."""

    def make() -> Plan:
        plan = load_checked_plan(options.plan)
        return arithmetic.scale(plan, budget=options.budget, ratio=options.ratio, length=options.length)

    return make_checked_plan(options, make)


def make_built(options: BuildOptions, reporter: Reporter) -> Plan:  # noqa: ARG001
    """Make the plan of `build`; UsageError says all that is wrong with its YAML."""

    def make() -> Plan:
        from kvsearch.selection.from_yaml import plan_from_yaml

        return plan_from_yaml(read_text(options.strategy, max_bytes=MOST_YAML), str(options.strategy))

    return make_checked_plan(options, make)


@job(UniformOptions)
def uniform(options: UniformOptions, reporter: Reporter, models: ModelLoader) -> Plan:
    """Write a plan of one policy with the same budget for every layer and kv head.

    Raises:
        UsageError: an unknown policy or setting, a size that it does not allow, or a file that cannot be written.
        IncompatibleError: the model cannot be loaded.
    """
    return write_plan(make_direct(options, reporter, models), options)


@job(PyramidOptions)
def pyramid(options: PyramidOptions, reporter: Reporter, models: ModelLoader) -> Plan:
    """Write a plan of one policy with PyramidKV's budgets; errors as for `uniform`."""
    return write_plan(make_direct(options, reporter, models), options)


@job(ScaleOptions)
def scale(options: ScaleOptions, reporter: Reporter) -> Plan:
    """Write a plan with the shape of another at another size; UsageError if it cannot be scaled to it."""
    return write_plan(make_scaled(options, reporter), options)


@job(BuildOptions)
def build(options: BuildOptions, reporter: Reporter) -> Plan:
    """Write the plan of a YAML file; UsageError says all that is wrong with it, with its lines."""
    return write_plan(make_built(options, reporter), options)


@job(YamlOptions)
def yaml(options: YamlOptions, reporter: Reporter) -> str:  # noqa: ARG001
    """Write a plan in YAML to read and edit, and return the text; UsageError if a file cannot be read or written."""
    text = options.make()
    write_atomically(options.output, text.encode(), overwrite=options.force)
    return text


@job(DiffOptions)
def diff(options: DiffOptions, reporter: Reporter) -> DifferenceView:  # noqa: ARG001
    """Return what differs between two plans; UsageError if one cannot be read."""
    plans = load_plan(options.before), load_plan(options.after)
    return DifferenceView(plans, (str(options.before), str(options.after)))
