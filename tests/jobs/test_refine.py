"""Where a run cannot search on it says why, and goes on with the candidates that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvsearch.core.errors import KvsearchWarning
from kvsearch.evaluation.compare import Settings, Split
from kvsearch.jobs.evolve import EvolveOptions
from kvsearch.jobs.reporter import Silent
from kvsearch.jobs.searching import Refinement
from kvsearch.plan import Size
from kvsearch.policies import create_policy
from kvsearch.selection.candidates import CalibratedPolicies
from tests import tiny


@pytest.mark.parametrize(
    ("family", "policies", "words"),
    [
        (
            "llama",
            ("snapkv",),
            "nothing is searched on: space joint chooses between policies",
        ),
        ("jamba", ("snapkv", "knorm"), "nothing is searched on: .* has layers of kind .*, for which prompts cannot be"),
    ],
)
def test_what_cannot_be_searched_is_said(family: str, policies: tuple[str, ...], words: str, tmp_path: Any) -> None:
    specs = [create_policy(name).spec for name in policies]
    measured = cast("CalibratedPolicies", SimpleNamespace(curves=SimpleNamespace(policies=specs), contexts=None))
    options = EvolveOptions.of(model=family, output=tmp_path / "refine", space="joint")
    refinement = Refinement(
        tiny.loaded(family), options.output, options.config, options.settings, Split([], Settings()), 10
    )
    with pytest.warns(KvsearchWarning, match=words):
        found = refinement.run(measured, {Size(40, length=100): {}}, Silent())
    assert found is None
    assert not (tmp_path / "refine").exists()
