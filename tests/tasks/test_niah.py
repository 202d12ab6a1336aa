"""Needles in haystacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Task
from kvsearch.tasks.niah import DEPTH_PERCENTS, LENGTHS, NEEDLE_TEXT, GridCell, NiahTask, spread_cells
from tests.examples import at_most


def count(text: str) -> int:
    return len(text.split())


def hay(folder: Path, text: str) -> Path:
    path = folder / "hay.txt"
    path.write_text(text, encoding="utf-8")
    return path


def small(folder: Path, text: str = "A b c. D e! F g?", **options: Any) -> NiahTask:
    settings = {"lengths": (12,), "depths": (0, 50, 100), "needle": "The key is red.", **options}
    return NiahTask(haystack=hay(folder, text), **settings)


def test_a_grid_by_hand(tmp_path: Path) -> None:
    """Needle 4 words, so 8 of 12 are left: 7 of the text, and one that begins it again does not fit (3 words)."""
    contexts = [example.context for example in small(tmp_path).examples(9, 0, count)]
    assert contexts == [
        "The key is red.\n\nA b c. D e! F g?",
        "A b c. The key is red. D e! F g?",
        "A b c. D e! F g? The key is red.",
    ]


def test_the_shipped_grid() -> None:
    task: Task = NiahTask()
    examples = task.examples(999, 0, count)
    assert [example.key for example in examples[:2]] == ["length=1000 depth=0", "length=1000 depth=11"]
    assert [GridCell.parse(example.key) for example in examples] == list(NiahTask().list_cells())
    assert len(examples) == len(LENGTHS) * 10
    assert tuple(round(depth) for depth in np.linspace(0, 100, 10)) == DEPTH_PERCENTS
    assert list(examples) == list(task.examples(999, 1, count))
    for example in examples:
        length, depth = GridCell.parse(example.key)
        assert 0.93 * length <= count(example.context) <= length
        assert example.context.count(NEEDLE_TEXT) == 1
        before, after = example.context.split(NEEDLE_TEXT)
        assert abs(len(before) / (len(before) + len(after)) - depth / 100) < 0.05
        assert not before or before.rstrip()[-1] in '.!?"'
        assert not before.rstrip().endswith(("Mr.", "Mrs."))
    assert (task.name, task.category, task.chat, task.stops) == ("niah", "retrieval", True, ())


@at_most(30)
@given(st.integers(25, 300), st.integers(0, 100), st.integers(1, 7))
def test_contexts_fill_their_length(length: int, depth: int, width: int) -> None:
    """Whatever a token is: here `width` characters, so that the needle changes where tokens end."""
    task = NiahTask(lengths=(length * 10,), depths=(depth,))
    (example,) = task.examples(1, 0, lambda text: -(-len(text) * 4 // (width * 3)))
    tokens = -(-len(example.context) * 4 // (width * 3))
    assert tokens <= length * 10
    assert example.context.count(NEEDLE_TEXT) == 1


def test_lines_and_chinese_sentences(tmp_path: Path) -> None:
    (example,) = small(tmp_path, "红色的门。蓝色的门。绿色的门。", lengths=(27,), depths=(50,)).examples(1, 0, len)
    assert example.context == "红色的门。 The key is red.蓝色的门。"
    (example,) = small(tmp_path, "one\ntwo\nthree", lengths=(7,), depths=(60,)).examples(1, 0, count)
    assert example.context == "one\ntwo The key is red.\nthree"


@at_most(60)
@given(st.integers(1, 7), st.integers(1, 11), st.integers(0, 99), st.data())
def test_parts_of_a_grid_are_even(lengths: int, depths: int, seed: int, data: st.DataObject) -> None:
    grid = [GridCell(length, depth) for length in range(1, lengths + 1) for depth in range(depths)]
    samples = data.draw(st.integers(1, len(grid)))
    some = spread_cells(grid, samples, seed)
    assert len(set(some)) == len(some) == samples
    assert set(spread_cells(grid, samples - 1, seed)) <= set(some) <= set(grid)
    for taken, steps in (([c.length for c in some], range(1, lengths + 1)), ([c.depth for c in some], range(depths))):
        times = [taken.count(step) for step in steps]
        assert max(times) - min(times) <= 1


@pytest.mark.filterwarnings("ignore:niah")
def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'3' is no key of a needle in a haystack, such as 'length=1000 depth=50'"):
        GridCell.parse("3")
    with pytest.raises(UsageError, match=r"hay.txt is empty: name a text file"):
        small(tmp_path, " \n")
    with pytest.raises(UsageError, match=r"hay.txt holds the needle already: give another text"):
        small(tmp_path, needle="D e!")
    with pytest.raises(UsageError, match=r"6 tokens do not hold the needle and a sentence of .*hay.txt: use more"):
        small(tmp_path, lengths=(6,)).examples(1, 0, count)
