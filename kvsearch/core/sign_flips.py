"""The chance of leads by flipping signs.

If none of several leads is real, what each context adds is as likely to be of either sign; so signs are flipped at
random, for all alike, and the largest of the leads, each in units of its spread, is noted (sign-flip test of the
maximum; Westfall and Young 1993). That assumes symmetry: a lead that is lost whole in rare contexts looks surer than it
is, so no plan is chosen by it (`kvsearch.selection.race`).
"""

from __future__ import annotations

from itertools import product

import numpy as np

from kvsearch.core.arrays import TIE, Floats

FLIPS = 9999
MAX_EXACT_CONTEXTS = 12  # contexts up to which all signs are tried


def compute_chances(leads: Floats) -> Floats:
    """Return the probability of each lead, or a larger one of any finalist, if no finalist is better: [finalists].

    `leads` [finalists, contexts] are what each context adds to the mean lead.
    """
    scale = np.linalg.norm(leads, axis=1, keepdims=True)
    scaled = np.divide(leads, scale, out=np.zeros_like(leads), where=scale > 0)
    contexts = leads.shape[1]
    if contexts <= MAX_EXACT_CONTEXTS:
        signs = np.array(list(product((1.0, -1.0), repeat=contexts)))  # the first is the leads as they are
    else:
        drawn = np.random.default_rng(0).choice([-1.0, 1.0], (FLIPS, contexts))
        signs = np.concatenate([np.ones((1, contexts)), drawn])
    largest = (signs @ scaled.T).max(axis=1)
    chances: Floats = (largest[:, None] >= scaled.sum(axis=1) - TIE).mean(axis=0)
    return chances
