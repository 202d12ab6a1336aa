"""Optimisers behind one seam: ask for points, tell their values."""

from kvsearch.search.optimisers.base import Optimiser, Problem, default_population
from kvsearch.search.optimisers.cma import CMA
from kvsearch.search.optimisers.direct import Coordinate, Golden, Random
from kvsearch.search.optimisers.mixed import Mixed

OPTIMISERS: dict[str, type[Optimiser]] = {
    "cma": CMA,
    "coordinate": Coordinate,
    "golden": Golden,
    "mixed": Mixed,
    "random": Random,
}

__all__ = ["OPTIMISERS", "Optimiser", "Problem", "default_population"]
