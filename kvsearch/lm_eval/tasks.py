"""Find, check and run tasks of lm-evaluation-harness under a plan, with the harness's own report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks.manager import TaskManager
from lm_eval.utils import handle_non_serializable

from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import EnvironmentFault, IncompatibleError, KvsearchError, UsageError
from kvsearch.core.items import Progress
from kvsearch.core.naming import suggest_nearest
from kvsearch.core.parsing import format_error
from kvsearch.core.resources import read_version
from kvsearch.lm_eval.model import ROLLING, Generation, PlannedLM
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan
from kvsearch.plan.schema import QUESTION_AWARE
from kvsearch.runtime import Program
from kvsearch.runtime.decode.next_tokens import record_generation_settings


def open_manager(folders: Sequence[Path]) -> TaskManager:
    """Return the manager of the harness's tasks and of tasks in some folders; UsageError if there is no such folder."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} to look for tasks in: check the path")
    return TaskManager(include_path=list(map(str, folders)))


def find_names(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Return the tasks, groups and tags of the harness with these names, which may have wildcards.

    Raises:
        UsageError: there is no such task.
    """
    chosen: dict[str, None] = {}
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            known = "`lm-eval ls tasks` lists the tasks of the harness"
            raise UsageError(f"unknown task {name!r}{suggest_nearest(name, manager.all_tasks)} ({known})")
        chosen.update(dict.fromkeys(matching))
    if not chosen:
        raise UsageError("there is no task to evaluate: name one or more")
    return list(chosen)


def load_tasks(manager: TaskManager, names: Sequence[str]) -> list[Task | Group]:
    """Load tasks and groups with their datasets; the harness changes them, so evaluate them once.

    Raises:
        EnvironmentFault: a dataset or a package is not at hand.
        UsageError: a task is broken, or cannot run under a plan.
    """
    items: list[Task | Group] = []
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:
            # what goes wrong shows as an exception of datasets, huggingface_hub, yaml, the task or Python itself
            if isinstance(error, MemoryError):
                raise
            raise _explain(name, error) from error
        for task in loaded["tasks"].values():
            _check(task)
        items += [loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values()
    return items


def evaluate_tasks(
    loaded: LoadedModel,
    plan: Plan,
    manager: TaskManager,
    tasks: Sequence[Task | Group],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
    samples: bool = False,
    seed: int = 0,
    batch: int = 8,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run `lm_eval.simple_evaluate` under a plan; return its report as JSON has it, with settings under "kvsearch".

    Args:
        loaded: the model that the plan is for.
        plan: what is evicted.
        manager: where the tasks are from.
        tasks: what to evaluate, see `load_tasks`.
        limit: documents per task; None: all.
        num_fewshot: examples before each question, for tasks that do not fix their number.
        chat_template: put prompts into the tokenizer's chat template.
        samples: report every document, under "samples".
        seed: added to the harness' own seeds, so that 0 draws its usual few-shot examples; see `PlannedLM`, too.
        batch: see `PlannedLM`.
        max_length: see `PlannedLM`.
        progress: see `PlannedLM`.

    Raises:
        IncompatibleError: plan, model and tasks do not fit together.
        UsageError: the harness fails.
    """
    program = Program.from_plan(loaded.model, plan)
    model = PlannedLM(loaded, program, batch=batch, max_length=max_length, progress=progress, seed=seed)
    others = dict.fromkeys(("numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), DEFAULT_OTHER_SEED + seed)
    try:
        results = simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=num_fewshot,
            apply_chat_template=chat_template, log_samples=samples, batch_size=batch, device=str(loaded.device),
            random_seed=DEFAULT_RANDOM_SEED + seed, **others,
        )  # fmt: skip
    except Exception as error:
        # tasks bring their own code, which may raise anything; what breaks while our model answers is ours
        if isinstance(error, KvsearchError | MemoryError) or model.serving:
            raise
        raise UsageError(f"lm-evaluation-harness gave up ({format_error(error)})") from error
    return {**as_plain(results), "kvsearch": _provenance(model, plan)}


def as_plain(results: Any) -> Any:
    """Convert a report of the harness to types that JSON has; numbers that are not finite become null."""
    written = json.dumps(results, default=handle_non_serializable)
    return json.loads(written, parse_constant=lambda _: None)


def _provenance(model: PlannedLM, plan: Plan) -> dict[str, Any]:
    shape = describe(model.loaded.model)
    heads = len(shape.full_layers) * shape.kv_heads
    held = {}
    for task, sums in sorted(model.held.items()):
        tokens = sums["tokens"] / sums["prompts"]
        entries = sums["entries"] / sums["prompts"]
        held[task] = {**sums, "tokens": tokens, "entries": entries, "full_entries": heads * tokens}
    return {
        "version": read_version("kvsearch"),
        "plan_sha256": hash_json(plan),
        "model": model.loaded.fingerprint.model_dump(),
        "protocol": QUESTION_AWARE,
        "max_length": model.max_length,
        "generation": record_generation_settings(model.loaded.model),
        "held": held,
    }


def _check(task: Task) -> None:
    """Refuse a task that cannot run under a plan, before anything is computed."""
    where = f"task {task.task_name}"
    if getattr(task, "MULTIMODAL", False):
        raise IncompatibleError(f"{where} has images or sound in its prompts: leave it out")
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"{where} runs the code that a model writes, which kvsearch does not: leave it out")
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise UsageError(f"{where}: {ROLLING}")
    if task.OUTPUT_TYPE == "generate_until":
        Generation(task.get_config("generation_kwargs") or {}, where)


def _explain(name: str, error: Exception) -> KvsearchError:
    reason = format_error(error)
    if isinstance(error, ImportError):
        return EnvironmentFault(f"task {name!r} needs a package that cannot be imported: install it ({reason})")
    if isinstance(error, OSError):  # those of datasets, huggingface_hub and httpx for what cannot be reached, too
        return EnvironmentFault(
            f"the dataset of task {name!r} cannot be read: check the network, HF_HUB_OFFLINE and its paths ({reason})"
        )
    return UsageError(f"task {name!r} cannot be loaded ({reason})")
