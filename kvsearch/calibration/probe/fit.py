"""Fits of a ranking: ridge regression in closed form, and small networks of all heads of a layer at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

ROUNDOFF = 1e-6
UNSEEN = -30.0  # log importance where nothing was looked at: below all others, and still told apart as exp of it
FLOOR = 1e-3  # of a head's largest importance: what lies below is not told apart


class Fit(NamedTuple):
    """A regression per kv head of one layer, as `kvsearch.policies.probe.Weights` has it for all."""

    linear: Tensor  # [Hkv, F]
    hidden: Tensor  # [Hkv, F, K]; K is 0 for a linear fit
    hidden_bias: Tensor  # [Hkv, K]
    output: Tensor  # [Hkv, K]
    bias: Tensor  # [Hkv]


def log_importance(importance: Tensor) -> Tensor:
    """Return log(I + 0.001 max I) of the importance [..., T] of a head, which is what is fitted; 0 where all is 0."""
    largest = importance.amax(-1, keepdim=True)
    return (importance + FLOOR * largest).clamp(min=torch.finfo(torch.float32).tiny).log() * (largest > 0)


def standardised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and spread of features [Hkv, N, F] over the entries, [Hkv, F] each.

    The spread of what is the same everywhere is 1: what no entry could teach must not become large on other texts.
    """
    spread = x.std(1, correction=0)
    return x.mean(1), torch.where(spread > ROUNDOFF * x.abs().amax(1), spread, 1.0)


def fit_ridge(z: Tensor, target: Tensor, strength: float) -> Fit:
    """Fit target = linear . z + bias with the penalty `strength` times N on |linear|^2, in closed form, in fp64.

    Args:
        z: standardised features [Hkv, N, F].
        target: [Hkv, N].
        strength: of the penalty, relative to the variance of the features, which is 1.
    """
    heads, count, size = z.shape
    mean = target.mean(1)
    x, y = z.double(), (target - mean[:, None]).double()
    gram = x.transpose(1, 2) @ x / count + strength * torch.eye(size, dtype=torch.float64, device=z.device)
    linear = torch.linalg.solve(gram, x.transpose(1, 2) @ y[..., None] / count)[..., 0]
    none = z.new_zeros(heads, 0)
    return Fit(linear.float(), z.new_zeros(heads, size, 0), none, none, mean)


def fit_network(z: Tensor, target: Tensor, width: int, steps: int, batch: int, decay: float, seed: int) -> Fit:
    """Fit target = output . gelu(hidden z + hidden_bias) + bias by AdamW on squared errors, all heads at once.

    Args:
        z: standardised features [Hkv, N, F].
        target: [Hkv, N].
        width: hidden units of every head.
        steps: of the optimiser, with a cosine schedule.
        batch: entries drawn for a step, the same columns of every head.
        decay: weight decay.
        seed: of the first weights and the draws.
    """
    heads, count, size = z.shape
    random = torch.Generator().manual_seed(seed)
    mean, spread = target.mean(1, keepdim=True), target.std(1, keepdim=True, correction=0).clamp(min=ROUNDOFF)
    wanted = (target - mean) / spread

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(z.device)

    hidden, output = drawn(heads, size, width) / size**0.5, drawn(heads, width, 1) / width**0.5
    hidden_bias, bias = z.new_zeros(heads, 1, width), z.new_zeros(heads, 1)
    parameters = [part.requires_grad_() for part in (hidden, output, hidden_bias, bias)]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with torch.enable_grad():
        for _ in range(steps):
            some = torch.randint(0, count, (min(batch, count),), generator=random).to(z.device)
            inner = nn.functional.gelu(torch.baddbmm(hidden_bias, z[:, some], hidden))
            loss = ((inner @ output)[..., 0] + bias - wanted[:, some]).square().mean(1).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    # back to the target's own unit
    linear = z.new_zeros(heads, size)
    scaled, offset = output.detach()[..., 0] * spread, bias.detach() * spread + mean
    return Fit(linear, hidden.detach(), hidden_bias.detach()[:, 0], scaled, offset[:, 0])


def spread_fit(z: Tensor, target: Tensor, column: int) -> Fit:
    """Rank by one standardised feature alone, whatever the target; scores spread as the target does, around its mean.

    Args:
        z: standardised features [Hkv, N, F].
        target: [Hkv, N].
        column: of the feature.
    """
    heads, _, size = z.shape
    linear, none = z.new_zeros(heads, size), z.new_zeros(heads, 0)
    linear[:, column] = target.std(1, correction=0).clamp(min=ROUNDOFF)
    return Fit(linear, z.new_zeros(heads, size, 0), none, none, target.mean(1))


def unseen_fit(z: Tensor, column: int) -> Fit:
    """Rank by one standardised feature alone, below all that other heads have."""
    even = spread_fit(z, z[..., column], column)
    return even._replace(bias=torch.full_like(even.bias, UNSEEN))


def restrict_to(fit: Fit, columns: Tensor) -> Fit:
    """Return a fit that reads the features `columns` [F] bool alone: it was fitted with zeros for the others."""
    return fit._replace(linear=fit.linear * columns, hidden=fit.hidden * columns[:, None])


def mixed(fits: Sequence[Fit], chosen: Tensor, width: int) -> Fit:
    """Return, of every head, the fit of the index `chosen` [Hkv]; hidden units are filled up with zeros to `width`."""

    def picked(name: str) -> Tensor:
        parts = [getattr(fit, name) for fit in fits]
        if name in ("hidden", "hidden_bias", "output"):
            parts = [nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts]
        return torch.stack([parts[index][head] for head, index in enumerate(chosen.tolist())])

    return Fit(*map(picked, Fit._fields))
