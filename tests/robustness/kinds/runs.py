"""What a run keeps: recipes and configurations, ledgers, samples, what it has chosen, and its lock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.robustness.forms import Json, Ledger, Safetensors, Yaml
from tests.robustness.kinds.kind import Kind, same, show, taken
from tests.robustness.valid import runs as valid
from tests.robustness.valid import stored


def _options(job: str) -> tuple[type[Any], dict[str, Any]]:
    """Return the options of a job, and what has to be typed."""
    from kvsearch.jobs.calibrate import CalibrateOptions
    from kvsearch.jobs.evaluate import EvaluateOptions
    from kvsearch.jobs.evolve import EvolveOptions
    from kvsearch.jobs.run import RunOptions

    models = {"calibrate": CalibrateOptions, "evaluate": EvaluateOptions, "evolve": EvolveOptions, "run": RunOptions}
    return models[job], {"model": "bundled", "output": Path("runs/new")}


def _recipe(job: str, path: Path) -> None:
    from kvsearch.runs.identity import CONFIG, RunConfig

    show(path)
    kind, typed = _options(job)
    options = kind.of(recipe=path, **typed)
    with taken("the configuration"):
        recorded = options.recorded()
        config = RunConfig(job=job, command=["kvsearch"], content={}, options=recorded)  # type: ignore[arg-type]
        (path.parent / "again").mkdir(exist_ok=True)
        place = path.parent / "again" / CONFIG
        place.write_bytes(config.to_bytes())
        same(type(options).of(recipe=place, **typed).recorded(), recorded, "options, written and read again")


def _config(job: str, path: Path) -> None:
    from kvsearch.calibration.directory import calibrated_model
    from kvsearch.runs.identity import read_config

    found = read_config(path.parent)
    calibrated_model(path.parent)
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
    from kvsearch.runs.contexts import read_contexts, write_contexts
    from kvsearch.runs.lock import locked

    show(path)
    found = read_contexts(path.parent)
    with taken("what was written"), locked(path.parent):
        write_contexts(path.parent, {use: getattr(found, use) for use in ("fitted", "chosen", "reported")})
        again = read_contexts(path.parent)
    for use in ("fitted", "chosen", "reported"):
        same(sorted(set(getattr(again, use))), sorted(set(getattr(found, use))), use)


def all_lines(ledger: Any) -> list[Any]:
    """Every line of a ledger that is open, read again."""
    return [ledger.line(number) for number in range(1, ledger.count + 1)]


def _search_ledger(path: Path) -> None:
    from kvsearch.report.files.search import read_trace
    from kvsearch.search.ledger import SearchLedger

    trace = read_trace(path)
    identity = _identity("evolve")
    with SearchLedger(path, identity) as ledger:
        ledger.results()
        for stage in ("group 1", "group 2", *trace.stages):
            for line in (*ledger.asked(stage), *ledger.told(stage)):
                _ = line.vectors
        if ledger.best is not None:
            _ = ledger.best.table
        _, lines = ledger.spent, all_lines(ledger)
    with taken("the ledger"), SearchLedger(path, identity) as again:
        same(all_lines(again), lines, "opened again")
        again.begin("a new stage")
    show(path.parent)


def _reply_ledger(path: Path) -> None:
    from kvsearch.evaluation.reply_store import ReplyStore, read_replies
    from kvsearch.evaluation.samples import write_samples

    replies = read_replies(path)
    identity = _identity("evaluate")
    with ReplyStore(path, identity) as store:
        lines, samples = all_lines(store), list(store.samples.values())
    with taken("the ledger"):
        with ReplyStore(path, identity) as again:
            same(all_lines(again), lines, "opened again")
            again.add([("new", valid.reply(task="new"))])
        same({**read_replies(path)}.keys(), {*replies, "new"}, "read again")
        write_samples(samples, path.parent / "samples.csv")
    show(path.parent)


def _signal_samples(path: Path) -> None:
    from kvsearch.calibration.directory import kept_words
    from kvsearch.calibration.polykv.measurement import Measurement
    from kvsearch.calibration.polykv.samples import SampleFiles, kept_samples

    folder = path.parent
    kept_samples(folder.parent)
    kept_words(folder.parent)
    found = SampleFiles(folder, Measurement(valid.IDENTITY, valid.SHAPES, valid.SUMMED))
    with taken("the samples"):
        whole = found.gathered()
        assert len(whole["prompt"]) == len(found.finished)


def _step_samples(path: Path) -> None:
    from kvsearch.calibration.steps import Steps

    def never(items: Sequence[None]) -> Iterator[Any]:
        assert not items, "the step is made again"
        return iter(())

    (arrays,) = Steps(path.parent.parent, valid.IDENTITY).stage([None], never)
    with taken("the arrays"):
        assert [arrays[name].shape for name in arrays]


def _validation(path: Path) -> None:
    from kvsearch.choose.verdicts import harmful, load_validation, save_validation
    from kvsearch.strategies.from_signals import Strategy

    found = load_validation(path)
    assert found is not None
    show(path)
    harmful(path.parent, Strategy(), 64)
    with taken("what was written"):
        save_validation(found, path)
        same(load_validation(path), found, "written and read again")
        assert len(found.merged(found).budgets) <= len(found.budgets)


def _losses(path: Path) -> None:
    from kvsearch.jobs.evaluate import _read_losses

    rows = json.loads(stored("losses.json")[0])
    asked = SimpleNamespace(
        encoded=[SimpleNamespace(task=SimpleNamespace(name=name)) for name in sorted({row["task"] for row in rows})],
        methods=[SimpleNamespace(label=name) for name in sorted({row["method"] for row in rows})],
    )
    _read_losses(path, asked)  # type: ignore[arg-type]


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
    samples, method = "samples/000000-0000.safetensors", {"config.json": b'{"recipe": {"method": "polykv"}}'}
    yield Kind("samples-signals", samples, valid.signal_samples, Safetensors(None), _signal_samples, lambda: method)
    yield Kind("samples-steps", samples, valid.step_samples, Safetensors(None), _step_samples)
    yield Kind("validation", "validation.json", partial(stored, "validation.json"), Json(), _validation)
    yield Kind("losses", "losses.json", partial(stored, "losses.json"), Json(), _losses)
