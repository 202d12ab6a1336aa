"""kvsearch policies, tasks, recipes, doctor: the choices, in short or in full, and what works on this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvsearch.commands.groups import ModelOptions
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import JobOptions, Seeded, option
from kvsearch.config.recipes import JOBS, find_shipped_recipe, list_shipped_recipes, read_description
from kvsearch.models.loading import BUNDLED
from kvsearch.models.real import REAL_MODELS
from kvsearch.policies.registry import PolicyFacts, describe_policy, load_catalog
from kvsearch.report.table import Table
from kvsearch.tasks.catalog import SETS, describe_tasks
from kvsearch.tasks.catalog import load_catalog as load_catalog_of_tasks
from kvsearch.tasks.given import resolve_example

if TYPE_CHECKING:
    from kvsearch.report.figures import ReportPart

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "scikit-learn", "cma", "pandas", "safetensors", "typer",
    "pydantic",
)  # fmt: skip
EXTRAS = ("ray", "lm-eval", "gguf")
NOT_INSTALLED = "missing"
OPEN = "depends on its parameters"
Listing = tuple[dict[str, Any], "Iterable[ReportPart]"]  # for programs, and part by part for people
STAGE_DESCRIPTIONS = {None: OPEN, 1: "one score chooses what stays", 2: "two scores in turn choose what stays"}


class ListingOptions(JobOptions):
    """Options of listings."""

    name: str | None = option(
        None,
        "Show this one in full; several tasks as for --tasks of evaluate, or the recipes of a command, are listed.",
        argument=True,
    )


# --- policies -------------------------------------------------------------------------------------------


@job(ListingOptions)
def policies(options: ListingOptions, reporter: Reporter) -> Listing:  # noqa: ARG001 - as others have it
    """Return all policies, or all there is to know about one."""
    if options.name is not None:
        policy = describe_policy(options.name)
        return asdict(policy), _policy_parts(policy)
    known, faults = load_catalog()
    rows = [(item.name, " ".join(item.phases) or "-", item.decode or OPEN, item.source, item.package) for item in known]
    columns = ["name", "phases", "while decoding", "source", "package"]
    table = Table.plain("eviction policies", columns, rows, words=columns, tight=True)
    content = {"policies": list(map(asdict, known)), "problems": faults}
    return content, [table, *("{name} ({package}): {error}".format(**fault) for fault in faults)]


def _policy_parts(policy: PolicyFacts) -> Iterator[ReportPart]:
    for text in (policy.title, policy.formula):
        if text:
            yield from (*text.split("\n"), "")
    stages = {"of the prompt": STAGE_DESCRIPTIONS[policy.stages]} if policy.phases else {}
    kept = OPEN if policy.sinks is None else f"{policy.sinks} first entries, {policy.window} most recent ones"
    yield {
        "name": policy.name, "source": policy.source, "package": policy.package, "class": policy.implementation,
        "evicts in": " and ".join(policy.phases) or "no phase: it keeps everything", **stages,
        "while decoding": policy.decode or OPEN,
        "needs": OPEN if policy.needs is None else ", ".join(policy.needs) or "keys and values",
        "always kept": kept,
        **{
            f"parameter {name}": f"default {'(none)' if default is None else default}"
            for name, default in policy.parameters.items()
        },
    }  # fmt: skip


# --- tasks ----------------------------------------------------------------------------------------------


@job(ListingOptions)
def tasks(options: ListingOptions, reporter: Reporter) -> Listing:  # noqa: ARG001 - as others have it
    """Return tasks, or all there is to know about a single one."""
    known, faults = load_catalog_of_tasks() if options.name is None else (describe_tasks(options.name), [])
    content = {"tasks": [task.facts() for task in known], "sets": SETS, "problems": faults}
    if len(known) == 1:
        (task,) = known
        facts = {
            "task": task.spec, "category": task.category, "metric": task.metric, "texts from": task.source,
            "needs": task.needs or "no file of yours", "packages": ", ".join(task.packages) or "none besides kvsearch",
            "options": " ".join(task.options), "splits": f"{', '.join(task.splits)}; default {task.split}",
        }  # fmt: skip
        return content, [facts]
    rows = [
        (item.spec, item.category, item.metric, ", ".join(item.packages) or "-", item.needs or item.source)
        for item in known
    ]
    columns = ["task", "category", "metric", "packages", "texts from"]
    table = Table.plain("tasks", columns, rows, words=columns, tight=True)
    sets = "; ".join(f"{name} ({len(members)})" for name, members in SETS.items())
    lines = map("{name} ({package}): {error}".format_map, faults)
    return content, [table, *lines, f"sets: {sets}. One in full: kvsearch tasks SPEC"]


# --- recipes --------------------------------------------------------------------------------------------


@job(ListingOptions)
def recipes(options: ListingOptions, reporter: Reporter) -> Listing:  # noqa: ARG001 - as others have it
    """List the shipped recipes with their descriptions, or return the text of one."""
    if options.name is not None and options.name not in JOBS:
        name, path = find_shipped_recipe(options.name)
        text = path.read_text(encoding="utf-8")
        return {"name": name, "recipe": text}, text.splitlines()
    rows = [(name, read_description(path)) for name, path in list_shipped_recipes(options.name or "").items()]
    columns = ["command/name", "what it is"]
    table = Table.plain("recipes: kvsearch COMMAND --recipe NAME", columns, rows, words=columns, tight=True)
    return {"recipes": [{"name": name, "about": text} for name, text in rows]}, [table]


# --- doctor ---------------------------------------------------------------------------------------------


class DoctorOptions(ModelOptions, Seeded):
    """Options of `doctor`: loading of the bundled models."""


@job(DoctorOptions)
def doctor(options: DoctorOptions, reporter: Reporter, models: ModelLoader) -> dict[str, Any]:  # noqa: ARG001 - the loader says all
    """Return versions, devices and replies of the bundled models; absent packages are "missing"."""
    import torch

    facts = {"python": platform.python_version(), "kvsearch": version("kvsearch")}
    for name in (*PACKAGES, *EXTRAS):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = NOT_INSTALLED if name in PACKAGES else "not installed (optional)"
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts |= {
        "devices": ", ".join(devices) or "cpu only",
        "cores": str(os.cpu_count()),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0"),
    }
    facts |= {f"{name} model": str(real.path) for name, real in REAL_MODELS.items() if real.is_here}
    if not REAL_MODELS["smollm2"].is_here:
        facts["smollm2 model"] = f"not fetched (optional): {REAL_MODELS['smollm2'].advice}"
    if NOT_INSTALLED in facts.values():
        return facts
    from kvsearch.evaluation.answer import answer

    for name in BUNDLED:
        context, prompt, plain = resolve_example(name, None, None, options.seed)
        (reply,) = answer(models.load(name), None, context, [prompt], plain, 3)
        facts[f"{name} model"] = f"answers {reply.text!r} from {reply.entries} entries"
    return facts
