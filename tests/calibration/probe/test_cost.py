"""What a dry run says of a fit, against what the fit does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsearch.calibration.options import ProbeOptions, QueryBankOptions, RankingOptions
from kvsearch.calibration.probe import measure
from kvsearch.calibration.probe.bank import calibrate_query_bank
from kvsearch.calibration.probe.cost import ranking_cost
from kvsearch.calibration.probe.sample import COLUMNS, draw
from kvsearch.errors import UsageError
from kvsearch.policies.probe import ARRAYS
from kvsearch.runtime.observe import DensePass
from tests import tiny

DATA = tiny.calibration_data(120, 100, 110)
FIT = ProbeOptions(answers="given", entries=150, form="linear", features=("value_norm", "spread"))


@pytest.mark.parametrize("options", [FIT, QueryBankOptions(answers="given", bank=5)])
def test_what_is_said_is_what_is_done(options: RankingOptions, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(measure, "draw", drawing)
    cost = ranking_cost(model, DATA, options)
    counting("__init__", 0)
    counting("following", 1)
    if isinstance(options, ProbeOptions):
        profile = measure.calibrate_probe(model, DATA, options)
        weights = sum(profile.arrays[name].nbytes for name in ARRAYS)
        assert cost.held_bytes == held[0]
    else:
        assert isinstance(options, QueryBankOptions)
        weights = calibrate_query_bank(model, DATA, options).arrays["queries"].nbytes
    assert ([cost.passes, cost.continuations], cost.weights_bytes) == (runs, weights)
    assert cost.contexts == (1, 1, 1)


def test_a_rate_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="a rate of 0 TFLOP/s must be above 0"):
        ranking_cost(tiny.loaded(), DATA, FIT, 0)
