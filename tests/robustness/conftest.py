"""Readers forget the weights that they have read between cases; those of other tests stay known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def _weights_of_others() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsearch.plan.saved._known", {})
        yield
