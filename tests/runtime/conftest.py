from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.places import at


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a place, see `tests.runtime.places`."""
    with at(request.param) as found:
        yield found
