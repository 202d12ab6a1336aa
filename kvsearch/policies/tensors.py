"""torch, imported when a policy first computes: a listing needs names, fields and docstrings only.

Policies write `from kvsearch.policies.tensors import F, Tensor, torch` where they would import these from torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["F", "Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:

    class Lazy:
        """A proxy that imports a module on the first access to an attribute."""

        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, attribute: str) -> Any:
            module = import_module(self.__name__)
            self.__dict__ = module.__dict__
            return getattr(module, attribute)

    torch, F, Tensor = Lazy("torch"), Lazy("torch.nn.functional"), Any  # Tensor stands in annotations only
