"""A probe that looks at keys and values, as a surrogate of hidden states: the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.exporters.base import ExportInputs
from kvsearch.exporters.kvzap import KvpressKvzap
from kvsearch.models.architecture import describe
from kvsearch.plan import Profile
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.fitted import parse_policy
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.observe import DensePass
from tests.plan.builders import make_profile
from tests.policies.probes import fitted, ranking
from tests.tiny import loaded

FEATURES = ("key", "value", "spread")


def made(family: str = "llama", width: int = 3, features: tuple[str, ...] = FEATURES) -> tuple[Any, Profile]:
    """A model with biases, and a probe of it with random weights that does not look at places."""
    torch.manual_seed(0)
    model = loaded(family, **({"attention_bias": True} if family == "llama" else {}))
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if name.endswith(("k_proj.bias", "v_proj.bias")):
                parameter.normal_()
    shape, size = model.fingerprint, 2 * describe(model.model).head_dim + len(features) - 2
    profile = ranking(features, width, range(shape.layers), shape.kv_heads, size, shape)
    return model, unseeing(profile)


def unseeing(profile: Profile) -> Profile:
    arrays = {name: np.array(array) for name, array in profile.arrays.items()}
    arrays["linear"][..., -1] = arrays["hidden"][..., -1, :] = 0
    return Profile(profile.metadata, arrays)


def scores(model: Any, policy: Policy) -> torch.Tensor:
    ids = torch.randint(0, model.model.config.vocab_size, (1, 50), generator=torch.Generator().manual_seed(1))
    layers = {layer: [policy.needs()] for layer in range(model.fingerprint.layers)}
    with run_attention(model.model), torch.no_grad():
        return torch.stack(DensePass(model.model, layers, policy.score, ids).noted)


@pytest.mark.parametrize("width", [3, 0])
def test_scores_are_the_same(width: int, tmp_path: Path) -> None:
    model, profile = made(width=width)
    exported = KvpressKvzap().export(profile, ExportInputs(model=model.model))
    for name, data in exported.files.items():
        (tmp_path / name).write_bytes(data)
    name, params = parse_policy(f"kvzap={tmp_path}")
    there = scores(model, create_policy(name, params))
    here = scores(model, fitted(profile))
    torch.testing.assert_close(there.log(), here.log(), atol=2e-4, rtol=2e-4)
    kind = "mlp" if width else "linear"
    assert f"model_type='{kind}'" in exported.usage[1]
    assert not exported.losses


def test_what_is_not_linear_in_hidden_states_is_refused() -> None:
    model, profile = made()
    with pytest.raises(UsageError, match="give --model"):
        KvpressKvzap().export(profile, ExportInputs())
    with pytest.raises(UsageError, match="this is a lukv profile"):
        KvpressKvzap().export(make_profile(), ExportInputs())
    with pytest.raises(UsageError, match=r"looks at snapkv, too: calibrate --method probe --features key,value"):
        KvpressKvzap().export(made(features=("key", "value", "snapkv", "spread"))[1], ExportInputs(model=model.model))
    for family, why in (("qwen3", "has k_norm"), ("phi3", "no linear k_proj")):
        other, fit = made(family)
        with pytest.raises(IncompatibleError, match=why):
            KvpressKvzap().export(fit, ExportInputs(model=other.model))
