from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core import errors
from kvsearch.core.errors import KvsearchWarning
from kvsearch.kernels import attention, blocks, dispatch
from kvsearch.kernels.attention import Entries, attend
from kvsearch.kernels.dispatch import serves
from tests.examples import at_most
from tests.kernels.reference import Case, relative_error
from tests.kernels.serving import interpreted

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2e-3}  # 2**-8 is a last place of bfloat16
fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
nightly = pytest.mark.nightly


def check(case: Case) -> None:
    """Mean rows are of blocks, whose segments are of one length, and of one token."""
    want_row = case.lengths is None and case.rows == 1
    held = case.flat() if case.lengths is not None else case.block()
    given_to = case.query, held, case.scaling, case.softcap, case.sink, case.rows
    output, row = attend(*given_to, want_row=want_row)
    expected, expected_row = case.expected()
    assert output.dtype == case.dtype
    assert relative_error(output, expected) < BOUNDS[case.dtype]
    assert (row is not None) == want_row
    if row is not None:
        assert row.dtype == fp32
        assert relative_error(row, expected_row) < 1e-5  # rows are fp32, whatever the entries are


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 64, 64, 1),
        Case(2, 4, 128, 128, 63, dtype=bf16, holes=True, weighted=True),
        Case(1, 7, 80, 96, 700, dtype=fp16, ragged=True, softcap=30.0),
        Case(1, 3, 256, 256, 300, holes=True, softcap=5.0),
        Case(1, 20, 40, 33, 513, dtype=fp16, holes=True),
        # several tokens, which see each other causally
        Case(2, 2, 64, 64, 300, rows=5, holes=True),
        pytest.param(Case(1, 8, 128, 80, 600, rows=17, dtype=bf16, ragged=True, sinks=True), marks=nightly),
    ],
    ids=str,
)
def test_heads_of_any_size_and_segments_of_any_length(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("dtype", "scale"), [(fp16, 300.0), (bf16, 3000.0)], ids=str)
def test_large_keys_neither_overflow_nor_lose_their_order(dtype: torch.dtype, scale: float) -> None:
    """Products of fp16 above 65504 are infinite and those of bf16 are off by whole units; accumulated in fp32 not."""
    case = Case(2, 2, 64, 64, 200, dtype=dtype, scale=scale)
    output, row = attend(case.query, Entries(case.keys, case.values, 200), case.scaling, want_row=True)
    expected, expected_row = case.expected()
    assert relative_error(output, expected) < 1e-2
    assert relative_error(row, expected_row) < 1e-2


@at_most(15)
@given(
    st.builds(
        Case, st.integers(1, 3), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), st.integers(4, 80),
        st.integers(1, 4), st.sampled_from([fp16, bf16, fp32]), st.sampled_from([None, 3.0]), st.booleans(),
        st.booleans(), st.booleans(), st.booleans(), seed=st.integers(0, 99),
    ),
)  # fmt: skip
def test_any_segments(case: Case) -> None:
    check(case)


def test_a_flat_store_gives_the_bits_of_a_block() -> None:
    case = Case(4, 3, 32, 48, 300, holes=True, weighted=True)
    output, _ = attend(case.query, case.block(), 0.3)
    found, _ = attend(case.query, case.flat(), 0.3)
    assert torch.equal(found, output)


@pytest.mark.parametrize("lengths", [[3000, 1, 0, 300], [0, 0, 1, 0]])
def test_segments_of_a_flat_store_have_as_many_chunks_as_they_need(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are as many as chunks are, up to one a segment: not as the longest segment has, for each of them."""
    launch = MagicMock(wraps=attention.launch)
    monkeypatch.setattr(attention, "launch", launch)
    monkeypatch.setattr(blocks, "processors", lambda _: 8)
    longest = max(lengths)
    case = Case(4, 2, 32, 32, longest, ragged=True)
    case.lengths = torch.tensor(lengths)
    case.shown = torch.arange(longest) < case.lengths[:, None]
    case.keys, case.values = (states.to(fp32) for states in case.clean)
    flat = case.flat()
    starts = case.lengths.cumsum(0) - case.lengths
    rows = torch.cat([start + torch.arange(count) for start, count in zip(flat.starts, lengths, strict=True)])
    packed = Entries(flat.keys[rows], flat.values[rows], longest, None, case.lengths, starts)
    output, _ = attend(case.query, packed, case.scaling)
    assert relative_error(output, case.expected()[0]) < BOUNDS[fp32]
    count, beside, tiles = launch.call_args_list[0].args[1]
    chunk = attention.Chunked(case.query, packed, 1.0, None, None, False).chunk
    needed = sum(max(1, -(-length // chunk)) for length in lengths)
    assert (beside, tiles) == (1, 1)
    assert needed <= count <= needed + len(lengths)


class TestServed:
    def test_a_compiled_function_may_ask(self) -> None:
        """Without a break, as decode steps are compiled as a whole; nothing is served on the CPU by itself."""

        def doubled(state: torch.Tensor) -> torch.Tensor:
            return state * 2 if serves(state, state) else state

        compiled = torch.compile(doubled, backend="eager", fullgraph=True)
        assert float(compiled(torch.ones(1, 1, 8)).sum()) == 16
        with interpreted(False):
            assert float(compiled(torch.ones(1, 1, 8)).sum()) == 8

    @pytest.mark.parametrize(
        ("states", "why"),
        [
            ((torch.zeros(1, 1, 8, dtype=torch.float64),), "float64"),
            ((torch.zeros(1, 1, 8), torch.zeros(1, 1, 8, dtype=bf16)), "bfloat16 and float32"),
            ((torch.zeros(1, 1, 320),), "heads of 320 numbers"),
            ((torch.zeros(1, 1, 8, requires_grad=True),), "no backward"),
        ],
    )
    def test_what_is_not_is_said_once(
        self,
        states: tuple[torch.Tensor, ...],
        why: str,
        monkeypatch: pytest.MonkeyPatch,
        recwarn: pytest.WarningsRecorder,
    ) -> None:
        monkeypatch.setattr(errors, "_said", set())
        with pytest.warns(KvsearchWarning, match=why):
            assert not serves(*states)
        assert not serves(*states)
        assert not recwarn.list

    @pytest.mark.parametrize(
        ("what", "why"),
        [
            ("triton", r"kvsearch\[gpu\]"),
            ("switch", "KVSEARCH_KERNELS is 0"),
            ("ROCm", "they are not written for ROCm"),
            ("compiler", r"Triton cannot launch one here \(Failed to find C compiler\. Please specify via CC\)"),
        ],
    )
    def test_what_the_machine_lacks(self, what: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(errors, "_said", set())
        monkeypatch.setattr(dispatch, "lacking", dispatch.lacking.__wrapped__.__wrapped__)  # not what it said before
        if what == "triton":
            monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
        elif what == "switch":
            monkeypatch.setenv("KVSEARCH_KERNELS", "0")
        elif what == "ROCm":
            monkeypatch.setattr(torch.version, "hip", "6.4")
        else:
            launch = MagicMock(side_effect=RuntimeError("Failed to find C compiler.\nPlease specify via CC"))
            monkeypatch.setattr(dispatch, "launch", launch)
        with pytest.warns(KvsearchWarning, match=why):
            assert not serves(torch.zeros(1, 1, 8))
