"""Probe: a ranking fitted to the model's own later attention, one small regression per kv head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

from kvsearch.kernels import constant
from kvsearch.policies import keydiff
from kvsearch.policies.base import Needs, Observation, Policy
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.fitted import (
    CalibratedRanking,
    find_row,
    load_fitted_profile,
    require_arrays,
    select_heads,
    spread_places,
    unrotate_keys,
    useless_weights_error,
)
from kvsearch.policies.ranking import score_entries
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.tensors import F, Tensor, torch

PROBE_METHOD = "probe"  # of the profile that has the weights
SINKS = 4
WINDOW = 8
SPREAD = "spread"  # an even sample of the entries
OF_ATTENTION = ("expected_attention", "snapkv")  # need queries that come after an entry
# no regression reads the spread: heads that attend everywhere are ranked by it alone
FEATURES = ("key", "value", "value_norm", "expected_attention", "snapkv", "keydiff", SPREAD)
MIN_IMPORTANCE = 1e-8
MAX_LOG_SCORE = 60.0  # scores stay finite in fp32
ANCHOR = "anchor"  # running state: the mean direction of the prompt's keys


class Coefficients(NamedTuple):
    """What the heads have, [L, Hkv, ...], of F features and K hidden units; compiled code takes it for a constant."""

    center: Tensor  # [..., F]
    scale: Tensor  # [..., F]
    linear: Tensor  # [..., F]
    hidden: Tensor  # [..., F, K]
    hidden_bias: Tensor  # [..., K]
    output: Tensor  # [..., K]
    bias: Tensor  # [...]


_TAILS: tuple[tuple[str, ...], ...] = (("F",), ("F",), ("F",), ("F", "K"), ("K",), ("K",), ())
ARRAYS = dict(zip(Coefficients._fields, _TAILS, strict=True))


class Weights(NamedTuple):
    """A fitted ranking: what it looks at, and one regression for each of [L, Hkv] heads on F standardised features.

    log importance = linear . z + output . gelu(hidden z + hidden_bias) + bias, with z = (x - center) / scale.
    """

    features: tuple[str, ...]
    layers: tuple[int, ...]  # the model layer of each row
    arrays: Coefficients

    def log_importance(self, x: Tensor, layer: int, seen: Observation | None = None) -> Tensor:
        """Return the fitted log importance of entries with features [B, Hkv, T, F] in a model layer, [B, Hkv, T].

        `seen` is where the entries are from, if its rows may be of one kv head each.
        """
        center, scale, linear, hidden, hidden_bias, output, bias = (
            self.of(array, layer, seen).to(x.device) for array in self.arrays
        )
        # Standardised as at the fit: coefficients mean nothing for raw features.
        z = (x - center[..., None, :]) / scale[..., None, :]
        score = (z @ linear[..., None])[..., 0] + bias[..., None]
        # A fit may be linear alone, with no hidden units.
        if hidden.shape[-1]:
            inner = F.gelu(z @ hidden + hidden_bias[..., None, :])
            score = score + (inner @ output[..., None])[..., 0]
        return score

    def of(self, array: Tensor, layer: int, seen: Observation | None = None) -> Tensor:
        """Return one of `arrays` in a model layer, by kv head [1, Hkv, ...], or as `seen` has its rows [B, 1, ...]."""
        row = array[find_row(layer, self.layers, PROBE_METHOD)]
        return row[None] if seen is None else select_heads(row, seen)


def features_of(observation: Observation, names: tuple[str, ...]) -> Tensor:
    """Return the features of every entry, [B, Hkv, T, F] fp32, in the order of `names`.

    key: the key at position 0 (un-rotated); value; value_norm: log |v|; expected_attention, snapkv: the logarithms of
    these policies' scores, times the number of entries, so that they do not depend on the length; keydiff: its cosine;
    spread: see `spread_places`.
    """
    parts = [_FEATURES[name](observation) for name in names]
    return torch.cat([part if part.ndim == 4 else part[..., None] for part in parts], -1)


def columns_of(names: Iterable[str], head_dim: int) -> tuple[str, ...]:
    """Return the feature name of every column of `features_of`; keys and values have `head_dim` columns."""
    return tuple(name for name in names for _ in range(head_dim if name in ("key", "value") else 1))


def needs_of(names: tuple[str, ...]) -> Needs:
    """Return the needs of these features."""
    start = SINKS if "expected_attention" in names else None
    return Needs(WINDOW if "snapkv" in names else 0, start, unrotated="key" in names)


# the policies whose scores are features, by their names
SCORE_POLICIES: dict[str, Policy] = {
    "expected_attention": ExpectedAttention(sinks=SINKS),
    "snapkv": SnapKV(window=WINDOW, sinks=SINKS),
    "keydiff": keydiff.KeyDiff(sinks=SINKS),
}


def _log_score(policy: Policy) -> Any:
    def score(observation: Observation) -> Tensor:
        # Shares of attention fall with the length; times the length they do not, so one fit serves all lengths.
        scores = score_entries(policy, observation).clamp(min=0) * observation.lengths[:, None, None]
        return (scores + MIN_IMPORTANCE).log()

    return score


_FEATURES: dict[str, Any] = {
    "key": unrotate_keys,
    "value": lambda observation: observation.values.float(),
    "value_norm": lambda observation: (observation.value_norms(2) + MIN_IMPORTANCE).log(),
    **{name: _log_score(SCORE_POLICIES[name]) for name in OF_ATTENTION},
    "keydiff": partial(score_entries, SCORE_POLICIES["keydiff"]),
    SPREAD: lambda observation: spread_places(observation.index)[:, None].expand(observation.keys.shape[:3]),
}


@dataclass(frozen=True)
class Probe(CalibratedRanking):
    """score[i] = exp(fitted log importance of entry i), an estimate of max_k A[k, i] |v_i W_O| over later queries k.

    The fit is a regression per kv head on the entry's key, value and simple scores, by `calibrate --method probe`;
    `weights` is the SHA-256 of its file, which lies beside every plan that uses it.

    While decoding, the scores of the prompt's entries stay as they are. A new token gets its score when it comes, once:
    from its own key, value and value norm, and its cosine to the mean key of the prompt. What the scores of SnapKV and
    ExpectedAttention would be cannot be known, as no window of queries comes after it: the average entry of the fit
    stands in for them. With a `refresh` all entries are scored anew every so many steps instead, with SnapKV's and
    ExpectedAttention's scores of the last queries.
    """

    name: ClassVar[str] = "probe"
    source: ClassVar[str] = "kvsearch; cf. KVzap, arXiv 2601.07891, which fits hidden states to KVzip's scores"
    summary: ClassVar[str] = "exp(log importance, fitted per kv head)"
    weakness: ClassVar[str] = "kinds of content that it was not fitted on: [rankings](rankings.md)"

    made_by: ClassVar[str] = "`calibrate --method probe`"

    @classmethod
    def check_weights(cls, digest: str) -> None:
        _weights(digest)

    def needs(self) -> Needs:
        return needs_of(self.fitted.features)

    def score(self, observation: Observation) -> Tensor:
        """Return the fitted importance, [B, Hkv, T] fp32."""
        fitted = _weights(self.weights, observation.keys.device)
        scores = fitted.log_importance(features_of(observation, fitted.features), observation.layer, observation)
        return scores.clamp(-MAX_LOG_SCORE, MAX_LOG_SCORE).exp()

    def start(self, observation: Observation) -> State:
        """Return the scores of the prompt's entries, and the mean direction of its keys where that is looked at."""
        state = super().start(observation)
        if "keydiff" in self.fitted.features:
            # Kept from the prompt: a mean over what is held would drift with every eviction.
            state.heads[ANCHOR] = keydiff.compute_anchor(observation.keys, observation.valid[:, None])
        return state

    def arriving(self, step: Step) -> Tensor:
        seen = step.arrived
        shape = seen.keys.shape[:3]
        fitted = _weights(self.weights, seen.keys.device)
        first = 0
        parts: list[Tensor] = []
        # The centre is the mean of the fit: a feature that is put there is 0 once standardised.
        average = fitted.of(fitted.arrays.center, seen.layer, seen)[..., None, :].expand(*shape, -1)
        for name in fitted.features:
            if name == "keydiff":
                anchor = step.cached.state.heads[ANCHOR].view(*shape[:2], -1)
                part = keydiff.score_difference(seen.keys, anchor)[..., None]
            elif name in OF_ATTENTION:
                part = average[..., first : first + 1]
            else:
                part = features_of(seen, (name,))
            parts.append(part)
            first += part.shape[-1]
        scores = fitted.log_importance(torch.cat(parts, -1), seen.layer, seen)
        return scores.flatten(0, 1).clamp(-MAX_LOG_SCORE, MAX_LOG_SCORE).exp()

    @property
    def fitted(self) -> Weights:
        """The weights; UsageError if they are not here."""
        return _weights(self.weights)


@constant
@lru_cache(maxsize=16)
def _weights(digest: str, device: Any = "cpu") -> Weights:
    """Load the weights of a file; UsageError if it is not here, or not of this version."""
    profile = load_fitted_profile(digest, PROBE_METHOD)
    features = profile.metadata.provenance.settings.get("features")
    if not isinstance(features, tuple) or not set(features) <= set(FEATURES):
        raise useless_weights_error(
            PROBE_METHOD, f"they look at {features}, and this version knows {', '.join(FEATURES)}"
        )
    # Names come from a file: the number of columns must be that of the coefficients.
    names = tuple(map(str, features))
    require_arrays(profile, ARRAYS, {"F": len(columns_of(names, profile.metadata.model.head_dim))})
    if not bool((profile.arrays["scale"] > 0).all()):
        raise useless_weights_error(PROBE_METHOD, "a scale is not above 0")
    arrays = (torch.from_numpy(profile.arrays[name].copy()).float().to(device) for name in Coefficients._fields)
    return Weights(names, profile.metadata.layers, Coefficients(*arrays))
