"""The contract of every calibration method."""

from __future__ import annotations

import pytest

from kvsearch.calibration.options import (
    AdakvOptions,
    CakeOptions,
    LavaOptions,
    LukvOptions,
    ProbeOptions,
    QueryBankOptions,
    QueryStatisticsOptions,
)
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.plan import Size
from kvsearch.plan.methods import CALIBRATION_METHODS, create_method
from kvsearch.testing import CalibrationContract

WINDOW = {"window": 8}


class Contract(CalibrationContract):
    """On two contexts, as one of two steps is finished before a stop."""

    contexts = 2


class TestLukv(Contract):
    options = LukvOptions(answer_tokens=2, params=WINDOW)


@pytest.mark.nightly
class TestLukvOfSeveral(Contract):
    options = LukvOptions(answers="given", normalization="layer", policy="keydiff", rivals=("knorm",))


class TestAdakv(Contract):
    options = AdakvOptions(params=WINDOW)


@pytest.mark.nightly
class TestLava(Contract):
    options = LavaOptions(params=WINDOW, minimum=0.02)


@pytest.mark.nightly
class TestCake(Contract):
    options = CakeOptions(params=WINDOW, protocol="question-aware")


class TestPolykv(Contract):
    options = PolykvOptions(patterns=("snapkv", "streaming"), budgets=(48, 70), params=WINDOW, answer_tokens=4, batch=2)
    sizes = (Size(ratio=0.5), Size(budget=70), Size(ratio=0.7, length=300))


class TestProbe(Contract):
    contexts = 3  # to fit on, to choose on and to report on
    options = ProbeOptions(entries=100, form="linear", features=("value_norm", "spread"), answer_tokens=2)


@pytest.mark.nightly
class TestQueryBank(Contract):
    contexts = 3
    options = QueryBankOptions(bank=3, answer_tokens=2)


class TestQueryStatistics(Contract):
    options = QueryStatisticsOptions()


def contracts() -> dict[str, type[CalibrationContract]]:
    """Those of methods without one above, by their default options."""
    covered = {kind.options.method for kind in Contract.__subclasses__()}
    others = [create_method(name) for name in CALIBRATION_METHODS.built_in if name not in covered]
    return {f"Test_{one.name}": type(one.name, (Contract,), {"options": one.options()}) for one in others}


globals().update(contracts())
