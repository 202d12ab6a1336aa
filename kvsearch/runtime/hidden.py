"""Hidden states that enter the attention of a layer, for policies that look at them: held while the layer computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from kvsearch.errors import IncompatibleError
from kvsearch.models.architecture import attention_modules
from kvsearch.policies.base import Needs

_watched: WeakSet[nn.Module] = WeakSet()
_entering: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def watch(model: nn.Module, needs: Iterable[Needs]) -> None:
    """See to it that `entering` knows the hidden states of `model` from now on, if one of the needs wants them."""
    if not any(need.hidden is not None for need in needs):
        return
    for module in attention_modules(model).values():
        if module not in _watched:
            _watched.add(module)
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)


def entering(module: nn.Module, tokens: slice) -> Tensor:
    """Return the hidden states of some of the tokens that `module`, which is computing now, was given, [B, q, d_model].

    Raises:
        IncompatibleError: it was given none, or is not watched.
    """
    if module not in _entering:
        raise IncompatibleError(
            f"{type(module).__name__} does not show the hidden states that a policy wants (kvzap): use another policy"
        )
    return _entering[module][:, tokens]


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(states, Tensor):
        _entering[module] = states


def _leave(module: nn.Module, *_: Any) -> None:
    _entering.pop(module, None)
