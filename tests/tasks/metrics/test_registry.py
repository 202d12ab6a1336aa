"""Metrics by name."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.tasks.base import Query
from kvsearch.tasks.metrics import METRICS, NEEDS, find_metric, packages

ANSWERS = {"retrieval": "Paragraph 7", "retrieval_zh": "段落7"}


@pytest.mark.parametrize("name", METRICS)
@given(reply=st.text(max_size=30))
def test_every_metric_takes_any_reply(name: str, reply: str) -> None:
    query = Query("?", (ANSWERS.get(name, "7"), ANSWERS.get(name, "7")), options=("7", "8"))
    assert 0 <= METRICS[name](reply, query) <= 1


@pytest.mark.parametrize("name", METRICS)
def test_a_question_without_answers(name: str) -> None:
    with pytest.raises(UsageError, match="the question 'who' has no answers to score a reply against"):
        METRICS[name]("a reply", Query("who", (), options=("a",)))


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"unknown metric 'qa_f2'; did you mean 'qa_f1'\? \(known: exact, contains, "):
        find_metric("qa_f2")


@pytest.mark.parametrize(("name", "module"), [(name, module) for name, modules in NEEDS.items() for module in modules])
def test_missing_packages(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.optional.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    wanted = packages.PACKAGES[module]
    with pytest.raises(EnvironmentFault) as caught:
        find_metric(name)
    message = str(caught.value)
    assert message.startswith(f"this metric needs {wanted}, which cannot be imported (")
    assert message.endswith(f"): run `pip install {wanted}`")
    assert "\n" not in message


def test_every_optional_module_is_needed_and_there() -> None:
    assert {module for modules in NEEDS.values() for module in modules} == set(packages.PACKAGES)
    for module in packages.PACKAGES:
        assert packages.optional(module) is import_module(module)
