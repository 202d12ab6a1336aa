"""When a context is compressed: before its questions are known, or together with each of them."""

from __future__ import annotations

from typing import Literal, get_args

from kvsearch.errors import UsageError
from kvsearch.naming import unknown

Protocol = Literal["question-agnostic", "question-aware"]
QUESTION_AGNOSTIC: Protocol = "question-agnostic"
QUESTION_AWARE: Protocol = "question-aware"
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)


def find_protocol(name: str) -> Protocol:
    """Return the protocol of that name; UsageError if there is none."""
    for protocol in PROTOCOLS:
        if name == protocol:
            return protocol
    raise UsageError(unknown("protocol", name, PROTOCOLS))
