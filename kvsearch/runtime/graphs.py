"""Capturing a decode step: what it makes the device do is written down once, and done again token after token.

`Graphs` is the seam. `CudaGraphs` is the one for users; the tests have one that writes operations down on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch


class Captured(NamedTuple):
    """A step that can be done again: `replay` changes the tensors that the step changed, `output` among them."""

    replay: Callable[[], None]
    output: Any


class Graphs(Protocol):
    """What captures steps of one device; they may share memory, so an output holds until another step is done."""

    def run(self, step: Callable[[], Any]) -> Any:
        """Do a step that may be captured later, and return its output."""

    def capture(self, step: Callable[[], Any]) -> Captured:
        """Write a step down without doing it; its like was run before.

        Raises:
            RuntimeError: it does what cannot be captured; all tensors are as they were.
        """


class CudaGraphs:
    """CUDA graphs, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool: Any = torch.cuda.graph_pool_handle()

    def run(self, step: Callable[[], Any]) -> Any:
        """Do a step on the stream that steps are captured on: libraries get ready there for what comes."""
        now = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            output = step()
        now.wait_stream(self.stream)
        return output

    def capture(self, step: Callable[[], Any]) -> Captured:
        """See `Graphs`; what other threads do with the device meanwhile does not matter."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            output = step()
        return Captured(graph.replay, output)


class _Made:
    """How `Graphs` are made in place of CUDA's, in tests."""

    by: Callable[[torch.device], Graphs] | None = None


def graphs_for(device: torch.device) -> Graphs | None:
    """Return what captures steps on a device; None: nothing does."""
    if _Made.by is not None:
        return _Made.by(device)
    return CudaGraphs(device) if device.type == "cuda" else None


@contextmanager
def capturing(by: Callable[[torch.device], Graphs] | None) -> Iterator[None]:
    """Let steps be captured in another way for a while."""
    before, _Made.by = _Made.by, by
    try:
        yield
    finally:
        _Made.by = before
