"""A stand-in for CUDA graphs on any device: operations are written down with their tensors, and done again on them.

As with CUDA, capturing changes nothing, what the host would have to wait for cannot be captured, and a replay reads and
writes the very tensors that the step did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kvsearch.runtime.decode import steps

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")
Call = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]


class Writing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes operations down, and remembers what was in memory that they write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # by address: all of a memory, and what was in it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = kwargs or {}
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError(f"{func} reads from the device while it is captured")
        for place, argument in enumerate(func._schema.arguments):
            written = args[place] if place < len(args) else given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(written, Tensor):
                self._remember(written)
        result = func(*args, **given)
        self.calls.append((func, args, given, tensors(result)))
        return result

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Write down what Triton's interpreter launches, too, with the very arguments that it is given now."""
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is None:
            yield
            return
        run = interpreter.InterpretedFunction.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                run(kernel, *args, **kwargs)

        def written_down(kernel: Any, *args: Any, **kwargs: Any) -> None:
            for tensor in tensors((args, kwargs)):
                self._remember(tensor)
            launch(kernel, *args, **kwargs)
            self.calls.append((launch, (kernel, *args), kwargs, []))

        with patch.object(interpreter.InterpretedFunction, "run", written_down):
            yield

    def _remember(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self.before:
            with _disable_current_modes():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
                self.before[memory.data_ptr()] = (whole, whole.clone())

    def restore(self) -> None:
        for whole, content in self.before.values():
            whole.copy_(content)


def tensors(result: Any) -> list[Tensor]:
    return [one for one in tree_leaves(result) if isinstance(one, Tensor)]


class Recorder:
    """Captures steps; `log` says what was done: "run", "captured" or "replayed"."""

    waited = False

    def __init__(self) -> None:
        self.log: list[str] = []

    def drop(self) -> None:
        self.log.append("dropped")

    def run(self, step: Callable[[], Any]) -> Any:
        self.log.append("run")
        return step()

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        writing = Writing()
        try:
            with writing, writing.launches():
                output = step()
        finally:
            writing.restore()
        self.log.append("captured")

        def replay() -> Any:
            self.log.append("replayed")
            for func, args, kwargs, results in writing.calls:
                for new, old in zip(tensors(func(*args, **kwargs)), results, strict=True):
                    if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():  # it is no view
                        old.copy_(new)
            return output

        return replay


def capturing(graphs: Any) -> AbstractContextManager[Any]:
    """Let steps be captured by these for a while; None: by nothing."""
    return patch.object(steps, "find_graphs", lambda _: graphs)
