"""Which calibration methods there are, and what this package asks of them about their profiles.

A method is a `kvsearch.methods.base.CalibrationMethod`, of `kvsearch.methods` or of another package by the entry point
group `kvsearch.calibration_methods`. It is imported when it is first needed: profiles lie below all that measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any, Final

from kvsearch.core.plugins import PluginRegistry

BASE: Final = "kvsearch.methods.base:CalibrationMethod"


CALIBRATION_METHODS: PluginRegistry[type[Any]] = PluginRegistry(
    "method",
    "kvsearch.calibration_methods",
    {
        "lukv": "kvsearch.methods.ratio_tables:LukvMethod",
        "lava": "kvsearch.methods.ratio_tables:LavaMethod",
        "cake": "kvsearch.methods.ratio_tables:CakeMethod",
        "adakv": "kvsearch.methods.ratio_tables:AdakvMethod",
        "polykv": "kvsearch.methods.layer_signals:PolykvMethod",
        "probe": "kvsearch.methods.fitted_rankings:ProbeMethod",
        "query_bank": "kvsearch.methods.fitted_rankings:QueryBankMethod",
        "query_statistics": "kvsearch.methods.query_moments:QueryStatisticsMethod",
    },
    BASE,
)


@lru_cache
def create_method(name: str) -> Any:
    """Create the method of this name, a `kvsearch.methods.base.CalibrationMethod`; errors: `PluginRegistry.find`."""
    return CALIBRATION_METHODS.find(name)()


def find_writer(name: str) -> Any:
    """Return the method that wrote a profile; one that is not here is taken for a method without arrays of its own."""
    return create_method(name) if name in CALIBRATION_METHODS.list_names() else resolve_name(BASE)()


def list_methods() -> Iterator[Any]:
    """Yield the built-in methods in their order."""
    yield from map(create_method, CALIBRATION_METHODS.built_in)


def name_methods_with(array: str) -> str:
    """Return the names of the built-in methods whose every profile has an array, for messages."""
    return ", ".join(method.name for method in list_methods() if array in method.arrays and method.arrays[array].needed)
