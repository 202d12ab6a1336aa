"""Rankings and budgets together: which policy each layer evicts by, and what its heads keep, in one greedy pass.

Every policy ranks the same entries of a layer, so what the layer keeps of its importance at any budget is known under
each of them. Inside a layer LU-KV's blocks are taken in their order, which makes that a concave curve for each policy.
The least concave curve above all of them is the layer's envelope. Its corners are corners of the policies' curves: at
each of them the layer has one policy, and all of its heads are at the end of a block. The pieces of all envelopes,
sorted by slope, are one allocation for every total (marginal analysis: Fox 1966, Operations Research 14).

No choice of policies and budgets keeps more than the envelopes promise. At the end of a piece the solution keeps just
that, so it is optimal; inside of one it is the best of those described at `JointSolver.solve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.budgets.lukv import MarginalSolver, check_reach
from kvsearch.core.arrays import Floats, Ints


class JointBudgets(NamedTuple):
    """A policy for each layer and a budget for each head; what they keep, and a bound on what any choice keeps."""

    policies: Ints  # [L], indices of the policies
    budgets: Ints  # [L, Hkv]
    kept: float  # importance
    bound: float


class _Curve(NamedTuple):
    """What a layer keeps under one policy after 0, 1, ... of its blocks, [blocks + 1], and the head of each block."""

    entries: Ints
    kept: Floats
    head: Ints  # [blocks], inside the layer
    size: Ints  # [blocks]


class _Corners(NamedTuple):
    """The corners of a layer's envelope, in order: where they are, under which policy, after how many of its blocks."""

    entries: Ints
    kept: Floats
    policy: Ints
    blocks: Ints


class JointSolver:
    """Allocates any total over the heads of a model and chooses a policy for every layer, by measured importance.

    Args:
        importance: [P, L, Hkv, T] importance >= 0 of the same entries in the order of each of P policies, protected
            entries first.
        floors: least entries per head under each policy, broadcasts to [P, L, Hkv].

    Raises:
        UsageError: importance is negative or not finite; floors are outside [0, T].
    """

    def __init__(self, importance: ArrayLike, floors: ArrayLike = 0) -> None:
        rows = np.asarray(importance, dtype=np.float64)
        low = np.broadcast_to(np.asarray(floors, dtype=np.int64), rows.shape[:3])
        self.singles = [MarginalSolver(table, floor) for table, floor in zip(rows, low, strict=True)]
        self.shape = self.singles[0].shape
        self.length = self.singles[0].length
        curves = [_list_curves(solver) for solver in self.singles]
        self._curves = [[curves[policy][layer] for policy in range(len(rows))] for layer in range(self.shape[0])]
        self._corners = [_find_envelope(layer) for layer in self._curves]
        size = np.concatenate([np.diff(corners.entries) for corners in self._corners])
        slope = np.concatenate([np.diff(corners.kept) for corners in self._corners]) / size
        layer = np.repeat(np.arange(self.shape[0]), [len(corners.entries) - 1 for corners in self._corners])
        # Steepest first; ties by size, then layer, so that the order does not depend on the sort.
        order = np.lexsort((layer, size, -slope))
        self._layer = layer[order]
        self._slope = slope[order]
        self.ends = sum(int(corners.entries[0]) for corners in self._corners) + np.cumsum([0, *size[order]])

    @property
    def least(self) -> int:
        """The smallest total that can be met: each layer under the policy with the smallest floors."""
        return int(self.ends[0])

    @property
    def most(self) -> int:
        """The largest total that can be met: all entries of all heads."""
        return int(self.ends[-1])

    def solve(self, total: int) -> JointBudgets:
        """Allocate one total, exactly.

        Where it splits a piece of a layer's envelope, the layer gets each policy in turn that could still keep more,
        all others theirs, and the budgets are LU-KV's under these. The best of them by true importance is the result,
        or that of a single policy everywhere where this keeps more; so it is never below one.

        Raises:
            UsageError: the total is outside [least, most].
        """
        check_reach(total, self.least, self.most)
        taken = int(np.searchsorted(self.ends, total, side="right")) - 1
        places = np.bincount(self._layer[:taken], minlength=self.shape[0])
        policies = np.array([corners.policy[at] for corners, at in zip(self._corners, places, strict=True)])
        promised = sum(float(corners.kept[at]) for corners, at in zip(self._corners, places, strict=True))
        left = total - int(self.ends[taken])
        # At the end of a piece the solution keeps what the envelopes promise: it is optimal.
        if not left:
            return JointBudgets(policies, self._at_corners(places), promised, promised)
        cut = int(self._layer[taken])
        slope = float(self._slope[taken])
        # Envelopes are concave, so nothing keeps more than the next piece's slope allows.
        bound = promised + slope * left
        best = self._best_alone(total)
        for policy, maximum in self._worth_trying(cut, int(places[cut]), slope, bound):
            # Policies come by what they could keep at most: none of the rest can be better.
            if best is not None and maximum <= best.kept:
                break
            chosen = policies.copy()
            chosen[cut] = policy
            trial = self._under(chosen, total)
            if trial is not None and (best is None or trial.kept > best.kept):
                best = trial
        assert best is not None  # the policies of the corners can meet the total: it is no less than they hold
        return best._replace(bound=bound)

    def simplified(self, solved: JointBudgets, share: float) -> JointBudgets:
        """Return layers to the policy that is best for all, where a policy of their own is hardly worth it.

        Importance is measured on few contexts, and stands for a loss. So a layer keeps another policy only if that
        keeps more by at least `share` of all the importance that the one policy loses. The result keeps no less than
        that policy does with its own budgets.
        """
        total = int(solved.budgets.sum())
        main = self._best_alone(total)
        if main is None:
            return solved
        policy = int(main.policies[0])
        whole = np.full(self.shape, self.length)
        # What the one policy loses is the most that others could win back.
        enough = share * (self.singles[policy].kept(whole) - main.kept)

        def without(layer: int, chosen: JointBudgets) -> JointBudgets | None:
            policies = chosen.policies.copy()
            policies[layer] = policy
            return self._under(policies, total)

        trials = {int(layer): without(int(layer), solved) for layer in np.flatnonzero(solved.policies != policy)}
        cheapest = sorted((solved.kept - trial.kept, layer) for layer, trial in trials.items() if trial is not None)
        # Cheapest first: each layer is tried again with those given back before it.
        current = solved
        for _, layer in cheapest:
            trial = without(layer, current)
            if trial is not None and current.kept - trial.kept < enough:
                current = trial
        return (current if current.kept > main.kept else main)._replace(bound=solved.bound)

    def _best_alone(self, total: int) -> JointBudgets | None:
        """Return the best budgets with one policy in all layers, the first of equals; None if none meets the total."""
        everywhere = [self._under(np.full(self.shape[0], policy), total) for policy in range(len(self.singles))]
        return max(
            (budgets for budgets in everywhere if budgets is not None), key=lambda budgets: budgets.kept, default=None
        )

    def _under(self, policies: Ints, total: int) -> JointBudgets | None:
        """Return LU-KV's budgets with the policies of layers given, [L], without a bound; None below their floors."""
        solver = MarginalSolver.of_layers(self.singles, policies)
        if solver.least > total:
            return None
        table = solver.solve(total)
        return JointBudgets(policies, table, solver.kept(table), np.inf)

    def _worth_trying(self, layer: int, place: int, slope: float, bound: float) -> Iterator[tuple[int, float]]:
        """Yield policies of a layer whose envelope is cut after a corner, with what they could keep, the most first.

        With the policies of all other layers as they are, no budgets keep more than `bound` less the distance between
        the line through the cut piece and the policy's curve.
        """
        corners = self._corners[layer]
        entries = float(corners.entries[place])
        kept = float(corners.kept[place])
        gaps = [
            float((kept + slope * (corner.entries - entries) - corner.kept).min()) for corner in self._curves[layer]
        ]
        first = int(corners.policy[place])  # of equal ones the policy that the layer has
        for policy in sorted(range(len(gaps)), key=lambda policy: (gaps[policy], policy != first)):
            yield policy, bound - max(gaps[policy], 0.0)

    def _at_corners(self, places: Ints) -> Ints:
        table = np.zeros(self.shape, dtype=np.int64)
        for layer, (corners, place) in enumerate(zip(self._corners, places, strict=True)):
            policy = int(corners.policy[place])
            blocks = int(corners.blocks[place])
            curve = self._curves[layer][policy]
            table[layer] = self.singles[policy].floors[layer]
            np.add.at(table[layer], curve.head[:blocks], curve.size[:blocks])
        return table


