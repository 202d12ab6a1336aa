"""kvsearch policies: which eviction patterns there are, and what there is to know about one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.config.options import JobOptions, Option

if TYPE_CHECKING:
    from rich.table import Table

    from kvsearch.policies.facts import PolicyFacts

OPEN = "depends on its parameters"
WIDE = 120  # columns


class PoliciesOptions(JobOptions):
    """Which policy to show."""

    job: ClassVar[str] = "policies"

    name: Annotated[str | None, Option("Show this one in full.", argument=True)] = None


@command(PoliciesOptions)
def policies(options: PoliciesOptions, console: Console) -> None:
    """List the eviction policies, those of other installed packages included, or show one in full.

    With --json and NAME, an object with these keys:

    name, package, source, title, formula, implementation (module:Class)
    parameters: a list of objects with name, type and default
    phases: those in which it evicts
    stages: how many scores choose what stays of the prompt
    needs: a list of what it reads besides keys and values
    sinks and window: how many entries it always keeps
    decode: rule (in words), online, merges, row (the attention row that it
    reads), every (steps between two scorings if not online), and, at a budget
    of 1000 entries, recent_of_1000 (protected) and leave_of_1000 (at once)

    What depends on parameters without a default is null. With --json and no
    NAME: an object with policies, a list of such objects, and problems, a
    list of objects with name, package and error, of those that cannot be used.

    Example: kvsearch policies snapkv
    """
    from kvsearch.policies.catalog import catalog, describe_policy

    if options.name is not None:
        facts = describe_policy(options.name)
        if console.as_json:
            console.print_json(asdict(facts))
        else:
            _show(facts, console)
        return
    known, faults = catalog()
    if console.as_json:
        console.print_json({"policies": [asdict(one) for one in known], "problems": [asdict(one) for one in faults]})
        return
    wide = console.out.width >= WIDE
    console.out.print(_listing(known, wide))
    if not wide:
        console.say(f"needs and parameters: kvsearch policies NAME, or a terminal of {WIDE} columns")
    for fault in faults:
        console.out.print(f"{fault.name} ({fault.package}): {fault.error}", soft_wrap=True)


def _listing(known: list[PolicyFacts], wide: bool) -> Table:
    from kvsearch.report.screen import listing

    more = ("needs", "parameters") if wide else ()
    table = listing("eviction policies", ["name", "phases", "while decoding", *more, "source", "package"])
    for facts in known:
        parameters = ", ".join(f"{one.name}={_value(one.default)}" for one in facts.parameters)
        cells = (
            facts.name, " ".join(facts.phases) or "-", facts.decode.rule if facts.decode else OPEN,
            *((_needs(facts), parameters or "-") if wide else ()), facts.source, facts.package,
        )  # fmt: skip
        table.add_row(*cells)
    return table


def _show(facts: PolicyFacts, console: Console) -> None:
    from kvsearch.cli.render import print_parts
    from kvsearch.report.screen import facts as lines_of

    for text in (facts.title, facts.formula):
        if text:
            console.out.print(text, soft_wrap=True)
            console.out.print()
    prompt = {None: OPEN, 1: "one score chooses what stays", 2: "two scores in turn choose what stays"}[facts.stages]
    lines: dict[str, Any] = {
        "name": facts.name, "source": facts.source, "package": facts.package, "class": facts.implementation,
        "evicts in": " and ".join(facts.phases) or "no phase: it keeps everything",
    }  # fmt: skip
    lines |= {"of the prompt": prompt} if facts.phases else {}
    lines |= {
        "while decoding": facts.decode.rule if facts.decode else OPEN,
        "needs": _needs(facts),
        "always kept": OPEN if facts.sinks is None else f"{facts.sinks} first entries, {facts.window} most recent ones",
    }
    lines |= {f"parameter {one.name}": f"{one.type}, default {_value(one.default)}" for one in facts.parameters}
    print_parts(lines_of(lines), console)


def _needs(facts: PolicyFacts) -> str:
    return OPEN if facts.needs is None else ", ".join(facts.needs) or "keys and values"


def _value(default: object) -> str:
    return "(none)" if default is None else str(default)
