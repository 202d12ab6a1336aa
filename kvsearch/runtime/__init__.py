"""The runtime: executes a plan under `model.generate()`."""

from kvsearch.runtime.attach import PlannedModel, attach
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.program import Program
from kvsearch.runtime.replay.replay import Replay, replay

__all__ = ["PlanCache", "PlannedModel", "Program", "Replay", "attach", "replay"]
