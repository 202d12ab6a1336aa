"""What is told about policies: the built-in ones, those of other packages, and those that are broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, EntryPoints
from typing import ClassVar

import pytest
from torch import Tensor

from kvsearch.core import plugins
from kvsearch.core.errors import EnvironmentFault
from kvsearch.policies import Observation, Policy, create_policy, find_policy_class, registry
from kvsearch.policies.registry import describe_policy, load_catalog

Install = Callable[..., None]


@dataclass(frozen=True)
class Picky(Policy):
    """score[i] = i * weight."""

    name: ClassVar[str] = "picky"
    source: ClassVar[str] = "a test"

    weight: float
    sinks: int = 2

    def score(self, observation: Observation) -> Tensor:
        return observation.index[:, None].float() * self.weight


@dataclass(frozen=True)
class Unfinished(Policy):
    name: ClassVar[str] = "unfinished"
    source: ClassVar[str] = "a test"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Register entry points, given as NAME=MODULE:CLASS, instead of the installed ones."""

    def register(**points: str) -> None:
        found = EntryPoints([EntryPoint(name, value, registry.GROUP) for name, value in points.items()])
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)

    register()
    return register


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_policy_is_described(name: str) -> None:
    facts = describe_policy(name)
    found = find_policy_class(name)
    assert (facts.name, facts.package, facts.source) == (name, "kvsearch", found.source)
    assert facts.title
    assert facts.formula or name == "full"
    assert not facts.formula.startswith(found.__name__)
    assert list(facts.parameters) == [field.name for field in fields(found)]
    if registry.is_fitted(name):  # its weights decide
        assert facts.decode is None
        return
    assert create_policy(name, facts.parameters) == create_policy(name)
    alone = {"full": (), "kvzip": ("prefill",)}
    assert facts.phases == alone.get(name, ("prefill", "decode"))
    assert facts.decode.startswith("own rule") == (create_policy(name).has_decode_rule and name not in alone)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module_here:X", r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_module_here'\)"),
        (f"{__name__}:Install", "is no Policy"),
        (f"{__name__}:Unfinished", "does not define score"),
        (f"{__name__}:Picky", "calls itself 'picky'"),
    ],
)
def test_a_broken_package_is_named_and_hides_nothing(install: Install, value: str, words: str) -> None:
    install(broken=value)
    with pytest.raises(EnvironmentFault, match=f"^policy broken of .*{words}.*: repair or uninstall that package$"):
        find_policy_class("broken")
    known, faults = load_catalog()
    assert [facts.name for facts in known] == sorted(registry.BUILT_IN)
    assert [fault["name"] for fault in faults] == ["broken"]
    assert "\n" not in faults[0]["error"]
