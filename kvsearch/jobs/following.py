"""Commands that naturally follow another one, quoted: whoever pastes the line goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvsearch.config.options import JobOptions
from kvsearch.core.printed import command_line
from kvsearch.jobs.groups import Loading, TaskDetails, WithProtocol

ASKED = ("tasks", *TaskDetails.model_fields, "samples", *WithProtocol.model_fields, *Loading.model_fields)


def following(*words: object) -> str:
    """Return the line that offers a command, given without the word kvsearch."""
    return f"next: {command_line(['kvsearch', *map(str, words)])}"


def flags_of(options: JobOptions, names: Iterable[str]) -> Iterator[str]:
    """Yield those of these options that are not the default, as they are typed."""
    offered = options.offered()
    fields = type(options).model_fields
    for name in names:
        value = getattr(options, name, None)
        if name not in offered or value is None or value == fields[name].get_default(call_default_factory=True):
            continue
        yield offered[name][1].called(name)
        if not isinstance(value, bool):
            yield ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def asked_flags(options: JobOptions) -> Iterator[str]:
    """Yield what these options ask, how, and how the model is loaded, as it is typed.

    A file without tasks is one to calibrate on, which no other command reads.
    """
    has_tasks = getattr(options, "tasks", None) is not None
    yield from flags_of(options, [name for name in ASKED if name != "data" or has_tasks])


def evaluation(options: JobOptions, model: str, plan: Path) -> Iterator[str]:
    """Yield the words of a command that evaluates a plan as a job has asked, on the part of its tasks to report on.

    Some tasks ask all of their contexts by default, those of the choice, too. Without tasks the default ones are asked.
    """
    yield from ("evaluate", model, "--plan", str(plan))
    if getattr(options, "tasks", None) is not None:
        yield from ("--split", "report")
    yield from asked_flags(options)
