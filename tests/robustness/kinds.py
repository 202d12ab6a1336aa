"""Every kind of file that kvsearch reads: valid ones to begin with, their format, and what reads them.

`check` does what the commands do that take such a file. It lets the `KvsearchError` through by which one is refused; of
one that is taken it makes sure that it is valid: written and read again it is the same, it can be shown, and what
follows from it at once can be computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvsearch.errors import KvsearchError
from tests.robustness import valid
from tests.robustness.forms import Form, Json, JsonLines, Ledger, Safetensors, Text, Yaml, sealed_cache

Bases = Callable[[], Sequence[bytes]]


@dataclass(frozen=True)
class Kind:
    """A kind of file, in a folder under its `file` name; `beside` are the files that lie there with it."""

    name: str
    file: str
    bases: Bases
    form: Form
    check: Callable[[Path], None]
    beside: Callable[[], dict[str, bytes]] = dict

    def furnish(self, folder: Path) -> None:
        """Write what lies beside the file."""
        for name, data in self.beside().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    def forget(self) -> None:
        """Forget the weights that this process has read: one file does not help another."""
        from kvsearch.plan import weights
        from kvsearch.policies import fitted, kvzap, probe, query_bank

        weights._known.clear()
        for kept in (fitted.profile_of, probe._weights, query_bank._bank, kvzap._layers):
            kept.cache_clear()


@contextmanager
def taken(what: str) -> Iterator[None]:
    """Whatever is refused here was taken before, which is a failure."""
    try:
        yield
    except KvsearchError as error:
        raise AssertionError(f"{what} refuses what was taken: {error}") from error


def same(one: Any, other: Any, what: str) -> None:
    """Raise AssertionError unless two things are equal."""
    if one != other:
        raise AssertionError(f"{what}: {str(one)[:200]} became {str(other)[:200]}")


# --- what every result is put through ---------------------------------------------------------------------------------


def show(path: Path, **options: Any) -> None:
    """Do what `kvsearch show` does, as a table and as JSON; raises as it does."""
    from kvsearch.cli.render import print_parts
    from kvsearch.cli.screen import Screen
    from kvsearch.jobs.show import ShowOptions
    from kvsearch.jobs.show import show as showing

    view = showing(ShowOptions(path=path, **options))
    screen = Screen(file=StringIO(), width=100)
    print_parts(view.parts(), SimpleNamespace(out=screen))  # type: ignore[arg-type]
    json.dumps(view.as_json(), sort_keys=True, allow_nan=False).encode()


# --- plans and profiles -----------------------------------------------------------------------------------------------


def _plan(path: Path) -> None:
    from kvsearch.plan import load_plan, save_plan
    from kvsearch.plan.yaml import plan_to_yaml
    from kvsearch.strategies.from_yaml import plan_from_yaml

    show(path)
    plan = load_plan(path)
    with taken("the plan that was written"):
        save_plan(plan, path.with_name("again.json"), overwrite=True)
        same(load_plan(path.with_name("again.json")), plan, "written and read again")
        same(plan_from_yaml(plan_to_yaml(plan), "again"), plan, "as YAML and back")


def _strategy(path: Path) -> None:
    from kvsearch.plan.yaml import plan_to_yaml
    from kvsearch.strategies.from_yaml import plan_from_yaml

    show(path)
    plan = plan_from_yaml(path.read_text(), str(path))
    with taken("the strategy that was written"):
        same(plan_from_yaml(plan_to_yaml(plan), "again"), plan, "written and read again")


def _profile(path: Path) -> None:
    from kvsearch.plan import load_profile
    from kvsearch.plan.profile import EVICTED_RATIO, read_profile

    show(path)
    profile = load_profile(path)
    with taken("the profile that was written"):
        again = read_profile(profile.to_bytes(), "again")
        same(again.metadata, profile.metadata, "metadata, written and read again")
        same(again.to_bytes(), profile.to_bytes(), "written twice")
        if EVICTED_RATIO in profile.arrays:
            assert ((profile.local_ratios(0.8) >= 0) & (profile.local_ratios(0.005) <= 1)).all()


def _export(path: Path) -> None:
    from kvsearch.jobs.export import export

    _profile(path)
    plan = export(profile=path, ratio=0.8, output=path.with_name("plan.json"), force=True, allow_harmful=True)
    assert plan.total >= 1


def _statistics(path: Path) -> None:
    from kvsearch.jobs.export import export_to

    _profile(path)
    export_to(profile=path, to="kvpress-ea", output=path.with_name("out"), force=True)


def _fitted(name: str, path: Path) -> None:
    from kvsearch.calibration.fitted import fitted_policy
    from kvsearch.policies import create_policy

    found, params = fitted_policy(f"{name}={path.parent}")
    policy = create_policy(found, params)
    with taken("the policy of these weights"):
        assert policy.needs() is not None
        same(create_policy(found, policy.parameters()), policy, "made of its parameters")


def _weights_of_plan(path: Path) -> None:
    _plan(path.with_name("plan.json"))


# --- runs -------------------------------------------------------------------------------------------------------------


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
        _, lines = ledger.spent, list(ledger.lines)
    with taken("the ledger"), SearchLedger(path, identity) as again:
        same(again.lines, lines, "opened again")
        again.begin("a new stage")
    show(path.parent)


def _reply_ledger(path: Path) -> None:
    from kvsearch.evaluation.reply_store import ReplyStore, read_replies
    from kvsearch.evaluation.samples import write_samples

    replies = read_replies(path)
    identity = _identity("evaluate")
    with ReplyStore(path, identity) as store:
        lines, samples = list(store.lines), list(store.samples.values())
    with taken("the ledger"):
        with ReplyStore(path, identity) as again:
            same(again.lines, lines, "opened again")
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

    def never() -> Any:
        raise AssertionError("the step is made again")

    arrays = Steps(path.parent.parent, valid.IDENTITY).stage()(never)
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

    rows = json.loads(valid.stored("losses.json")[0])
    asked = SimpleNamespace(
        encoded=[SimpleNamespace(task=SimpleNamespace(name=name)) for name in sorted({row["task"] for row in rows})],
        methods=[SimpleNamespace(label=name) for name in sorted({row["method"] for row in rows})],
    )
    _read_losses(path, asked)  # type: ignore[arg-type]


# --- data -------------------------------------------------------------------------------------------------------------


@cache
def _tokenizer() -> Any:
    from kvsearch.tasks.synthetic.tokenizer import tokenizer

    return tokenizer()


def _ask(task: Any) -> None:
    """Do with the examples of a task what an evaluation does before a model reads them, and score replies."""
    from kvsearch.tasks.encode import counter, encode

    examples = task.examples(3, 0, counter(_tokenizer()))
    for example in examples:
        for query in example.queries:
            for reply in ("", "seven", query.right_reply or "", "\ud800", "1.5 10"):
                assert 0 <= task.score(reply, query) <= 1
    encoded = encode(_tokenizer(), task, examples, limit=4096)
    assert encoded.prompts


def _task(path: Path) -> None:
    from kvsearch.tasks.jsonl import JsonlTask

    task = JsonlTask.load(path)
    assert all(query.max_new_tokens >= 1 for example in task.rows for query in example.queries)
    _ask(task)


def _calibration(path: Path) -> None:
    from kvsearch.calibration.data import load_calibration_data

    problems = []
    for bare in (True, False):
        try:
            found = load_calibration_data(path, bare)
        except KvsearchError as error:
            problems.append(error)
            continue
        _ = found.hashes, found.asked, found.by_turns(2)
        for context in found.contexts:
            _tokenizer()(context.text)
            for pair in context.questions:
                _tokenizer()(found.prompt.replace("{question}", pair.question) + pair.prefix + pair.answer)
        if found.questions:
            assert found.limited(1).questions == 1
        contexts = [
            {"text": one.text, "questions": [pair.model_dump(exclude_none=True) for pair in one.questions]}
            for one in found.contexts
        ]
        again = path.with_name("again.json")
        again.write_text(json.dumps({"name": found.name, "prompt": found.prompt, "contexts": contexts}))
        with taken("what was written"):
            same(load_calibration_data(again, bare).sha256, found.sha256, "written and read again")
    if problems:
        raise problems[0]


def _plain_text(path: Path) -> None:
    from kvsearch.calibration.data import load_calibration_data
    from kvsearch.tasks.niah import NiahTask
    from kvsearch.tasks.perplexity import PerplexityText
    from kvsearch.tasks.ruler.haystacks import Essay

    def words(text: str) -> list[int]:
        return list(_tokenizer()(text)["input_ids"])

    for context in load_calibration_data(path, bare=True).contexts:
        words(context.text)
    text = PerplexityText.load(path)
    words(text.text)
    if len(words(text.text)) >= 4:
        text.windows(words, 2, 2)
    Essay.load(path).sentences(30)
    _ask(NiahTask(lengths=(300,), depths=(0, 50), haystack=path))


def _text_rows(path: Path) -> None:
    from kvsearch.tasks.perplexity import PerplexityText

    _tokenizer()(PerplexityText.load(path).text)


def _qa(name: str, path: Path) -> None:
    from kvsearch.tasks.ruler import RulerTask

    _ask(RulerTask(name, length=900, qa_file=path))


def _templates(path: Path) -> None:
    from kvsearch.tasks.longbench import LongBenchTask
    from kvsearch.tasks.templates import parse_template

    found = LongBenchTask("narrativeqa", source=path.with_name("rows.jsonl"), prompts=path).template
    with taken("a template"):
        again = parse_template("{context} {input}", "here")
    assert found.asks == again.asks
    assert isinstance(found.context("{x}") + found.question("{y}"), str)


def _dataset(make: Callable[[Path], Any], path: Path) -> None:
    _ask(make(path))


def _longbench(path: Path) -> Any:
    from kvsearch.tasks.longbench import LongBenchTask

    return LongBenchTask("narrativeqa", source=path)


def _infinitebench(path: Path) -> Any:
    from kvsearch.tasks.infinitebench import InfiniteBenchTask

    return InfiniteBenchTask("passkey", source=path)


def _gsm8k(path: Path) -> Any:
    from kvsearch.tasks.gsm8k import Gsm8kTask

    return Gsm8kTask(source=path, shots=1)


def _archive(path: Path) -> None:
    from kvsearch.tasks.rows import read_archive

    read_archive(path, ["data/narrativeqa.jsonl"])


# --- compressed caches ------------------------------------------------------------------------------------------------


def _cache(path: Path) -> None:
    from kvsearch.runtime.cache_file import read_cache, read_header
    from tests.robustness.tiny_cache import load

    read_header(path)
    show(path)
    read_cache(path)
    load(path)


def _of_run(job: str) -> dict[str, bytes]:
    return {"config.json": valid.run_config(job).to_bytes()}


def _identity(job: str) -> str:
    return valid.run_config(job).identity


def _plan_beside(name: str, weights: Bases) -> dict[str, bytes]:
    """A plan whose policy has weights, which lie beside it."""
    from hashlib import sha256

    from kvsearch.plan import Plan
    from kvsearch.plan.canonical import canonical_json
    from tests.plan.builders import plan_dict

    digest = sha256(weights()[0]).hexdigest()
    policy = {"name": name, "params": {"weights": digest}}
    layers = [{"policy": policy, "budget": [20, 20]}] * 2
    made = Plan.model_validate(plan_dict([[20, 20]] * 2, prefill={"layers": layers}))
    return {"plan.json": canonical_json(made)}


def _stored(*names: str) -> Bases:
    return partial(valid.stored, *names)


def _weights_name() -> str:
    from hashlib import sha256

    return f"probe-{sha256(valid.rankings()[1]).hexdigest()[:12]}.safetensors"


def _plans() -> Iterator[Kind]:
    yield Kind("plan", "plan.json", valid.plan_files, Json(), _plan)
    yield Kind("strategy", "strategy.yaml", valid.plan_texts, Yaml(), _strategy)
    profile = "profile.safetensors"
    yield Kind("profile-table", profile, valid.table_profiles, Safetensors(), _export)
    yield Kind("profile-signals", profile, valid.signal_profiles, Safetensors(), _export)
    yield Kind("profile-queries", profile, valid.query_profiles, Safetensors(), _statistics)
    yield Kind("weights-probe", profile, valid.rankings, Safetensors(), partial(_fitted, "probe"))
    yield Kind("weights-query_bank", profile, valid.query_banks, Safetensors(), partial(_fitted, "query_bank"))
    zap, zap_file = partial(_fitted, "kvzap"), "model.safetensors"
    yield Kind("weights-kvzap", zap_file, valid.zap_files, Safetensors(None), zap)
    yield Kind("kvzap-config", "config.json", valid.zap_config, Json(), zap, lambda: {zap_file: valid.zap_files()[0]})
    weights = partial(valid.rankings, 1)
    beside = partial(_plan_beside, "probe", weights)
    yield Kind("weights-of-plan", _weights_name(), weights, Safetensors(), _weights_of_plan, beside)
    yield Kind("cache", "cache.kv", valid.caches, Safetensors(sealed=sealed_cache), _cache)


def _runs() -> Iterator[Kind]:
    for job in ("calibrate", "evaluate", "evolve", "run"):
        yield Kind(f"recipe-{job}", "recipe.yaml", partial(valid.recipes, job), Yaml(), partial(_recipe, job))
        yield Kind(f"config-{job}", "config.json", _stored(f"config-{job}.json"), Json(), partial(_config, job))
    yield Kind("contexts", "contexts.json", _stored("contexts.json"), Json(), _contexts)
    ledgers = {"search": ("evolve", valid.search_ledgers, _search_ledger),
               "replies": ("evaluate", valid.reply_ledgers, _reply_ledger)}  # fmt: skip
    for name, (job, bases, check) in ledgers.items():
        form = Ledger(partial(_identity, job))
        yield Kind(f"ledger-{name}", "ledger.jsonl", bases, form, check, partial(_of_run, job))
    samples, method = "samples/000000-0000.safetensors", {"config.json": b'{"recipe": {"method": "polykv"}}'}
    yield Kind("samples-signals", samples, valid.signal_samples, Safetensors(None), _signal_samples, lambda: method)
    yield Kind("samples-steps", samples, valid.step_samples, Safetensors(None), _step_samples)
    yield Kind("validation", "validation.json", _stored("validation.json"), Json(), _validation)
    yield Kind("losses", "losses.json", _stored("losses.json"), Json(), _losses)
    results = {
        "evaluation": ("evaluation.json", "evaluation-needle.json", "evaluation-losses.json"),
        "perplexity": ("perplexity.json",), "headroom": ("headroom.json",), "selection": ("selection.json",),
        "search": ("search.json", "front.json"), "run": ("run.json",),
        "reproduction": ("reproduction.json", "reproduction-2.json"),
    }  # fmt: skip
    for name, files in results.items():
        yield Kind(f"result-{name}", "report.json", _stored(*files), Json(), show)


def _data() -> Iterator[Kind]:
    story = {"beside.txt": b"a story ."}
    yield Kind("tasks", "tasks.jsonl", valid.tasks, JsonLines(), _task)
    yield Kind("calibration", "calibration.json", valid.calibrations, Json(), _calibration, lambda: story)
    yield Kind("text", "text.txt", valid.texts, Text(), _plain_text)
    yield Kind("text-rows", "text.jsonl", valid.text_rows, JsonLines(), _text_rows)
    yield Kind("qa-squad", "squad.json", valid.squad, Json(), partial(_qa, "qa_1"))
    yield Kind("qa-hotpot", "hotpot.json", valid.hotpot, Json(), partial(_qa, "qa_2"))
    yield Kind("templates", "prompts.json", valid.templates, Json(), _templates)
    rows = {
        "longbench": ("narrativeqa.jsonl", valid.longbench, JsonLines(), _longbench),
        "infinitebench": ("passkey.jsonl", valid.infinitebench, JsonLines(), _infinitebench),
        "gsm8k": ("test.jsonl", valid.gsm8k, JsonLines(), _gsm8k),
        "csv": ("test.csv", valid.tables, Text(), _gsm8k), "parquet": ("test.parquet", valid.parquet, Text(), _gsm8k),
    }  # fmt: skip
    for name, (file, bases, form, make) in rows.items():
        yield Kind(f"rows-{name}", file, bases, form, partial(_dataset, make))
    yield Kind("rows-archive", "data.zip", valid.archives, Text(), _archive)


KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_plans(), *_runs(), *_data())}
