"""Contracts: test classes that a policy, an allocator, an exporter, a task or a calibration method has to pass.

A test class derives from a contract and names what is tested; pytest does the rest. They need pytest and hypothesis
(`pip install "kvsearch[testing]"`), and are for packages of your own as well as for kvsearch itself:

    from kvsearch.testing import PolicyContract

    class TestMyPolicy(PolicyContract):
        policy = MyPolicy(window=4)
"""

# ruff: noqa: E402 - pytest has to know of the contracts before they are imported
import pytest

# failed assertions show the values that they compare
pytest.register_assert_rewrite(
    *(f"{__name__}.{kind}_contract" for kind in ("allocator", "calibration", "exporter", "policy", "task"))
)

from kvsearch.testing.allocator_contract import AllocatorContract
from kvsearch.testing.calibration_contract import CalibrationContract
from kvsearch.testing.exporter_contract import ExporterContract
from kvsearch.testing.policy_contract import PolicyContract
from kvsearch.testing.task_contract import TaskContract

__all__ = ["AllocatorContract", "CalibrationContract", "ExporterContract", "PolicyContract", "TaskContract"]
