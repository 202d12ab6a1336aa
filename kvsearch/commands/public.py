"""Make functions of the public API: options as keywords are checked, directories locked, models loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from kvsearch.commands.groups import LOADING, ModelOptions, WorkerOptions
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.reporter import NullReporter, Reporter
from kvsearch.config.options import JobOptions
from kvsearch.models.foreign import blame_checkpoint
from kvsearch.models.loading import LoadedModel, from_loaded, stay_offline
from kvsearch.report.costs import Forecast
from kvsearch.runs.lock import refuse_locked
from kvsearch.runs.run import lock_for_writing

Result = TypeVar("Result")


def job(options: type[Any]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Make a function of the public API of one that takes checked options and a `Reporter`; see `run_job`.

    It takes options as one object, with an optional `loaded` model in place of the named one. Or it takes each option
    as a keyword, and a `recipe`; arguments of the command line may be positional, and the model a loaded one, with its
    `tokenizer`. Both forms take a `reporter`. Errors name options as they are typed: `--max-length` is the keyword
    max_length.
    """

    def decorated(function: Callable[..., Result]) -> Callable[..., Result]:
        places = [name for name, (_, option) in options.list_options().items() if option.argument]

        @wraps(function)
        def public(*arguments: Any, reporter: Reporter | None = None, **keywords: Any) -> Result:
            if arguments and isinstance(arguments[0], options):
                loaded = keywords.pop("loaded", None)
                if len(arguments) > 1 or keywords:
                    raise TypeError(f"{function.__name__}() takes options as one object or as keywords, not both")
                return run_job(function, arguments[0], reporter, loaded)
            if len(arguments) > len(places):
                raise TypeError(f"{function.__name__}() takes at most {len(places)} positional arguments")
            given = {**dict(zip(places, arguments, strict=False)), **keywords}
            loaded = take_loaded_model(given)
            return run_job(function, options.of(**given), reporter, loaded)

        # what help() and editors show; without it there is only *arguments, **keywords
        public.__signature__ = inspect.Signature(list(_parameters(options, places)))  # type: ignore[attr-defined]
        return public

    return decorated


def run_job(
    function: Callable[..., Result],
    options: Any,
    reporter: Reporter | None = None,
    loaded: LoadedModel | None = None,
    *,
    dry: bool = False,
) -> Result:
    """Call a job with its options, a reporter and, if the options say how models load, a `ModelLoader`.

    Before anything is read it takes the locks of the directories that the options name. A `dry` run writes nothing: it
    only refuses directories that another process has locked, and starts no workers.
    """
    reporter = reporter or NullReporter()
    arguments: list[Any] = [options, reporter]
    with ExitStack() as stack:
        name = None
        if isinstance(options, ModelOptions):
            stack.enter_context(stay_offline(options.offline))
            name = getattr(options, "model", None)
            shared = (options.workers, options.ray_address) if isinstance(options, WorkerOptions) and not dry else ()
            models = ModelLoader(reporter, options.loading(), loaded, *shared)
            if name:
                models.check(name)
            arguments.append(models)
        for place in sorted(set(options.directories)):
            if dry:
                refuse_locked(place)
            else:
                stack.enter_context(lock_for_writing(place))
        if isinstance(options, ModelOptions):
            stack.callback(models.close)  # after the locks, so workers end before others may write
        began = perf_counter()
        with blame_checkpoint(name) if name else nullcontext():
            result = function(*arguments)
        if isinstance(result, Forecast):  # what it took to prepare, the job itself will take again
            result.start = perf_counter() - began
        return result


def take_loaded_model(given: dict[str, Any]) -> LoadedModel | None:
    """Take a loaded model out of keywords, and leave its name in its place; None if it is given by its name.

    Raises:
        TypeError: a loaded model without a tokenizer, or with options of loading one.
    """
    tokenizer = given.pop("tokenizer", None)
    model = given.get("model")
    if isinstance(model, Path):
        given["model"] = str(model)
    if not (isinstance(model, LoadedModel) or hasattr(model, "config")):
        return None
    for name in (*LOADING, *WorkerOptions.model_fields):
        if name != "offline" and given.get(name) is not None:
            raise TypeError(f"{name}= is for a model that is loaded by its name: leave it out")
    loaded = model if isinstance(model, LoadedModel) else from_loaded(model, tokenizer)
    given["model"] = loaded.name
    return loaded


def _parameters(options: type[JobOptions], places: list[str]) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    offered = {name: field for name, (field, _) in options.list_options().items()}
    for name in sorted(offered, key=lambda name: name not in places):
        default = None if offered[name].is_required() else offered[name].get_default(call_default_factory=True)
        if offered[name].is_required() and not options.recipes:  # a recipe may state what is required
            default = inspect.Parameter.empty
        yield inspect.Parameter(name, kinds[name not in places], default=default)
    if "model" in offered:
        yield inspect.Parameter("tokenizer", kinds[1], default=None)
    yield inspect.Parameter("recipe", kinds[1], default=None)
    yield inspect.Parameter("reporter", kinds[1], default=None)
