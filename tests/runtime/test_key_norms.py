"""Which policies do not suit models that normalise their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvsearch.core import errors
from kvsearch.core.errors import KvsearchWarning
from kvsearch.policies import create_policy
from kvsearch.policies.snapkv import SnapKV
from kvsearch.runtime.program import normalises_keys, warn_unfit
from tests.families import FAMILIES, build


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_normalise_their_keys(family: str) -> None:
    assert normalises_keys(build(family)) == (family in ("qwen3", "gemma3"))


def test_knorm_on_such_a_model_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    model, knorm = build("qwen3"), create_policy("knorm")
    with pytest.warns(KvsearchWarning, match="Qwen3ForCausalLM normalises its keys.* policy knorm") as caught:
        warn_unfit(model, [SnapKV(), knorm, create_policy("knorm", {"sinks": 4})])
        warn_unfit(model, [knorm])
    assert len(caught) == 1


def test_third_parties_can_declare_that_they_rank_by_key_norms() -> None:
    @dataclass(frozen=True)
    class Mine(SnapKV):
        name: ClassVar[str] = "mine"
        key_norms: ClassVar[bool] = True

    with pytest.warns(KvsearchWarning, match="policy mine"):
        warn_unfit(build("gemma3"), [Mine()])
