"""From a function of checked options to one of the public API, which takes them as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar

from kvsearch.config.options import JobOptions
from kvsearch.jobs.reporter import Reporter, Silent
from kvsearch.models.loading import stay_offline
from kvsearch.runs.lock import refuse_locked
from kvsearch.runs.run import writing

Result = TypeVar("Result")


def job(
    options: type[Any], *, dry: bool = False
) -> Callable[[Callable[[Any, Reporter], Result]], Callable[..., Result]]:
    """Make a function of the public API of one that takes checked options and a `Reporter`.

    It takes either the options as one object or each as a keyword (what the command line takes by its place may come
    first), a `recipe`, and `reporter`.

    Before anything is read it takes the locks of the directories that the options name; one that is `dry`, as it writes
    nothing, finds out whether another process has them.
    """

    def decorated(function: Callable[[Any, Reporter], Result]) -> Callable[..., Result]:
        offered = options.offered()
        places = [name for name, (_, option) in offered.items() if option.argument]

        @wraps(function)
        def public(*arguments: Any, reporter: Reporter | None = None, **keywords: Any) -> Result:
            checked = arguments[0] if arguments else None
            if isinstance(checked, options):
                if len(arguments) > 1 or keywords:
                    raise TypeError(f"{function.__name__}() takes options as one object or as keywords, not both")
            else:
                if len(arguments) > len(places):
                    raise TypeError(f"{function.__name__}() takes at most {len(places)} positional arguments")
                checked = options.of(**dict(zip(places, arguments, strict=False)), **keywords)
            with stay_offline(bool(getattr(checked, "offline", False))), ExitStack() as locks:
                for place in sorted(set(checked.directories)):
                    if dry:
                        refuse_locked(place)
                    else:
                        locks.enter_context(writing(place))
                checked = checked.without_work() if dry else checked
                locks.callback(checked.close)
                return function(checked, reporter or Silent())

        public.__signature__ = inspect.Signature(list(_parameters(options, places)))  # type: ignore[attr-defined]
        return public

    return decorated


def _parameters(options: type[JobOptions], places: list[str]) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    offered = {name: field for name, (field, _) in options.offered().items()}
    for name in sorted(offered, key=lambda name: name not in places):
        required = offered[name].is_required() and options.recipes is None
        default = None if offered[name].is_required() else offered[name].get_default(call_default_factory=True)
        yield inspect.Parameter(
            name, kinds[name not in places], default=inspect.Parameter.empty if required else default
        )
    yield inspect.Parameter("recipe", kinds[1], default=None)
    yield inspect.Parameter("reporter", kinds[1], default=None)
