"""What a run keeps: recipes and configurations, ledgers, samples, what it has chosen, and its lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvsearch.calibration.steps import StepCache, read_calibration_content
from kvsearch.evaluation.reply_store import ReplyStore, read_replies
from kvsearch.evaluation.samples import write_samples
from kvsearch.jobs.calibrate import CalibrateOptions
from kvsearch.jobs.evaluate import EvaluateOptions, read_losses
from kvsearch.jobs.evolve import EvolveOptions
from kvsearch.jobs.run import RunOptions
from kvsearch.plan import canonical_json
from kvsearch.results.search import read_trace
from kvsearch.results.validation import find_harmful, load_validation
from kvsearch.runs.identity import CONFIG, RunConfig, read_config
from kvsearch.runs.lock import lock_directory
from kvsearch.runs.run import read_contexts, write_contexts
from kvsearch.search.trials import TrialLog
from kvsearch.strategies.from_signals import Strategy
from tests.robustness.forms import Json, Ledger, Safetensors, Yaml
from tests.robustness.kinds.kind import Kind, same, show, taken
from tests.robustness.valid import runs as valid
from tests.robustness.valid import stored
from tests.runs.sealing import lines_of


def _options(job: str) -> tuple[type[Any], dict[str, Any]]:
    """Return the options of a job, and what has to be typed."""
    models = {"calibrate": CalibrateOptions, "evaluate": EvaluateOptions, "evolve": EvolveOptions, "run": RunOptions}
    return models[job], {"model": "bundled", "output": Path("runs/new")}


def _recipe(job: str, path: Path) -> None:
    show(path)
    kind, typed = _options(job)
    options = kind.of(recipe=path, **typed)
    with taken("the configuration"):
        recorded = options.to_recipe()
        config = RunConfig(job=job, command=["kvsearch"], content={}, options=recorded)  # type: ignore[arg-type]
        (path.parent / "again").mkdir(exist_ok=True)
        place = path.parent / "again" / CONFIG
        place.write_bytes(config.to_bytes())
        same(type(options).of(recipe=place, **typed).to_recipe(), recorded, "options, written and read again")


def _config(job: str, path: Path) -> None:
    found = read_config(path.parent)
    read_calibration_content(path.parent)
    show(path)
    if found is None:
        return
    with taken("the configuration that was written"):
        path.write_bytes(found.to_bytes())
        again = read_config(path.parent)
        assert again is not None
        same(again, found, "written and read again")
        same(found.difference(again), None, "its difference to itself")
    if found.job != "calibrate":
        show(path.parent)
    kind, typed = _options(job)
    kind.of(recipe=path, **typed)


def _contexts(path: Path) -> None:
    show(path)
    found = read_contexts(path.parent)
    with taken("what was written"), lock_directory(path.parent):
        write_contexts(path.parent, {use: getattr(found, use) for use in ("fitted", "chosen", "reported")})
        again = read_contexts(path.parent)
    for use in ("fitted", "chosen", "reported"):
        same(sorted(set(getattr(again, use))), sorted(set(getattr(found, use))), use)


def _search_ledger(path: Path) -> None:
    read_trace(path)
    identity = _identity("evolve")
    with TrialLog(path, identity) as ledger:
        lines = lines_of(ledger)
        _ = ledger.evaluations
    with taken("the ledger"), TrialLog(path, identity) as again:
        same(lines_of(again), lines, "opened again")
        again.begin("a new stage")
    show(path.parent)


def _reply_ledger(path: Path) -> None:
    replies = read_replies(path)
    identity = _identity("evaluate")
    with ReplyStore(path, identity) as store:
        lines, samples = lines_of(store), list(store.samples.values())
    with taken("the ledger"):
        with ReplyStore(path, identity) as again:
            same(lines_of(again), lines, "opened again")
            again.add([("new", valid.reply(task="new"))])
        same({**read_replies(path)}.keys(), {*replies, "new"}, "read again")
        write_samples(samples, path.parent / "samples.csv")
    show(path.parent)


def _step_samples(path: Path) -> None:
    def never(items: Sequence[None]) -> Iterator[Any]:
        assert not items, "the step is made again"
        return iter(())

    (arrays,) = StepCache(path.parent.parent, valid.IDENTITY).stage([None], never)
    with taken("the arrays"):
        assert [arrays[name].shape for name in arrays]


def _validation(path: Path) -> None:
    found = load_validation(path)
    show(path)
    find_harmful(path.parent.parent, Strategy(), 64)
    with taken("what was written"):
        path.write_bytes(canonical_json(found.as_json()))
        same(load_validation(path), found, "written and read again")
        assert len(found.merged(found).budgets) <= len(found.budgets)


def of_run(job: str) -> dict[str, bytes]:
    return {"config.json": valid.run_config(job).to_bytes()}


def _identity(job: str) -> str:
    return valid.run_config(job).identity


def kinds() -> Iterator[Kind]:
    for job in ("calibrate", "evaluate", "evolve", "run"):
        yield Kind(f"recipe-{job}", "recipe.yaml", partial(valid.recipes, job), Yaml(), partial(_recipe, job))
        yield Kind(f"config-{job}", "config.json", partial(stored, f"config-{job}.json"), Json(), partial(_config, job))
    yield Kind("contexts", "contexts.json", partial(stored, "contexts.json"), Json(), _contexts)
    ledgers = {"search": ("evolve", valid.search_ledgers, _search_ledger),
               "replies": ("evaluate", valid.reply_ledgers, _reply_ledger)}  # fmt: skip
    for name, (job, bases, check) in ledgers.items():
        form = Ledger(partial(_identity, job))
        yield Kind(f"ledger-{name}", "ledger.jsonl", bases, form, check, partial(of_run, job))
    yield Kind("samples-steps", "samples/000000-0000.safetensors", valid.step_samples, Safetensors(None), _step_samples)
    yield Kind("validation", "validation/validation.json", partial(stored, "validation.json"), Json(), _validation)
    yield Kind("losses", "losses.json", partial(stored, "losses.json"), Json(), read_losses)
