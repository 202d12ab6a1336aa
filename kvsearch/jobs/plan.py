"""kvsearch plan: make plans without calibration, change plans, and write them for people to edit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from kvsearch.config.options import JobOptions, Option, Params
from kvsearch.errors import UsageError
from kvsearch.jobs.groups import WithModel
from kvsearch.jobs.plan_files import PlanOptions, Sized, checked_plan
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.budgets.pyramidkv import Pyramid
    from kvsearch.budgets.uniform import Uniform
    from kvsearch.plan import PhasePlan, Plan
    from kvsearch.policies import Policy


class UniformOptions(PlanOptions, Sized, WithModel):
    """One policy, how much it keeps, and when."""

    job: ClassVar[str] = "plan uniform"

    policy: Annotated[str, Option("Eviction policy; see `kvsearch policies`.")]
    settings: Annotated[
        Params | None, Option("A policy parameter, as in --set window=16; repeatable.", flag="--set", repeated=True)
    ] = None
    phases: Annotated[str, Option("When to evict: prefill, decode or both.")] = "prefill"
    allocation: Annotated[
        str,
        Option(
            "What to do with the budgets: static keeps to them; adakv, cake or lava share out what they add up to "
            "anew for every prompt. With options: lava:layers=planned,floor_share=0."
        ),
    ] = "static"

    def make(self, talk: Talk) -> Plan:
        """Make the plan; what can be checked without a model is checked before one is loaded."""
        from kvsearch.calibration.fitted import fitted_policy
        from kvsearch.plan import phases_of
        from kvsearch.policies import create_policy
        from kvsearch.strategies.direct import check_request, direct_plan, parse_allocation

        name, fitted = fitted_policy(self.policy)
        policy, allocation = create_policy(name, {**fitted, **(self.settings or {})}), parse_allocation(self.allocation)
        phases, allocator, size = phases_of(self.phases), self.allocator(policy), self.size
        check_request(policy, size, allocation)
        self.check_output()
        return self.checked(direct_plan(self.load(self.model, talk), policy, size, phases, allocator, allocation))

    def allocator(self, policy: Policy) -> Uniform | Pyramid:  # noqa: ARG002 - as a pyramid has it
        """Return what shares the total out between layers and kv heads."""
        from kvsearch.budgets.uniform import Uniform

        return Uniform()


class PyramidOptions(UniformOptions):
    """One policy, how much it keeps, when, and how steep the pyramid is."""

    job: ClassVar[str] = "plan pyramid"

    beta: Annotated[
        float, Option("How many times the mean budget is of the last layer's, protected entries aside.")
    ] = 20.0

    def allocator(self, policy: Policy) -> Uniform | Pyramid:
        """See `UniformOptions.allocator`; UsageError if beta is below 1."""
        from kvsearch.budgets.pyramidkv import Pyramid

        return Pyramid(self.beta, policy.floor)


class ScaleOptions(PlanOptions, Sized):
    """The plan, and its new size."""

    job: ClassVar[str] = "plan scale"

    plan: Annotated[Path, Option("The plan to scale.", argument=True)]
    length: Annotated[
        int | None, Field(ge=1), Option("Prompt length the integer budgets are for.", shown="that of the plan")
    ] = None

    def make(self, talk: Talk) -> Plan:  # noqa: ARG002
        """Scale the plan."""
        from kvsearch.plan import scale

        self.check_output()
        plan = checked_plan(self.plan)
        return self.checked(scale(plan, budget=self.budget, ratio=self.ratio, length=self.length))


class ConvertOptions(PlanOptions):
    """The plan or profile, and the prompts it is for."""

    job: ClassVar[str] = "plan convert"

    plan: Annotated[Path, Option("A plan that scales with the prompt, or a profile with --ratio.", argument=True)]
    length: Annotated[int, Field(ge=1), Option("Prompt length, in tokens.")]
    ratio: Annotated[float | None, Option("With a profile: share of the cache to evict.")] = None

    def make(self, talk: Talk) -> Plan:  # noqa: ARG002
        """Convert the plan, or that of the profile at the ratio."""
        from kvsearch.plan import Size, convert, load_profile
        from kvsearch.plan.saved import PROFILE
        from kvsearch.strategies.from_profile import plan_from_profile

        self.check_output()
        file = self.plan / PROFILE if self.plan.is_dir() else self.plan
        if file.suffix == Path(PROFILE).suffix:
            profile = load_profile(file)
            if self.ratio is None:
                raise UsageError(f"{file} is a profile: give the --ratio at which to make a plan of it")
            plan = plan_from_profile(profile, Size(ratio=self.ratio))
        else:
            plan = checked_plan(file)
            if self.ratio is not None:
                raise UsageError(
                    f"{file} is a plan, and --ratio is for profiles: give another ratio by `kvsearch plan scale`"
                )
        return self.checked(convert(plan, self.length))


class MergeOptions(PlanOptions):
    """Where policies come from, and where budgets."""

    job: ClassVar[str] = "plan merge"

    policies: Annotated[Path, Option("Take the policies of this plan.")]
    budgets: Annotated[Path, Option("Take the budgets of this plan, and all else.")]

    def make(self, talk: Talk) -> Plan:  # noqa: ARG002
        """Merge the plans."""
        from kvsearch.plan import merge

        self.check_output()
        return self.checked(merge(checked_plan(self.policies), checked_plan(self.budgets)))


class BuildOptions(PlanOptions):
    """The plan as people edit it."""

    job: ClassVar[str] = "plan build"

    strategy: Annotated[Path, Option("A YAML file as `plan yaml` writes it.", argument=True)]

    def read(self) -> Plan:
        """Read the YAML; UsageError if no plan can be written, or says all that is wrong with it."""
        from kvsearch.plan.files import read_bytes
        from kvsearch.plan.limits import MOST_YAML
        from kvsearch.strategies.from_yaml import plan_from_yaml

        self.check_output()
        return plan_from_yaml(read_bytes(self.strategy, MOST_YAML), str(self.strategy))

    def make(self, talk: Talk) -> Plan:
        """Read the YAML; warns of what is doubtful."""
        plan = self.read()
        for line in _disagreements(plan):
            talk.warn(line)
        return self.checked(plan)


class YamlOptions(JobOptions):
    """The plan, and where its YAML is written to."""

    job: ClassVar[str] = "plan yaml"

    plan: Annotated[Path, Option("The plan file.", argument=True)]
    output: Annotated[Path, Option("The YAML file.", short="-o", recorded=False)]
    force: Annotated[bool, Option("Replace the YAML file.", recorded=False)] = False

    def make(self) -> str:
        """Return the text of the file; UsageError if it cannot be written."""
        from kvsearch.plan import load_plan
        from kvsearch.plan.files import STRATEGY_FILE, check_output
        from kvsearch.plan.yaml import plan_to_yaml

        check_output(self.output, self.force, STRATEGY_FILE)
        return plan_to_yaml(load_plan(self.plan))


@job(UniformOptions)
def uniform(options: UniformOptions, talk: Talk) -> Plan:
    """Write a plan of one policy with the same budget for every layer and kv head.

    Raises:
        UsageError: an unknown policy or setting, a size that it does not allow, or a file that cannot be written.
        IncompatibleError: the model cannot be loaded.
    """
    return options.write(talk)


@job(PyramidOptions)
def pyramid(options: PyramidOptions, talk: Talk) -> Plan:
    """Write a plan of one policy with PyramidKV's budgets; errors as for `uniform`."""
    return options.write(talk)


