"""What a layer's entries are worth to an answer when other layers lose theirs, too.

What an answer loses when one layer alone sees nothing but protected entries says little where layers can stand in for
each other: with three of them that retrieve the same, each alone may go. These measures share out what is lost
together. Losses are -log p of the answer's tokens, in nats; `protected` [L, Hkv, T] bool are the entries that stay.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import permutations
from math import factorial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors

from kvsearch.arrays import Floats
from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.prompts import Continuation
from kvsearch.signals.perplexity import token_losses

NODES = 11  # of the quadrature along the path
PERMUTATIONS = 8  # of the layers, for every question


@torch.enable_grad()
def integrated_gradients(passed: ImportancePass, after: Continuation, protected: Tensor, nodes: int = NODES) -> Tensor:
    """Return what each entry adds to the answer's loss on the way from all kept to all removed, [L, Hkv, T] fp32.

    One gate for all entries that are not protected, in all layers, goes from 1 to 0, and the derivatives by each
    entry's gate are summed up along the way (integrated gradients, arXiv 1703.01365, Eq. 1; Gauss-Legendre quadrature
    of `nodes` points, as many passes forward and backward over the tokens). Their sum is the loss of removing all
    together, up to quadrature, unless it jumps on the way, as where experts are chosen. Some may be below zero: the
    answer is better without.
    """
    tokens, keep = after.tokens.to(passed.model.device), dict(enumerate(protected))
    found = torch.zeros(protected.shape)
    # recurrent layers write their states in place; allowing for that is slow
    recurrent = not all(hasattr(layer, "keys") for layer in passed.cache.layers)
    for node, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        gates = torch.full(protected.shape, (1 + float(node)) / 2, requires_grad=True)
        writable = allow_mutation_on_saved_tensors() if recurrent else nullcontext()
        with writable, passed.following(tokens, keep, dict(enumerate(gates))) as output:
            (slope,) = torch.autograd.grad(_loss(output.logits[0], after), gates)
        found -= float(weight) / 2 * slope
    return found.masked_fill(protected, 0.0)


def loss_without(passed: ImportancePass, after: Continuation, keep: Mapping[int, Tensor]) -> float:
    """Return the loss of the answer when the rows of `keep` see only those entries [Hkv, T] of the context."""
    return float(_loss(passed.logits_seeing(after.tokens.to(passed.model.device), keep), after))


def effects_under(passed: ImportancePass, after: Continuation, kept: Tensor, protected: Tensor) -> Floats:
    """Return what the answer loses when one layer's context goes, all others being as a plan has `kept` them, [L]."""
    plan = dict(enumerate(kept))

    def without(row: int) -> float:
        everything = {other: entries for other, entries in plan.items() if other != row}
        return loss_without(passed, after, {**plan, row: protected[row]}) - loss_without(passed, after, everything)

    return np.array([without(row) for row in plan])


def shapley_values(
    passed: ImportancePass, after: Continuation, protected: Tensor, seed: int = 0, count: int = PERMUTATIONS
) -> Floats:
    """Return what each layer adds to the loss, mean over random orders in which they lose their context, [L].

    Shapley values of the game "which layers lose theirs" (Castro, Gomez and Tejada 2009), from `count` orders, every
    second one being the reverse of the one before; from all of them, so exact, where there are no more. Slow: L passes
    over the tokens for each order.
    """
    found = np.zeros(len(protected))
    nothing = loss_without(passed, after, {})
    orders = _orders(len(protected), seed, count)
    for order in orders:
        removed, before = dict[int, Tensor](), nothing
        for row in order:
            removed[row] = protected[row]
            now = loss_without(passed, after, removed)
            found[row] += (now - before) / len(orders)
            before = now
    return found


def _orders(layers: int, seed: int, count: int) -> list[tuple[int, ...]]:
    """Return all orders of some layers if they are no more than `count`, else so many random ones."""
    if factorial(layers) <= count:
        return list(permutations(range(layers)))
    rng = random.Random(seed)
    drawn = [tuple(rng.sample(range(layers), layers)) for _ in range(-(-count // 2))]
    return [order for one in drawn for order in (one, one[::-1])][:count]


def _loss(logits: Tensor, after: Continuation) -> Tensor:
    """Return the loss of the answer under the logits [K, V] of all tokens of a continuation."""
    answer = after.tokens[0, max(after.answer, 1) :]
    return token_losses(logits[after.predicting], answer).sum()
