"""From a function of checked options to one of the public API, which takes them as keywords."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from kvsearch.config.options import JobOptions, Option
from kvsearch.core.errors import KvsearchError
from kvsearch.jobs.groups import WorkerOptions
from kvsearch.jobs.reporter import NullReporter, Reporter
from kvsearch.models.foreign import blame_checkpoint
from kvsearch.models.loading import LoadedModel, from_loaded, stay_offline
from kvsearch.report.costs import Forecast
from kvsearch.runs.lock import refuse_locked
from kvsearch.runs.run import lock_for_writing

Result = TypeVar("Result")


def job(options: type[Any]) -> Callable[[Callable[[Any, Reporter], Result]], Callable[..., Result]]:
    """Make a function of the public API of one that takes checked options and a `Reporter`; see `run_job`.

    It takes either the options as one object or each as a keyword (what the command line takes by its place may come
    first), a `recipe`, and `reporter`. The model may be a loaded one, with its `tokenizer`. Errors name keywords.
    """

    def decorated(function: Callable[[Any, Reporter], Result]) -> Callable[..., Result]:
        offered = options.list_options()
        places = [name for name, (_, option) in offered.items() if option.argument]

        @wraps(function)
        def public(*arguments: Any, reporter: Reporter | None = None, **keywords: Any) -> Result:
            checked = arguments[0] if arguments else None
            if isinstance(checked, options):
                if len(arguments) > 1 or keywords:
                    raise TypeError(f"{function.__name__}() takes options as one object or as keywords, not both")
                return run_job(function, checked, reporter)
            if len(arguments) > len(places):
                raise TypeError(f"{function.__name__}() takes at most {len(places)} positional arguments")
            try:
                checked = read_keywords(options, {**dict(zip(places, arguments, strict=False)), **keywords})
                return run_job(function, checked, reporter)
            except KvsearchError as error:
                error.args = (translate_flags(str(error), offered),)
                raise

        public.__signature__ = inspect.Signature(list(_parameters(options, places)))  # type: ignore[attr-defined]
        return public

    return decorated


def run_job(
    function: Callable[[Any, Reporter], Result], checked: Any, reporter: Reporter | None = None, dry: bool = False
) -> Result:
    """Call a function of checked options.

    Before anything is read it takes the locks of the directories that the options name; one that is `dry`, as it writes
    nothing, finds out whether another process has them.
    """
    with stay_offline(bool(getattr(checked, "offline", False))), ExitStack() as locks:
        checked.check_model()
        for place in sorted(set(checked.directories)):
            if dry:
                refuse_locked(place)
            else:
                locks.enter_context(lock_for_writing(place))
        if dry and isinstance(checked, WorkerOptions):
            checked = checked.model_copy(update={"workers": None})
        locks.callback(checked.close)
        began = perf_counter()
        model = getattr(checked, "model", None)
        with blame_checkpoint(str(model)) if model else nullcontext():
            result = function(checked, reporter or NullReporter())
        if isinstance(result, Forecast):
            result.start = perf_counter() - began
        return result


def read_keywords(options: type[Any], given: dict[str, Any]) -> Any:
    """Return checked options of keywords; a loaded model is taken as it is.

    Raises:
        TypeError: a loaded model without a tokenizer, or with options of loading one.
        UsageError: see `JobOptions.of`.
    """
    tokenizer = given.pop("tokenizer", None)
    model = given.get("model")
    if isinstance(model, Path):
        given["model"] = str(model)
    if not (isinstance(model, LoadedModel) or hasattr(model, "config")):
        return options.of(**given)
    loading = [name for name in WorkerOptions.model_fields if name != "offline" and given.get(name) is not None]
    if loading:
        raise TypeError(f"{loading[0]}= is for a model that is loaded by its name: leave it out")
    loaded = model if isinstance(model, LoadedModel) else from_loaded(model, tokenizer)
    return options.of(**{**given, "model": loaded.name}).with_loaded_model(loaded)


def translate_flags(message: str, offered: Mapping[str, tuple[Any, Option]]) -> str:
    """Translate flags in an error message to keywords; commands in backticks stay as they are."""
    words = {
        option.format_flag(name): f"{name}={not option.negated}" if field.annotation is bool else f"{name}="
        for name, (field, option) in offered.items()
    }

    def keyword(match: re.Match[str]) -> str:
        word = words.get(match["flag"], match["flag"].removeprefix("--").replace("-", "_") + "=")
        return word.partition("=")[0] + ":" if match["colon"] else word

    known = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    flags = rf"(?<![\w-])(?P<flag>{known}|--[a-z][a-z-]*)(?![\w-])(?P<colon>:)?"
    parts = message.split("`")
    return "`".join(part if number % 2 else re.sub(flags, keyword, part) for number, part in enumerate(parts))


def _parameters(options: type[JobOptions], places: list[str]) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    offered = {name: field for name, (field, _) in options.list_options().items()}
    for name in sorted(offered, key=lambda name: name not in places):
        default = None if offered[name].is_required() else offered[name].get_default(call_default_factory=True)
        if offered[name].is_required() and not options.recipes:
            default = inspect.Parameter.empty
        yield inspect.Parameter(name, kinds[name not in places], default=default)
    if "model" in offered:
        yield inspect.Parameter("tokenizer", kinds[1], default=None)
    yield inspect.Parameter("recipe", kinds[1], default=None)
    yield inspect.Parameter("reporter", kinds[1], default=None)
