"""Prompts of datasets: instruction, context, question and cue, from a text with `{context}` and `{input}` in it."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan.parsing import read_json


@dataclass(frozen=True)
class Template:
    """A prompt in the parts that are compressed (up to the context's end) and those that come after.

    `separator` is the white space between the two. `asks` says whether the row's question is part of the prompt.
    """

    head: str
    separator: str
    lead: str
    tail: str
    asks: bool

    def context(self, text: str) -> str:
        return self.head + text

    def question(self, text: str) -> str:
        return self.lead + text + self.tail if self.asks else self.lead


def parse_template(text: str, where: str) -> Template:
    """Split a prompt with `{context}` and, after it, at most one `{input}`.

    Raises:
        UsageError: other or misplaced fields, or nothing after the context.
    """
    fields, literals = [], [""]
    try:
        for literal, name, form, conversion in string.Formatter().parse(text):
            literals[-1] += literal  # a literal brace ends a piece, too
            if name is not None:
                fields.append(name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else ""))
                literals.append("")
    except ValueError as error:
        raise UsageError(f"{where}: {error}; write literal braces twice") from error
    if fields not in (["context"], ["context", "input"]):
        found = ", ".join(f"{{{name}}}" for name in fields) or "none"
        raise UsageError(f"{where} needs the fields {{context}} and, after it, at most one {{input}}: found {found}")
    head, between, tail = [*literals, ""][:3]
    lead = between.lstrip()
    if len(fields) == 1 and not lead:
        raise UsageError(f"{where} ends with {{context}}: add what is asked, or the cue that starts the reply")
    return Template(head, between[: len(between) - len(lead)], lead, tail, len(fields) == 2)


def find_template(name: str, shipped: Mapping[str, str], path: Path | None = None) -> Template:
    """Return the prompt of dataset `name`: the `shipped` one, or that of a JSON file of datasets and prompts.

    Raises:
        UsageError: there is no such file, it is no object of texts, or the prompt lacks what the dataset needs.
    """
    own = parse_template(shipped[name], name)
    if path is None:
        return own
    found = read_json(path)
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no object of datasets and their prompts")
    if name not in found:
        raise UsageError(f"{path} has no prompt for {name!r}{suggest(name, list(found))}")
    where = f"{path}: the prompt for {name!r}"
    if not isinstance(found[name], str):
        raise UsageError(f"{where} is not text")
    template = parse_template(found[name], where)
    if own.asks and not template.asks:
        raise UsageError(f"{where} has no {{input}}, the place of the question")
    return template
