"""All tests here are skipped where the fake accelerator cannot be built, with the reason."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from tests.torture.device.accelerator import backend
from tests.torture.device.build import NoCompiler

# The device has to be there before the first backward pass of a process: see test_on_device.py.
collect_ignore_glob = ["test_*.py"] if "PYTEST_XDIST_WORKER" in os.environ else []


def pytest_collection_finish() -> None:
    """Have the device before the first test of any folder."""
    with suppress(NoCompiler):
        backend()


@pytest.fixture(autouse=True, scope="session")
def accelerator() -> None:
    try:
        backend()
    except NoCompiler as reason:
        pytest.skip(str(reason))
