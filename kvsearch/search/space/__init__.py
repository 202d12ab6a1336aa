"""Search spaces: which vectors stand for which tables of budgets."""

from kvsearch.arrays import Vector
from kvsearch.search.space.base import Space
from kvsearch.search.space.basis import Basis, basis_from_tables
from kvsearch.search.space.group import Group, Parity
from kvsearch.search.space.heads import Heads
from kvsearch.search.space.joint import Joint, chosen_of, placed
from kvsearch.search.space.layers import LayerGroups, Layers
from kvsearch.search.space.phases import Phases

__all__ = [
    "Basis",
    "Group",
    "Heads",
    "Joint",
    "LayerGroups",
    "Layers",
    "Parity",
    "Phases",
    "Space",
    "Vector",
    "basis_from_tables",
    "chosen_of",
    "placed",
]
