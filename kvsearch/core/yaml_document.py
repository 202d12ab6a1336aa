"""The one reader of YAML: plain data with text keys, and the line of every place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvsearch.core.errors import UsageError
from kvsearch.core.files import decode_text, read_text
from kvsearch.core.limits import MOST_YAML
from kvsearch.core.parsing import FAULTS, describe_fault, format_value, list_problems, require_plain

YamlPlace = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_TAGS = frozenset(f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))


class YamlDocument:
    """Plain data in YAML, called `name`, usually its file; `problems` are what a reader finds wrong, with their lines.

    `data` is its content, in which keys are texts, and `lines` has the line, from 1, of every place in it.

    Raises:
        UsageError: it is no YAML, has a key twice, aliases or types of its own, or what `require_plain` refuses.
    """

    def __init__(self, text: bytes | str, name: str) -> None:
        self.name = name
        self.data: Any = None
        self.lines: dict[YamlPlace, int] = {}
        self.problems: list[tuple[int, str]] = []
        try:
            loader = _Loader(text if isinstance(text, str) else decode_text(text, name))
            node = loader.get_single_node()
            if node is not None:
                self._note_lines(node)
                self.data = loader.construct_document(node)
            require_plain(self.data)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f" at line {mark.line + 1}" if mark else ""
            raise UsageError(f"{name} is not valid YAML{where}: {error.problem or error.context}") from error
        except (yaml.YAMLError, *FAULTS) as error:
            raise UsageError(f"{name} is not valid YAML: {describe_fault(error)}") from error

    def tell(self, place: YamlPlace, what: str) -> None:
        """Note a problem; of a place that is not in the document, the line is that of what it would be in."""
        known = next((place[:end] for end in range(len(place), -1, -1) if place[:end] in self.lines), ())
        name = ".".join(map(str, place)) or "the whole"
        self.problems.append((self.lines.get(known, 1), f"{name}: {what}"))

    def _note_lines(self, node: Any, place: YamlPlace = ()) -> None:
        """Note the lines of a node and of all that is in it; yaml.MarkedYAMLError for a key that is given twice."""
        self.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._note_lines(item, (*place, index))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*place, key.value)
                if inner in self.lines:
                    raise _syntax_error(key.start_mark, f"the key {format_value(key.value)} is given twice: remove one")
                self.lines[inner] = key.start_mark.line + 1
                self._note_lines(value, inner)

    def refusal(self) -> UsageError:
        """Return all problems, by their lines."""
        problems = sorted(dict.fromkeys(self.problems), key=lambda problem: problem[0])
        return UsageError(list_problems([f"line {line}: {what}" for line, what in problems], self.name))


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file as plain data; errors as `read_text` and `YamlDocument`."""
    return YamlDocument(read_text(path, max_bytes=MOST_YAML), str(path)).data


class _Loader(yaml.SafeLoader):
    """Reads what JSON has, too: no aliases, so that a file is as large as it looks, no other types, dates as texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; yaml.MarkedYAMLError if it is none of plain data."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _syntax_error(
                event.start_mark, f"the alias *{event.anchor} is not read: write out what it stands for"
            )
        node: Any = super().compose_node(parent, index)
        if isinstance(parent, yaml.MappingNode) and index is None:
            if not isinstance(node, yaml.ScalarNode):
                raise _syntax_error(node.start_mark, "a key must be a word or number")
            node.tag = f"{_TAG}str"
        if node.tag not in _TAGS:
            raise _syntax_error(
                node.start_mark, f"the tag {format_value(node.tag)} is not read: write plain values, texts in quotes"
            )
        return node


def _syntax_error(mark: Any, what: str) -> yaml.MarkedYAMLError:
    """Return what to raise for what stands at a mark."""
    return yaml.MarkedYAMLError(problem=what, problem_mark=mark)
