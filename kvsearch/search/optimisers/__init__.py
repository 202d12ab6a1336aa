"""Optimisers behind one seam: ask for points, tell their values."""

from kvsearch.arrays import Vector
from kvsearch.search.optimisers.base import Optimiser, Problem, create_optimiser, default_population, optimiser_names

__all__ = ["Optimiser", "Problem", "Vector", "create_optimiser", "default_population", "optimiser_names"]
