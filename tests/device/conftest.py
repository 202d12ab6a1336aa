"""All tests here are skipped where the fake accelerator cannot be built, with the reason."""

from __future__ import annotations

import pytest

from tests.device.accelerator import backend
from tests.device.build import NoCompiler


@pytest.fixture(autouse=True, scope="session")
def accelerator() -> None:
    try:
        backend()
    except NoCompiler as reason:
        pytest.skip(str(reason))
