"""Keep the packages that fetch models and datasets from the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# of huggingface_hub, transformers and datasets, which read them when they are imported
VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
IMPORTED = ("huggingface_hub.constants", "datasets.config")


@contextmanager
def stay_offline(wanted: bool) -> Iterator[None]:
    """While this lasts, these packages read what is on the disk only, whether they are imported yet or not."""
    if not wanted:
        yield
        return
    before = {name: os.environ.get(name) for name in VARIABLES}
    modules = {name: sys.modules[name] for name in IMPORTED if name in sys.modules}
    states = {name: module.HF_HUB_OFFLINE for name, module in modules.items()}
    os.environ.update(dict.fromkeys(VARIABLES, "1"))
    for module in modules.values():
        module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        asked = any((value or "").upper() in ("1", "ON", "YES", "TRUE") for value in before.values())
        for name in IMPORTED:
            if name in sys.modules:  # imported meanwhile: it has read our variables
                sys.modules[name].HF_HUB_OFFLINE = states.get(name, asked)  # type: ignore[attr-defined]
