"""docs/policies.md has every policy; `python -m tests.docs.test_policies` writes its tables."""

from __future__ import annotations

from pathlib import Path

from kvsearch.core.plugins import OWN_PACKAGE
from kvsearch.policies.registry import BUILT_IN, find_policy_class, load_catalog

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
WEIGHTS = "as its weights say"


def listed() -> str:
    lines = ["| name | needs | while decoding | source |", "|---|---|---|---|"]
    for facts in load_catalog()[0]:
        if facts.package == OWN_PACKAGE:
            needs = WEIGHTS if facts.needs is None else ", ".join(facts.needs) or "keys and values"
            rule = facts.decode or WEIGHTS
            lines.append(f"| `{facts.name}` | {needs} | {rule} | {facts.source} |")
    return "\n".join(lines)


def explained() -> str:
    lines = ["| name | score of an entry | fails |", "|---|---|---|"]
    for facts in load_catalog()[0]:
        if facts.package == OWN_PACKAGE:
            policy = vars(find_policy_class(facts.name))  # its own, not those of a policy that it derives from
            texts = (policy.get(text, "").replace("|", "\\|") for text in ("summary", "weakness"))
            lines.append(f"| `{facts.name}` | {' | '.join(texts)} |")
    return "\n".join(lines)


TABLES = {
    ("<!-- the list is made by tests/docs/test_policies.py -->", "<!-- end of the list -->"): listed,
    ("<!-- the table is made by tests/docs/test_policies.py -->", "<!-- end of the table -->"): explained,
}


def with_tables(text: str) -> str:
    for (mark, end), make in TABLES.items():
        before, _, rest = text.partition(mark)
        text = f"{before}{mark}\n\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return text


def test_the_tables_are_those_of_the_catalog() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run python -m tests.docs.test_policies"


def test_every_policy_says_what_it_scores_and_when_it_fails() -> None:
    own = {name: vars(find_policy_class(name)) for name in BUILT_IN}
    assert [name for name, policy in own.items() if not (policy["summary"] and policy["weakness"])] == []


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
