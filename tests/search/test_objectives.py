"""What a search can be judged by."""

from __future__ import annotations

from typing import get_args

import pytest

from kvsearch.errors import UsageError
from kvsearch.search.objectives import OBJECTIVES, find_objective
from kvsearch.search.settings import ObjectiveName


def test_every_objective_is_described() -> None:
    assert tuple(OBJECTIVES) == get_args(ObjectiveName)
    for name, objective in OBJECTIVES.items():
        assert find_objective(name) is objective
        assert objective.description
    assert [name for name, one in OBJECTIVES.items() if one.higher_is_better] == ["metric"]
    assert [name for name, one in OBJECTIVES.items() if one.needs_full] == ["kl"]


def test_an_unknown_objective() -> None:
    with pytest.raises(UsageError, match=r"unknown objective 'nlll'; did you mean 'nll'\? \(known: nll, kl, metric\)"):
        find_objective("nlll")
