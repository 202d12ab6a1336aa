"""What a profile with a table holds beside it: the shape and the range of every array that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Size = int | str  # a letter: L layers, H kv heads, Q questions, or a number that is the same wherever it stands


class Measured(NamedTuple):
    """The shape of an array, and between what its values lie; `whole`: they are whole numbers."""

    shape: tuple[Size, ...]
    least: float = -np.inf
    most: float = np.inf
    whole: bool = False


MEASURED: dict[str, Measured] = {
    "question_ratio": Measured(("Q", 9, "L", "H"), 0, 1),  # local ratios at 0.1 ... 0.9
    "question_context": Measured(("Q",), 0, whole=True),
    "question_length": Measured(("Q",), 1, whole=True),
    "ratio_deviation": Measured((99, "L", "H"), 0),
    "recall": Measured(("L", "H", 101)),
    "oracle_recall": Measured(("L", "H", 101)),
    "mass": Measured(("L", "H", 101)),
    "layer_worth": Measured((2, "L")),
    "held_out_ratio": Measured(("F", "R", "L", "H"), 0, 1),
    "choice_recall": Measured(("C", "B")),
    "fit_exponents": Measured(("E", 2)),
    "fit_loss": Measured(("E", "P")),  # of pairs: the profile itself counts contexts
}
_SLACK = 1e-5  # of ratios in fp32


def measured_problems(arrays: Mapping[str, NDArray[Any]], questions: int, shape: tuple[int, int]) -> Iterator[str]:
    """Find arrays of another shape or range than what was measured has, a line each; `shape` is (layers, kv heads)."""
    sizes: dict[Size, int] = {"Q": questions, "L": shape[0], "H": shape[1]}
    for name, what in MEASURED.items():
        found = arrays.get(name)
        if found is None:
            continue
        wanted = [sizes.get(size, size) for size in what.shape]
        free = found.ndim == len(wanted) and found.size > 0
        if not free or any(isinstance(size, int) and size != n for size, n in zip(wanted, found.shape, strict=True)):
            yield f"arrays.{name}: has shape {list(found.shape)}, must be [{', '.join(map(str, wanted))}]"
            continue
        sizes |= dict(zip(what.shape, found.shape, strict=True))
        if what.whole and found.dtype.kind != "i":
            yield f"arrays.{name}: has type {found.dtype}, must be int32"
        if found.min() < what.least - _SLACK or found.max() > what.most + _SLACK:
            yield f"arrays.{name}: has values outside [{what.least:g}, {what.most:g}]"
    if ("fit_loss" in arrays) != ("fit_exponents" in arrays):
        yield "arrays: fit_loss and fit_exponents go together"