def _list_curves(solver: MarginalSolver) -> list[_Curve]:
    """Return what each layer keeps as its blocks are taken in their order."""
    layers, heads = solver.shape
    blocks = solver.blocks
    floors = solver.floors
    held = solver.kept_by_head(floors).sum(axis=1)
    order = np.argsort(blocks.head // heads, kind="stable")
    ends = np.searchsorted(blocks.head[order] // heads, np.arange(layers + 1))
    curves = []
    for layer in range(layers):
        of_layer = order[ends[layer] : ends[layer + 1]]
        size = blocks.size[of_layer]
        entries = int(floors[layer].sum()) + np.cumsum([0, *size])
        kept = held[layer] + np.cumsum(np.concatenate([[0.0], size * blocks.slope[of_layer]]))
        curves.append(_Curve(entries, kept, blocks.head[of_layer] % heads, size))
    return curves


def _find_envelope(curves: Sequence[_Curve]) -> _Corners:
    """Find the corners of the least concave curve above all policies' curves."""
    from scipy.optimize import isotonic_regression

    entries = np.concatenate([curve.entries for curve in curves])
    kept = np.concatenate([curve.kept for curve in curves])
    policy = np.repeat(np.arange(len(curves)), [len(curve.entries) for curve in curves])
    blocks = np.concatenate([np.arange(len(curve.entries)) for curve in curves])
    order = np.lexsort((policy, -kept, entries))  # of equal budgets what keeps most, of equal ones the first policy
    # One point for every number of entries: the best one.
    order = order[np.diff(entries[order], prepend=-1) > 0]
    entries, kept, policy, blocks = entries[order], kept[order], policy[order], blocks[order]
    corner = np.ones(len(entries), dtype=bool)
    if len(entries) > 2:
        width = np.diff(entries)
        # Pooling rises of the slopes is what makes a curve concave; corners are where the pooled slope changes.
        pooled = isotonic_regression(np.diff(kept) / width, weights=width.astype(np.float64), increasing=False).x
        corner[1:-1] = np.diff(pooled) != 0
    return _Corners(entries[corner], kept[corner], policy[corner], blocks[corner])
