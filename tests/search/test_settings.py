"""Settings that do not go together are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvsearch.search.settings import EvolveSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parity": True, "space": "layers"}, "which searches groups, not layers"),
        ({"optimiser": "golden"}, "needs space groups and group_size 1"),
        ({"optimiser": "golden", "group_size": 1, "space": "heads"}, "needs space groups and group_size 1"),
        ({"optimiser": "cma", "space": "joint"}, "cma searches numbers: space joint needs mixed"),
        ({"phases": "both", "space": "joint"}, "space joint is of the prefill phase"),
        ({"optimiser": "coordinate", "population": 4}, "coordinate has no population: leave it out"),
        ({"population": 3}, "cma needs 4 or more, got 3"),
        ({"group_size": 0}, "greater than or equal to 1"),
        ({"sigma": 0}, "greater than 0"),
        ({"gamma": 1.5}, "less than or equal to 1"),
        ({"objective": "f1"}, "'nll', 'kl' or 'metric'"),
        ({"generation": 3}, "Extra inputs are not permitted"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvolveSettings.model_validate(changes)


@pytest.mark.parametrize(
    "changes", [{"optimiser": "golden", "group_size": 1}, {"optimiser": "random", "population": 2}, {"parity": True}]
)
def test_good_settings(changes: dict[str, Any]) -> None:
    made = EvolveSettings.model_validate(changes)
    assert EvolveSettings.model_validate(made.model_dump()) == made
