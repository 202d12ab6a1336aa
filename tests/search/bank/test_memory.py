"""What fits at a time, and smaller pieces where memory runs out."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.search.bank import memory as bank_memory
from kvsearch.search.bank.memory import (
    PassMemory,
    SampleNeed,
    SplittingRunner,
    check_fits,
    split_into_blocks,
)
from tests.families import build

LLAMA, GEMMA = PassMemory(build("llama"), ()), PassMemory(build("gemma3"), (16, 16))
NEEDS = st.lists(
    st.builds(
        LLAMA.estimate,
        st.integers(1, 400),
        st.integers(1, 400),
        st.integers(0, 30),
        st.integers(0, 60),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=20,
)


@given(NEEDS, st.integers(1, 40), st.floats(1, 60), st.integers(1, 300))
def test_blocks_hold_every_sample_once_and_fit(
    needs: list[SampleNeed], candidates: int, room: float, tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bank_memory, "PASS_TOKENS", tokens)
        memory = int(room * check_fits(needs, 10**12))
        found = list(split_into_blocks(needs, candidates, memory))
        again = list(split_into_blocks(needs, candidates + 3, memory))
    assert sorted(itertools.chain(*(together for together, _ in found))) == list(range(len(needs)))
    assert [together for together, _ in again] == [together for together, _ in found]
    for together, at_a_time in found:
        some = [needs[index] for index in together]
        count = len(some)
        taken = count * (max(need.shared for need in some) + at_a_time * max(need.each for need in some))
        assert taken <= memory
        assert 1 <= at_a_time <= candidates
        read = count * at_a_time * max(need.read for need in some)
        assert read <= tokens or count * at_a_time == 1


class Worker:
    """Does what has at most `most` samples x candidates, and notes it."""

    def __init__(self, most: int, loads: int = 99) -> None:
        self.most, self.loads = most, loads
        self.done: list[tuple[int, int]] = []
        self.tried: list[tuple[int, int]] = []

    def load(self, samples: list[int]) -> list[int]:
        if len(samples) > self.loads:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return samples

    def act(self, loaded: list[int], samples: list[int], some: slice) -> None:
        assert loaded == samples
        count = some.stop - some.start
        self.tried.append((len(samples), count))
        if len(samples) * count > self.most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        self.done += [(sample, candidate) for sample in samples for candidate in range(some.start, some.stop)]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 60), st.integers(1, 9))
def test_everything_is_done_whatever_fits(samples: int, candidates: int, most: int, loads: int) -> None:
    worker = Worker(most, loads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)  # takes most of the time
        SplittingRunner().run(list(range(samples)), candidates, candidates, worker.load, worker.act)
    assert set(worker.done) == set(itertools.product(range(samples), range(candidates)))
