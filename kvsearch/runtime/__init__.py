"""The runtime: executes a plan under `model.generate()`."""

from kvsearch.runtime.attach import PlannedModel, attach
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.program import Program

__all__ = ["PlanCache", "PlannedModel", "Program", "attach"]
