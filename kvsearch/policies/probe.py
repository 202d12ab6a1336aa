"""Probe: a ranking fitted to the model's own later attention, one small regression per kv head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from kvsearch.errors import InternalError, UsageError
from kvsearch.policies.base import Needs, Observation, Policy
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.keydiff import KeyDiff
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.tensors import F, Tensor, torch

if TYPE_CHECKING:
    from kvsearch.plan import ModelFingerprint, Profile

METHOD = "probe"  # of the profile that has the weights
FEATURES = ("key", "value", "value_norm", "expected_attention", "snapkv", "keydiff")
ARRAYS = ("center", "scale", "linear", "hidden", "hidden_bias", "output", "bias")
SINKS, WINDOW = 4, 8  # of the policies whose scores are features
LEAST = 1e-8
MOST_LOG = 60.0  # scores stay finite in fp32


@dataclass(frozen=True)
class Weights:
    """A fitted ranking: what it looks at, and one regression for each of [L, Hkv] heads on F standardised features.

    log importance = linear . z + output . gelu(hidden z + hidden_bias) + bias, with z = (x - center) / scale.
    """

    features: tuple[str, ...]
    layers: tuple[int, ...]  # the model layer of each row
    arrays: dict[str, Tensor]  # center, scale, linear [L, Hkv, F]; hidden [L, Hkv, F, K]; ...; bias [L, Hkv]

    def log_importance(self, x: Tensor, layer: int) -> Tensor:
        """Return the fitted log importance of entries with features [B, Hkv, T, F] in a model layer, [B, Hkv, T]."""
        part = {name: array[self.layers.index(layer)].to(x.device) for name, array in self.arrays.items()}
        z = (x - part["center"][:, None]) / part["scale"][:, None]
        score = (z @ part["linear"][..., None])[..., 0] + part["bias"][:, None]
        if part["hidden"].shape[-1]:
            inner = F.gelu(z @ part["hidden"] + part["hidden_bias"][:, None])
            score = score + (inner @ part["output"][..., None])[..., 0]
        return score


def features_of(observation: Observation, names: tuple[str, ...]) -> Tensor:
    """Return what is looked at of every entry, [B, Hkv, T, F] fp32, the features in the order of `names`.

    key: the key at position 0 (un-rotated); value; value_norm: log |v|; expected_attention, snapkv: the logarithms of
    these policies' scores, times the number of entries, so that they do not depend on the length; keydiff: its cosine.
    """
    parts = [_FEATURES[name](observation) for name in names]
    return torch.cat([part if part.ndim == 4 else part[..., None] for part in parts], -1)


def needs_of(names: tuple[str, ...]) -> Needs:
    """Return what these features need of a prompt."""
    # what wants query statistics is refused on a model whose rotary embedding cannot be undone, as for keys
    unrotated = "expected_attention" in names or "key" in names
    return Needs(WINDOW if "snapkv" in names else 0, SINKS if unrotated else None)


def _key(observation: Observation) -> Tensor:
    from kvsearch.models.architecture import unrotate

    if observation.rotary is None:
        raise InternalError("a probe was not given the model's rotary embedding")
    positions = observation.index.clamp(min=0)
    cos, sin = (table.float().view(*positions.shape, -1) for table in observation.rotary(positions.flatten()))
    return unrotate(observation.keys.float(), cos, sin)


def _log_score(policy: Policy) -> Any:
    def score(observation: Observation) -> Tensor:
        found = policy.score(observation).float().clamp(min=0) * observation.lengths[:, None, None]
        return (found + LEAST).log()

    return score


_FEATURES: dict[str, Any] = {
    "key": _key,
    "value": lambda observation: observation.values.float(),
    "value_norm": lambda observation: (observation.value_norms(2) + LEAST).log(),
    "expected_attention": _log_score(ExpectedAttention(sinks=SINKS)),
    "snapkv": _log_score(SnapKV(window=WINDOW, sinks=SINKS)),
    "keydiff": KeyDiff(sinks=SINKS).score,
}


@dataclass(frozen=True)
class Probe(Policy):
    """score[i] = exp(fitted log importance of entry i), an estimate of max_k A[k, i] |v_i W_O| over later queries k.

    The fit is a regression per kv head on the entry's key, value and simple scores, by `calibrate --method probe`;
    `weights` is the SHA-256 of its file, which lies beside every plan that uses it.
    """

    name: ClassVar[str] = "probe"
    source: ClassVar[str] = "kvsearch; cf. KVzap, arXiv 2601.07891, which fits hidden states to KVzip's scores"

    weights: str
    sinks: int = 4
    protect: int = 8
    refresh: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.weights) == 64, "weights is the SHA-256 of a file that `calibrate --method probe` wrote")

    def needs(self) -> Needs:
        return needs_of(self.fitted.features)

    def score(self, observation: Observation) -> Tensor:
        """Return the fitted importance, [B, Hkv, T] fp32."""
        fitted = self.fitted
        if observation.layer not in fitted.layers:
            raise UsageError(f"policy probe: its weights are for layers {fitted.layers}, not {observation.layer}")
        found = fitted.log_importance(features_of(observation, fitted.features), observation.layer)
        return found.clamp(-MOST_LOG, MOST_LOG).exp()

    @property
    def fitted(self) -> Weights:
        """The weights; UsageError if they are not here."""
        return _weights(self.weights)

    def check_model(self, model: ModelFingerprint) -> None:
        """Raise IncompatibleError if the weights are for another model than the one of this fingerprint."""
        profile_of(self.weights).metadata.model.require(model, "the fitted ranking of policy probe")


@lru_cache(maxsize=16)
def profile_of(digest: str) -> Profile:
    """Return the profile that has the weights of this SHA-256.

    Raises:
        UsageError: they are not here, or the file is no profile of a probe.
    """
    from kvsearch.plan.profile import read_profile
    from kvsearch.plan.weights import known_weights

    path, data = known_weights(digest)
    found = read_profile(data, str(path))
    if found.metadata.method != METHOD:
        raise UsageError(f"{path} has no weights of a ranking: it is a {found.metadata.method} profile")
    return found


@lru_cache(maxsize=16)
def _weights(digest: str) -> Weights:
    profile = profile_of(digest)
    features = profile.metadata.provenance.settings["features"]
    assert isinstance(features, tuple)
    arrays = {name: torch.from_numpy(profile.arrays[name].copy()).float() for name in ARRAYS}
    return Weights(tuple(map(str, features)), profile.metadata.layers, arrays)
