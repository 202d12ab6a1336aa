"""The one reader of YAML: plain data with text keys, the line of every place in it, and what is wrong with it.

What is read is the part of YAML that JSON has, too: mappings, lists, numbers, texts, true, false and null. Anchors,
aliases and tags of other types are refused, so that a file is as large as it looks and nothing is made of its names.
Dates are texts. Numbers that are not in base 10 (010, 1:30, 0x1F) are refused, as hardly anybody means them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvsearch.errors import UsageError
from kvsearch.plan.files import decoded, read_bytes
from kvsearch.plan.limits import MOST_NESTING, MOST_YAML
from kvsearch.plan.parsing import DEEP, integer, is_text, list_problems, shown

Place = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML was built with it: ten times as fast
_MOST_PROBLEMS = 200  # that are looked for
_TAG = "tag:yaml.org,2002:"
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_TRUE = ("yes", "true", "on")
# what may go wrong within a parser that meets a text nobody thought of
_FAULTS = (ValueError, RecursionError, LookupError, AttributeError, ArithmeticError, TypeError)


@dataclass
class YamlDocument:
    """What a text says.

    Args:
        name: what to call it, usually its file.
        data: its content; keys are texts.
        lines: the line, from 1, of every place in it.
        problems: mistakes that do not keep it from being read, each with its line: keys that are given twice.
    """

    name: str
    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def tell(self, place: Place, what: str) -> None:
        """Note a problem; of a place that is not in the document, the line is that of what it would be in."""
        known = next((place[:end] for end in range(len(place), -1, -1) if place[:end] in self.lines), ())
        self.note(self.lines.get(known, 1), place, what)

    def note(self, line: int, place: Place, what: str) -> None:
        """Note a problem on a line; UsageError if there are very many, so that no time is spent on more of them."""
        self.problems.append((line, f"{place_name(place)}: {what}"))
        if len(self.problems) >= _MOST_PROBLEMS:
            raise self.refusal()

    def refusal(self) -> UsageError:
        """Return all problems, by their lines."""
        found = sorted(dict.fromkeys(self.problems), key=lambda problem: problem[0])
        return UsageError(list_problems([f"line {line}: {what}" for line, what in found], self.name))


def place_name(place: Place) -> str:
    """Return a place for people, as in prefill.layers.3."""
    return ".".join(map(str, place)) or "the whole"


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file as plain data; errors as `read_bytes` and `parse_yaml`, and UsageError for keys given twice."""
    document = parse_yaml(read_bytes(path, MOST_YAML), str(path))
    if document.problems:
        raise document.refusal()
    return document.data


