"""DuoAttention (Xiao et al. 2024): retrieval heads keep everything, streaming heads sinks and recent entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.streaming import StreamingLLM


@dataclass(frozen=True)
class DuoAttention(StreamingLLM):
    """A head whose budget is above `sinks` + `window` and covers the prompt is a retrieval head: it keeps everything.

    It grows while decoding. Every other head keeps the first `sinks` entries and the most recent ones; a streaming
    head's budget is `sinks` + `window`, with more it keeps more recent ones. `head_budgets` makes budgets from gates.
    """

    name: ClassVar[str] = "duo_attention"
    source: ClassVar[str] = "DuoAttention, arXiv 2410.10819; deployment settings, 64 sinks and 256 recent"
    summary: ClassVar[str] = "none: a head keeps all, or `sinks` + `window`"
    weakness: ClassVar[str] = "needs budgets that name the retrieval heads; cannot share dynamically"

    sinks: int = 64
    window: int = 256

    def __post_init__(self) -> None:
        self._at_least(1, "window")
        super().__post_init__()

    @property
    def recent_count(self) -> int:
        return self.window

    def keeps_all(self, budget: int, length: int) -> bool:
        """Return whether a head has more than a streaming head's budget, and that covers the prompt."""
        return budget >= length and budget > self.sinks + self.window
