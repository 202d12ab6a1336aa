"""docs/policies.md has every policy; `python -m tests.docs.test_policies` writes its list."""

from __future__ import annotations

import re
from pathlib import Path

from kvsearch.policies.registry import OWN_PACKAGE, load_catalog

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
MARK, END = "<!-- the list is made by tests/docs/test_policies.py -->", "<!-- end of the list -->"
WEIGHTS = "as its weights say"


def listed() -> str:
    lines = ["| name | needs | while decoding | source |", "|---|---|---|---|"]
    for facts in load_catalog()[0]:
        if facts.package == OWN_PACKAGE:
            needs = WEIGHTS if facts.needs is None else ", ".join(facts.needs) or "keys and values"
            rule = facts.decode or WEIGHTS
            lines.append(f"| `{facts.name}` | {needs} | {rule} | {facts.source} |")
    return "\n".join(lines)


def with_list(text: str) -> str:
    before, _, rest = text.partition(MARK)
    return f"{before}{MARK}\n\n{listed()}\n\n{END}{rest.partition(END)[2]}"


def test_the_list_is_that_of_the_catalog() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_list(text), "run python -m tests.docs.test_policies"


def test_every_policy_says_when_it_fails() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", PAGE.read_text(encoding="utf-8").partition(END)[2], re.MULTILINE)
    assert rows == [facts.name for facts in load_catalog()[0] if facts.package == OWN_PACKAGE]


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