def parse_yaml(data: bytes | str, name: str) -> YamlDocument:
    """Read YAML; `name` is what to call it, usually its file.

    Raises:
        UsageError: it is no YAML, or more of it than we read; with the line where that is known.
    """
    text = data if isinstance(data, str) else decoded(data, name)
    if len(text) > MOST_YAML:
        raise UsageError(f"{name} is too long for YAML that people edit: {MOST_YAML} letters are the most")
    try:
        return _Reader(yaml.parse(text, Loader=_LOADER), name).document()
    except _Refused as error:
        raise UsageError(f"{name} is not valid YAML at line {error.line}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {min(mark.line, text.rstrip().count(chr(10))) + 1}" if mark else ""
        raise UsageError(f"{name} is not valid YAML{where}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:  # a letter that YAML forbids
        line = text.count("\n", 0, text.find(chr(error.character))) + 1 if isinstance(error.character, int) else 1
        raise UsageError(f"{name} is not valid YAML at line {line}: {error.reason}") from error
    except (yaml.YAMLError, *_FAULTS) as error:
        what = " ".join(str(error).split())[:200]
        raise UsageError(f"{name} is not valid YAML: {what or type(error).__name__}") from error


class _Refused(Exception):
    """Something that is YAML but not read; the message says what to do."""

    def __init__(self, event: Any, what: str) -> None:
        super().__init__(what)
        self.line = event.start_mark.line + 1


class _Reader:
    """Makes a document of the events of a parser, as they come: what is refused is never held."""

    def __init__(self, events: Iterator[Any], name: str) -> None:
        self.events = events
        self.found = YamlDocument(name)

    def document(self) -> YamlDocument:
        next(self.events)  # the stream begins
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return self.found
        self.found.data = self._value(next(self.events), ())
        next(self.events)  # the document ends
        if not isinstance(after := next(self.events), yaml.StreamEndEvent):
            raise _Refused(after, "another document begins here: keep one in a file")
        return self.found

    def _value(self, event: Any, place: Place) -> Any:
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(event, f"the alias *{event.anchor} is not read: write out what it stands for")
        if len(place) >= MOST_NESTING:
            raise _Refused(event, DEEP)
        self.found.lines[place] = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if event.anchor is not None:
            raise _anchor(event)
        is_list = isinstance(event, yaml.SequenceStartEvent)
        if event.tag not in (None, f"{_TAG}{'seq' if is_list else 'map'}"):
            raise _unknown_tag(event)
        return self._list(place) if is_list else self._mapping(place)

    def _list(self, place: Place) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*place, len(items))))
        return items

    def _mapping(self, place: Place) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line, key = event.start_mark.line + 1, None
            if isinstance(event, yaml.ScalarEvent):
                key = _text(event)
            else:
                self._value(event, (*place, "?"))
            value = self._value(next(self.events), (*place, "?" if key is None or key in items else key))
            if key is None:
                self.found.note(line, place, "a key must be a word or number")
            elif key in items:
                self.found.note(line, (*place, key), "is given twice: remove one")
            else:
                items[key] = value
                self.found.lines[(*place, key)] = line
        return items


def _text(event: Any) -> str:
    """Return what stands there, as it is."""
    if event.anchor is not None:
        raise _anchor(event)
    if event.tag is not None and event.tag not in _TAGS:
        raise _unknown_tag(event)
    if not is_text(event.value):
        raise _Refused(event, "half of a surrogate pair is no text: write the letter itself")
    return str(event.value)


def _scalar(event: Any) -> Any:
    """Return the value of a word, number or text."""
    text, (plain, _) = _text(event), event.implicit
    tag = event.tag if event.tag is not None else _RESOLVER.resolve(yaml.ScalarNode, text, (plain, False))
    read = _OF_KIND.get(tag.removeprefix(_TAG), str)
    try:
        return read(text)
    except ValueError as error:
        raise _Refused(event, str(error)) from error


def _anchor(event: Any) -> _Refused:
    return _Refused(event, f"the anchor &{event.anchor} is not read: remove it, and write out its aliases")


def _unknown_tag(event: Any) -> _Refused:
    return _Refused(event, f"the tag {shown(event.tag)} is not read: write plain values, texts in quotes")


def _whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{shown(text)} is no number in base 10: write it as one, a text in quotes")
    return integer(text.replace("_", ""))


def _number(text: str) -> float:
    plain = text.replace("_", "").lower()
    if ":" in plain:
        raise ValueError(f"{shown(text)} is no number in base 10: write it as one, a text in quotes")
    try:
        return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise ValueError(f"{shown(text)} is no number") from None


def _truth(text: str) -> bool:
    if text.lower() not in (*_TRUE, "no", "false", "off"):
        raise ValueError(f"{shown(text)} is neither true nor false")
    return text.lower() in _TRUE


def _nothing(text: str) -> None:
    if text.lower() not in ("", "~", "null"):
        raise ValueError(f"{shown(text)} is not null")


_OF_KIND: dict[str, Callable[[str], Any]] = {"int": _whole, "float": _number, "bool": _truth, "null": _nothing}
_TAGS = frozenset(f"{_TAG}{kind}" for kind in ("str", *_OF_KIND))
_RESOLVER: Any = yaml.resolver.Resolver()  # what a plain word is, as YAML 1.1 has it
