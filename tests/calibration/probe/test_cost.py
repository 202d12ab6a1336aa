"""What a dry run says of a fit, against what the fit does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import COMPARED, ProbeOptions, QueryBankOptions, RankingOptions
from kvsearch.calibration.probe import bank, measure
from kvsearch.calibration.probe.bank import queries_asked
from kvsearch.calibration.probe.cost import cost_of_fit, ranking_cost
from kvsearch.calibration.probe.reading import Asking, some_prompts, split
from kvsearch.calibration.probe.sample import COLUMNS, draw
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.errors import UsageError
from kvsearch.policies.probe import ARRAYS
from kvsearch.runtime.observe import DensePass
from tests import tiny
from tests.calibration.polykv.test_cost import LLAMA, PER_LAYER
from tests.calibration.probe.test_kinds import of_kinds

DATA = tiny.calibration_data(120, 100, 110)
FIT = ProbeOptions(answers="given", entries=150, form="linear", features=("value_norm", "spread"))


# one kind of question is left out of a second fit, and contexts of that kind with it
KINDS = of_kinds(tiny.calibration_data(80, 82, 84, 86, 88, questions=1), "codes", "chains")


@pytest.mark.parametrize("data", [DATA, KINDS], ids=["one fit", "two fits"])
@pytest.mark.parametrize("options", [FIT, QueryBankOptions(answers="given", bank=5)], ids=["probe", "query_bank"])
def test_what_is_said_is_what_is_done(
    options: RankingOptions, data: CalibrationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runs, held = tiny.loaded(), [0, 0], [0]

    def counting(name: str, place: int) -> None:
        plain: Callable[..., object] = getattr(DensePass, name)

        def counted(*given: object, **named: object) -> object:
            runs[place] += 1
            return plain(*given, **named)

        monkeypatch.setattr(DensePass, name, counted)

    def drawing(*given: object) -> object:
        found = draw(*given)  # type: ignore[arg-type]
        held[0] += sum(x.nbytes for name, x in found.items() if name != COLUMNS)
        return found

    def asking(*given: object) -> Tensor:
        found = queries_asked(*given)  # type: ignore[arg-type]
        held[0] += found.nbytes
        return found

    monkeypatch.setattr(measure, "draw", drawing)
    monkeypatch.setattr(bank, "queries_asked", asking)
    cost = ranking_cost(model, data, options)
    counting("__init__", 0)
    counting("following", 1)
    if isinstance(options, ProbeOptions):
        profile = measure.calibrate_probe(model, data, options)
        weights = sum(profile.arrays[name].nbytes for name in ARRAYS)
    else:
        assert isinstance(options, QueryBankOptions)
        profile = bank.calibrate_query_bank(model, data, options)
        weights = profile.arrays["queries"].nbytes + profile.arrays["even"].nbytes
    assert ([cost.passes, cost.continuations], cost.disk_bytes, cost.weights_bytes) == (runs, held[0], weights)
    assert cost.contexts == profile.metadata.provenance.settings["contexts"]
    assert (data is KINDS) == ("left_out" in profile.metadata.provenance.settings)


def texts(*lengths: int) -> list[CalibrationPrompt]:
    """Contexts without questions; their tokens take no memory."""
    nothing = torch.zeros(1, 1, dtype=torch.long)
    return [CalibrationPrompt(nothing.expand(1, length), number, ()) for number, length in enumerate(lengths)]


ITSELF = Asking(("reconstruction",), torch.zeros(1, 12, dtype=torch.long), 256)


def test_llama_at_8k_by_hand() -> None:
    """Contexts of 8,192 tokens are asked for in 32 chunks of 268 tokens, and rankings are judged by 4 of them."""
    cost = cost_of_fit(LLAMA, texts(8192, 8192, 8192), ITSELF, ProbeOptions(), 100)
    whole, judged = 32, 4 * (1 + 2 * 3) + 4 * (1 + 3 * (1 + len(COMPARED)))
    assert (cost.contexts, cost.passes, cost.continuations) == ((1, 1, 1), 5, 4 * whole + judged)
    tokens = 5 * 8192 + (4 * whole + judged) * 268
    assert cost.reading.forward_tokens == tokens
    chunk = 268 * 8192 + 268 * 269 // 2
    # importance has half of an attention more, three times; and seven sets of entries are compared on all chunks
    pairs = 5 * 8192 * 8193 // 2 + (4 * whole + judged) * chunk + (3 * 0.5 + 7) * whole * chunk
    asked = (4 * whole + judged) * 268
    flops = 32 * (2 * PER_LAYER * tokens + 4 * 32 * 128 * pairs) + 2 * 4096 * 128256 * asked
    assert cost.reading.flops == pytest.approx(flops, rel=1e-6)
    columns = 2 * 128 + 5
    assert cost.disk_bytes == 256 * (8192 - 12) * (columns + 1) * 4
    assert cost.weights_bytes == 256 * (3 * columns + 1) * 4  # with one context to fit on there are no networks
    assert cost.host_bytes == 256 * 8192 * columns * 4 + 8 * 8192 * columns * 8


def test_llama_on_many_long_texts() -> None:
    """2,000 contexts of 1k to 16k tokens: less than an hour at 100 TFLOP/s, and 8 GB; not all of them are read."""
    many = texts(*range(1000, 16001, 15000 // 1999))[:2000]
    read = some_prompts(many, ProbeOptions())
    assert len(many) == 2000
    assert [len(part) for part in split(read, 0)] == [400, 32, 32]
    cost = cost_of_fit(LLAMA, read, ITSELF, ProbeOptions(), 100)
    assert cost.reading.seconds < 3600
    assert cost.host_bytes < 8e9
    assert some_prompts(many[:400], ProbeOptions()) == many[:400]


def test_a_rate_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="a rate of 0 TFLOP/s must be above 0"):
        ranking_cost(tiny.loaded(), DATA, FIT, 0)
