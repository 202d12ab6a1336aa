"""Where the runtime's tests run: on all devices, and on the CPU with kernels in Triton's interpreter.

Entries lie in dense blocks on the CPU and flat where kernels serve, so what is tested at all places holds of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product

import pytest

from tests.families import DEVICES, FAMILIES, USUAL
from tests.kernels.serving import interpreter

INTERPRETER = "interpreter"
PLACES = [*DEVICES, *([INTERPRETER] if DEVICES == ["cpu"] and find_spec("triton") is not None else [])]
_places = [
    pytest.param(family, place, marks=[] if family in USUAL and place != INTERPRETER else [pytest.mark.nightly])
    for family, place in product(FAMILIES, PLACES)
    if place != INTERPRETER or family in ("llama", "gemma2")
]
SLOW_PLACES = [pytest.param(place, marks=pytest.mark.nightly) if place == INTERPRETER else place for place in PLACES]
places = pytest.mark.parametrize("device", SLOW_PLACES, indirect=True)
families = pytest.mark.parametrize(("family", "device"), _places, indirect=["device"])


@contextmanager
def at(place: str) -> Iterator[str]:
    """Be at a place for a while, on the device that this yields."""
    if place != INTERPRETER:
        yield place
        return
    with interpreter():
        yield "cpu"
