"""Packages that only some metrics need: imported where they are used, named in the error where they are missing."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

from kvsearch.core.errors import EnvironmentFault

METRIC_PACKAGES = {
    "jieba": "jieba",
    "rapidfuzz.fuzz": "rapidfuzz",
    "rouge": "rouge==1.0.1",
    "rouge_score.rouge_scorer": "rouge-score",
}  # by module: what pip installs


@cache
def make_rouge_scorer(name: str, stems: bool) -> Any:
    """Make a scorer of "rouge1" or "rougeLsum" with the package `rouge-score`, on stems or whole words."""
    return import_optional("rouge_score.rouge_scorer").RougeScorer([name], use_stemmer=stems)


@cache
def import_optional(module: str) -> Any:
    """Return a module of `METRIC_PACKAGES`; EnvironmentFault that names the pip command if it cannot be imported."""
    try:
        package = import_module(module)
    except ImportError as error:
        raise EnvironmentFault(
            f"this metric needs {METRIC_PACKAGES[module]}, which cannot be imported ({error}): "
            f"run `pip install {METRIC_PACKAGES[module]}`"
        ) from error
    if module == "jieba":
        package.setLogLevel(logging.WARNING)  # it reports the loading of its dictionary on stderr
    return package
