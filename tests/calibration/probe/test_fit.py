"""Fits of a ranking against scikit-learn, and on a target that no linear fit can meet."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch import Tensor

from kvsearch.calibration.probe.measure import fit_network, fit_ridges, log_importance, standardise
from kvsearch.policies.probe import Coefficients, Weights


def predicted(fit: Coefficients, z: Tensor) -> Tensor:
    return Weights((), (0,), Coefficients(*(array[None] for array in fit))).log_importance(z[None], 0)[0]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(strength=st.sampled_from([1e-4, 1e-2, 1.0]), seed=st.integers(0, 99))
def test_ridge_is_that_of_scikit_learn(strength: float, seed: int) -> None:
    z, target = drawn(2, 60, 5, seed=seed), drawn(2, 60, seed=seed + 100)
    z = (z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True)
    subsets = [torch.ones(5, dtype=torch.bool), torch.tensor([True, False, True, True, False])]
    for subset, fit in zip(subsets, fit_ridges(z, target, [strength], subsets), strict=True):
        for head in range(2):
            features = (z[head] * subset).double().numpy()
            known = Ridge(alpha=strength * 60).fit(features, target[head].double().numpy())
            np.testing.assert_allclose(fit.linear[head].numpy(), known.coef_, atol=1e-5)
            assert float(fit.bias[head]) == pytest.approx(known.intercept_, abs=1e-5)


@pytest.mark.nightly
def test_a_network_fits_what_no_line_does() -> None:
    z = drawn(2, 2000, 3)
    target = 5 + 3 * torch.stack([z[0, :, 0] * z[0, :, 1], z[1, :, 2].abs()])
    lost = [
        (predicted(fit, z) - target).var(1) / target.var(1)
        for fit in (
            *fit_ridges(z, target, [1e-4], [torch.ones(3, dtype=torch.bool)]),
            fit_network(z, target, 16, 400, 256, 1e-2, 0),
        )
    ]
    assert lost[0].min() > 0.8
    assert lost[1].max() < 0.2


def test_layers_that_are_fitted_at_once_are_those_that_are_fitted_alone() -> None:
    z, target = drawn(4, 80, 4), drawn(4, 80)
    both = fit_network(z, target, 5, 20, 32, 1e-2, 0, layers=2)
    for layer in (slice(0, 2), slice(2, 4)):
        alone = fit_network(z[layer], target[layer], 5, 20, 32, 1e-2, 0)
        for whole, part in zip(both, alone, strict=True):
            torch.testing.assert_close(whole[layer], part)


def test_what_is_fitted() -> None:
    found = log_importance(torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]]))
    assert found[0].tolist() == pytest.approx([math.log(1.001), math.log(0.001), math.log(0.501)], abs=1e-6)
    assert found[1].tolist() == [0, 0, 0]


def test_features_that_are_all_alike() -> None:
    center, scale = standardise(torch.full((1, 5, 2), 3.0))
    assert center.tolist() == [[3, 3]]
    assert scale.tolist() == [[1, 1]]
    _, scale = standardise(torch.tensor([[[1e-8, 7.0], [2e-8, 7.0 + 2e-6]]]))
    assert scale[0, 0] == 5e-9  # small, but not the same
    assert scale[0, 1] == 1  # round-off