@job(ScaleOptions)
def scale(options: ScaleOptions, talk: Talk) -> Plan:
    """Write a plan with the shape of another at another size; UsageError if it cannot be scaled to it."""
    return options.write(talk)


@job(ConvertOptions)
def convert(options: ConvertOptions, talk: Talk) -> Plan:
    """Write the entries that a plan made by a ratio keeps of prompts of one length.

    Raises:
        UsageError: the plan was not made by a ratio, or is a profile and no ratio is given.
    """
    return options.write(talk)


@job(MergeOptions)
def merge(options: MergeOptions, talk: Talk) -> Plan:
    """Write a plan with the policies of one plan and the budgets of another; UsageError if they do not fit together."""
    return options.write(talk)


@job(BuildOptions)
def build(options: BuildOptions, talk: Talk) -> Plan:
    """Write the plan of a YAML file; UsageError says all that is wrong with it, with its lines."""
    return options.write(talk)


@job(YamlOptions)
def yaml(options: YamlOptions, talk: Talk) -> str:  # noqa: ARG001
    """Write a plan in YAML to read and edit, and return the text; UsageError if a file cannot be read or written."""
    from kvsearch.plan.files import atomic_write

    text = options.make()
    atomic_write(options.output, text.encode(), overwrite=options.force)
    return text


def uncounted(plan: Plan) -> Iterator[str]:
    """Say what no total counts, by phase."""
    for name, part in _phases(plan):
        if whole := len(part.layers) - len(part.planned_layers):
            keep = "layer keeps its" if whole == 1 else "layers keep their"
            yield f"{name}: {whole} {keep} full cache, which no total counts"


def _disagreements(plan: Plan) -> Iterator[str]:
    """Say where phases, budgets and length do not fit together, which may be meant."""
    totals = {name: part.total for name, part in _phases(plan)}
    if len(set(totals.values())) > 1:
        yield (
            f"prefill budgets add up to {totals['prefill']} entries, decode budgets to {totals['decode']}: the total "
            "of the plan is that of prefill alone"
        )
    for name, part in _phases(plan):
        kept = [(layer.policy.name, entries) for layer in part.layers if layer for entries in layer.budget]
        above = sum(plan.length is not None and entries > plan.length for _, entries in kept)
        if above:
            yield (
                f"{name}: {above} budgets are above the length of {plan.length} tokens, so the total counts more than "
                "there is to keep"
            )
        if plan.length is None and any(policy == "full" for policy, _ in kept):
            yield f"{name}: policy full keeps a whole prompt, whatever its budget counts: give a length to check it by"


def _phases(plan: Plan) -> list[tuple[str, PhasePlan]]:
    return [(name, part) for name in ("prefill", "decode") if (part := getattr(plan, name)) is not None]
