"""kvsearch evolve: search the budgets on a task, choose on fresh questions, report on others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.cli import evaluate_options as own
from kvsearch.cli import evolve_options as given
from kvsearch.cli import task_options as asked
from kvsearch.cli.common import Common, command
from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Plan
    from kvsearch.search.executors.cluster import RayWorkers
    from kvsearch.search.recipe import EvolveRecipe
    from kvsearch.search.start_plans import Base

SPLITS = "train", "select", "report"


@command
def evolve(
    *,
    model: own.Model,
    common: Common,
    output: given.Output,
    budget: given.Budget = None,
    budgets: given.Budgets = None,
    recipe: given.Recipe = None,
    starts: given.Starts = None,
    policy: given.Policy = None,
    settings: given.Settings = None,
    space: given.Space = None,
    group_size: given.GroupSize = None,
    optimiser: given.Optimiser = None,
    objective: given.Objective = None,
    generations: given.Generations = None,
    population: given.Population = None,
    sigma: given.Sigma = None,
    parity: given.Parity = False,
    minibatch: given.Minibatch = None,
    finalists: given.Finalists = None,
    tasks: given.Tasks = None,
    length: asked.Length = None,
    details: asked.TaskDetails,
    protocol: given.ProtocolName = None,
    samples: given.Samples = None,
    max_length: own.MaxLength = None,
    batch: own.Batch = 8,
    max_memory: own.MaxMemory = None,
    max_evals: given.MaxEvals = None,
    max_time: given.MaxTime = None,
    max_tokens: given.MaxTokens = None,
    together: given.Together = None,
    workers: given.Workers = None,
    address: given.Address = None,
    timeout: given.Timeout = None,
    resume: given.Resume = False,
    force: given.Force = False,
) -> None:
    """Search the budgets that serve a task best, at an exact total; never worse than what it starts from.

    Searched on split train, chosen on split select, reported on split report. Writes plan.json, report.json and a
    ledger to the directory; an interrupted search goes on with --resume.

    Example: kvsearch evolve bundled --budget 64 --set window=8 --group-size 2 -o runs/evolve
    """
    from kvsearch.cli.evolve_run import Work, deliver, foretell, parse_limits
    from kvsearch.evaluation.compare import Settings
    from kvsearch.plan.protocol import find_protocol
    from kvsearch.search.evolve import Splits, prepare_search
    from kvsearch.search.front import prepare_front
    from kvsearch.search.ledger import check_search
    from kvsearch.search.recipe import resolve_recipe
    from kvsearch.tasks.catalog import find_tasks

    typed = {
        "budget": budget, "budgets": asked.whole_numbers("--budgets", budgets), "policy": policy, "space": space,
        "group_size": group_size, "optimiser": optimiser, "objective": objective, "generations": generations,
        "population": population, "sigma": sigma, "parity": parity or None, "minibatch": minibatch,
        "finalists": finalists, "tasks": tasks, "length": length, "protocol": protocol and find_protocol(protocol),
        "samples": samples, "max_length": max_length, "job": together,
    }  # fmt: skip
    what = resolve_recipe(recipe, typed, _parameters(settings))
    how = what.settings(common.seed)
    work = Work(
        parse_limits(max_evals, max_time, max_tokens), _workers(workers, address, timeout), own.memory_bytes(max_memory)
    )
    options = details.options(what.length)
    splits = Splits(*(find_tasks(what.tasks, replace(options, split=split)) for split in SPLITS))
    asking = Settings(what.samples, how.protocol, common.seed, batch, work.max_memory, what.max_length)
    check_search(output, resume, force)
    plans = _plans(starts)
    chosen = _policy(what, plans)
    base = _base(common.load(model), chosen, plans)
    prepared = (
        prepare_search(base, how, splits, asking, plans)
        if what.budgets is None
        else prepare_front(base, how, what.budgets, splits, asking, plans)
    )
    if common.dry_run:
        foretell(prepared, common)
    else:
        deliver(prepared, output, work, resume, force, common)


def _parameters(settings: list[str] | None) -> dict[str, bool | int | float | str]:
    from kvsearch.calibration.recipe import parse_setting

    return dict(parse_setting(item) for item in settings or ())


def _workers(count: int | None, address: str | None, timeout: float | None) -> RayWorkers | None:
    from kvsearch.search.executors.cluster import RayWorkers, import_ray

    if count is None:
        for flag, value in (("--ray-address", address), ("--job-timeout", timeout)):
            if value is not None:
                raise UsageError(f"{flag} is for Ray workers: say how many with --workers")
        return None
    import_ray()  # before a model is loaded
    return RayWorkers(count, address=address, job_timeout=timeout)


def _plans(paths: list[Path] | None) -> dict[str, Plan]:
    """Start plans by the names of their files."""
    from kvsearch.cli.common import checked_plan
    from kvsearch.search.start_plans import check_names

    check_names(path.stem for path in paths or ())
    found: dict[str, Plan] = {}
    for path in paths or ():
        if path.stem in found:
            raise UsageError(f"two start plans are called {path.stem}: rename one of the files")
        found[path.stem] = checked_plan(path)
    return found


def _policy(what: EvolveRecipe, plans: dict[str, Plan]) -> Any:
    """The policy that was asked for; None: those of the first start plan."""
    from kvsearch.policies import create_policy

    if what.policy is None and plans:
        if what.params:
            raise UsageError("--set is for a --policy: the policies of --start plans have their own parameters")
        return None
    return create_policy(what.policy or "snapkv", what.params)


def _base(loaded: LoadedModel, policy: Any, plans: dict[str, Plan]) -> Base:
    from kvsearch.search.start_plans import Base

    return Base.of(loaded, next(iter(plans.values())) if policy is None else policy)
