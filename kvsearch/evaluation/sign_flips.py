"""The chance of leads by flipping signs.

If none of several leads is real, what each context adds is as likely to be of either sign; so signs are flipped at
random, for all alike, and the largest of the leads, each in units of its spread, is noted (sign-flip test of the
maximum; Westfall and Young 1993). That assumes symmetry: a lead that is lost whole in rare contexts looks surer than it
is, so no plan is chosen by it (`kvsearch.selection.race`).
"""

from __future__ import annotations

import numpy as np

from kvsearch.core.arrays import Floats

FLIPS = 9999
TIE = 1e-9  # leads that differ by less are equal, but for rounding


def compute_chances(leads: Floats, seed: int = 0) -> Floats:
    """Return the probability of each lead, or a larger one of any finalist, if no finalist is better: [finalists].

    `leads` [finalists, contexts] are what each context adds to the mean lead.
    """
    scale = np.linalg.norm(leads, axis=1, keepdims=True)
    scaled = np.divide(leads, scale, out=np.zeros_like(leads), where=scale > 0)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (FLIPS, leads.shape[1]))
    largest = (signs @ scaled.T).max(axis=1)
    found: Floats = (1 + (largest[:, None] >= scaled.sum(axis=1) - TIE).sum(axis=0)) / (FLIPS + 1)
    return found
