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
        ({"phases": "both", "space": "joint"}, "space joint is of the prefill phase"),
        ({"hard_most": 3}, "say which are with --hard-below"),
        ({"population": 3}, "greater than or equal to 4"),
        ({"group_size": 0}, "greater than or equal to 1"),
        ({"sigma": 0}, "greater than 0"),
        ({"gamma": 1.5}, "less than or equal to 1"),
        ({"objective": "f1"}, "'nll' or 'metric'"),
        ({"generation": 3}, "Extra inputs are not permitted"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvolveSettings.model_validate(changes)


def test_settings_are_what_is_written_of_them() -> None:
    made = EvolveSettings.model_validate({"parity": True})
    assert EvolveSettings.model_validate(made.model_dump()) == made
