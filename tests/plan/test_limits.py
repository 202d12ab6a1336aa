"""The limits stand in the docs of the formats as they are in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.plan import limits

TEXT = (Path(__file__).parents[2] / "docs" / "plan-format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "numbers",
    [
        (limits.MOST_LAYERS, limits.MOST_HEADS, limits.MOST_WIDTH),
        (limits.MOST_SAMPLES,),
        (limits.MOST_NESTING,),
        (limits.MOST_KEYS, limits.MOST_ITEMS),
        (limits.MOST_OF["kernel"], limits.MOST_OF["future"], limits.MOST_ROWS),
    ],
)
def test_numbers(numbers: tuple[int, ...]) -> None:
    (table,) = [part for part in TEXT.split("\n\n") if part.startswith("| what | at most |")]
    assert any(all(f"{number:,}" in line for number in numbers) for line in table.splitlines())


def test_sizes() -> None:
    sizes = limits.MOST_YAML, limits.MOST_DOCUMENT, limits.MOST_DATA, limits.MOST_ARRAYS
    shown = f"{sizes[0] >> 10} KiB; {sizes[1] >> 20} MiB; {sizes[2] >> 30} GiB; {sizes[3] >> 30} GiB"
    assert shown in TEXT
    assert (limits.MOST_ENTRIES, limits.MOST_NUMBER) == (2**31 - 1, 2**63 - 1)
