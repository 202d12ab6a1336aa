"""Base of policies whose weights lie in a file, and which score an entry once, as it comes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvsearch.config.options import parse_setting
from kvsearch.core.errors import UsageError, assert_present
from kvsearch.core.files import read_bytes
from kvsearch.core.naming import check_unique
from kvsearch.core.parsing import format_value
from kvsearch.policies.base import Observation, Policy, Running
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.ranking import score_entries
from kvsearch.policies.registry import find_policy_class, is_fitted, list_fitted
from kvsearch.policies.tensors import Tensor, torch

if TYPE_CHECKING:
    from kvsearch.core.arrays import Floats
    from kvsearch.plan import ModelFingerprint, Profile

VERSION = 1  # of what weights mean to the policies that read them
WRITTEN_FOR = "policy_version"  # the setting of a profile that has it; without it, 1
_FILE = "file"  # of a policy that is sent to another process: where its weights were read, and what they are
SCORE_STATE = "score"  # the running state: of every entry, as it was made
GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Fitted(Policy):
    """A policy that ranks by `weights`, the SHA-256 of a file that lies beside every plan and profile of the policy.

    While decoding the scores of the prompt's entries stay as they are, and a new token is scored once, together with
    other tokens that came while all of them are protected (`arriving`).
    """

    is_fitted: ClassVar[bool] = True
    running: ClassVar[Running] = "stored"
    made_by: ClassVar[str]  # what writes a directory with weights, in words
    published: ClassVar[str | None] = None  # the file of such a directory; None: a profile

    weights: str
    sinks: int = 4
    protect: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.weights, str) and len(self.weights) == 64  # a plan may state anything
        self._require(known, f"weights is the SHA-256 of a file that {self.made_by} wrote")

    def __getstate__(self) -> dict[str, Any]:
        """Take the weights along to another process, which may not see the file."""
        from kvsearch.plan.saved import read_known_weights

        return {**self.__dict__, _FILE: read_known_weights(self.weights)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the weights known to the process that this came to."""
        from kvsearch.plan.saved import register_weights

        path, data = state.pop(_FILE)
        register_weights(data, path)
        self.__dict__.update(state)

    @classmethod
    @abstractmethod
    def check_weights(cls, digest: str) -> None:
        """Raise UsageError if the weights of this SHA-256 are missing, or belong to another policy."""

    def start(self, observation: Observation) -> State:
        """Return the scores of the prompt's entries."""
        return State({SCORE_STATE: score_entries(self, observation).clone()})

    def step(self, step: Step) -> Tensor:
        """Return the scores [S, C] fp32 of all entries; new tokens are scored here, and have +inf until they are."""
        scores = step.cached.state.entries[SCORE_STATE]
        newest = step.newest[:, None]
        if step.waits:
            return scores.scatter_(1, newest, torch.inf)
        made = self.arriving(step)
        if step.arrivals is None or made.shape[1] == 1:
            return scores.scatter_(1, newest, made)
        scores.scatter_(1, newest, torch.inf)
        # Only what still waits, +inf, gets its score; others keep theirs.
        there = scores.gather(1, step.arrivals)  # entries of the prompt may be among them
        return scores.scatter_(1, step.arrivals, torch.where(there == torch.inf, made, there))

    @abstractmethod
    def arriving(self, step: Step) -> Tensor:
        """Return the scores of the tokens that arrived, [S, K] fp32; see `Step.arrived`."""


@dataclass(frozen=True)
class CalibratedRanking(Fitted):
    """A policy whose weights are a profile that `calibrate` wrote for one model.

    With a `refresh` all entries are scored anew every so many decode steps, in place of each new token once.
    """

    refresh: int = 0

    def check_model(self, model: ModelFingerprint) -> None:
        """Raise IncompatibleError if the weights are for another model than the one of this fingerprint.

        UsageError: see `check_weights`.
        """
        self.check_weights(self.weights)
        fitted = load_fitted_profile(self.weights, self.name).metadata.model
        fitted.require(model, f"the fitted ranking of policy {self.name}")

    @property
    def has_decode_rule(self) -> bool:
        return not self.refresh


def split_settings(text: str, what: str, form: str, max_count: int) -> tuple[list[str], dict[str, Any]]:
    """Return the names before the settings of NAME:NAME:KEY=VALUE, at `max_count` so many, and the settings.

    What POLICY=DIR stands for is a name. `form` says what names there may be.

    Raises:
        UsageError: no name, too many, one after a setting, or a setting twice.
    """
    pieces = text.split(":")
    names = list(takewhile(lambda piece: "=" not in piece or is_fitted(piece.partition("=")[0]), pieces))
    if not 1 <= len(names) <= max_count or not all("=" in piece for piece in pieces[len(names) :]):
        raise UsageError(f"{what} {text}: it is {form} with :KEY=VALUE after it")
    settings = [parse_setting(piece, what) for piece in pieces[len(names) :]]
    check_unique(f"{what} {text}:", [key for key, _ in settings])
    return names, dict(settings)


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return the policy that NAME or NAME:KEY=VALUE:KEY=VALUE stands for, and the parameters this says.

    A fitted one is given as NAME=DIR, as in "probe=DIR": DIR is a directory with its weights, or their file there. Its
    parameters are the weights, and what entries were protected where they were fitted.

    Raises:
        UsageError: a text of another form, another policy than the fitted ones with a directory, no such file, or one
            without weights of it; a fit that every built-in ranking is better than.
    """
    form = f"NAME or one of {', '.join(f'{name}=DIR' for name in list_fitted())},"
    (spec,), settings = split_settings(text, "policy", form, max_count=1)
    from kvsearch.plan.saved import PROFILE, WEIGHTS, register_weights

    name, given, source = spec.partition("=")
    if not is_fitted(name):
        return name, settings
    policy = find_policy_class(name)
    assert issubclass(policy, Fitted)
    if not given:
        raise UsageError(f"policy {name} is fitted: give {name}=DIR, a directory that {policy.made_by} wrote")
    path = Path(source)
    path = path / (policy.published or PROFILE) if path.is_dir() else path
    digest = register_weights(read_bytes(path), path)
    policy.check_weights(digest)
    if policy.published:
        return name, {WEIGHTS: digest, **settings}
    profile = load_fitted_profile(digest, name)
    if is_last(profile.arrays):
        raise UsageError(
            f"policy {text}: on contexts that it never saw every built-in ranking is better than this fit: fit on more "
            f"contexts with calibrate --method {name}"
        )
    return name, {**profile.metadata.policy.params, WEIGHTS: digest, **settings}


def is_last(arrays: Mapping[str, Floats]) -> bool:
    """Return whether a fitted ranking loses more than every ranking it was compared with, by a profile's arrays.

    That is "middle_loss", of the ranking and then of the others; a ranking in the making was not compared yet.
    """
    losses = arrays.get("middle_loss")
    return losses is not None and len(losses) > 1 and bool((losses[1:] < losses[0]).all())


@lru_cache(maxsize=16)
def load_fitted_profile(digest: str, method: str) -> Profile:
    """Return the profile of a `method` that has the weights of this SHA-256.

    Raises:
        UsageError: they are not here, or the file is no profile of that method, or for another version of the policy.
    """
    from kvsearch.plan.profile import read_profile
    from kvsearch.plan.saved import read_known_weights

    path, data = read_known_weights(digest)
    profile = read_profile(data, str(path))
    if profile.metadata.method != method:
        raise UsageError(
            f"{path} has no weights of policy {method}: it is a profile of {format_value(profile.metadata.method)}"
        )
    version = profile.metadata.provenance.settings.get(WRITTEN_FOR, 1)
    if version != VERSION:
        raise UsageError(
            f"{path} has weights for version {version} of policy {method}, and this is version {VERSION}: fit it again "
            f"with `calibrate --method {method}`, or use the kvsearch that wrote it"
        )
    return profile


def useless_weights_error(method: str, problem: str) -> UsageError:
    """Make the error of weights that this version cannot use."""
    return UsageError(f"the weights of policy {method} cannot be used: {problem}; fit them again with this version")


def find_row(layer: int, layers: Sequence[int], name: str) -> int:
    """Return the row of a policy's weights, which are for `layers`, that a layer has; UsageError if it has none."""
    if layer not in layers:
        raise UsageError(f"policy {name}: its weights are for layers {layers}, not {layer}")
    return layers.index(layer)


def require_arrays(profile: Profile, tails: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> None:
    """Raise UsageError if a profile does not have these arrays, [L, Hkv, *tail] each, of floating-point numbers.

    A tail is of letters: those in `sizes` stand for these numbers, others for any that is the same wherever they stand.
    """
    known = dict(sizes)
    problem = ""
    for name, tail in tails.items():
        array = profile.arrays.get(name)
        wanted = [*profile.metadata.shape, *(known.get(letter, letter) for letter in tail)]
        if array is None:
            problem = f"{name} is missing"
        elif array.dtype.kind != "f":
            problem = f"{name} has type {array.dtype}, not a floating-point one"
        elif array.ndim != len(wanted) or any(
            isinstance(size, int) and size != there for size, there in zip(wanted, array.shape, strict=True)
        ):
            problem = f"{name} has shape {list(array.shape)}, not [{', '.join(map(str, wanted))}]"
        else:
            known |= dict(zip(tail, array.shape[2:], strict=True))
        if problem:
            raise useless_weights_error(profile.metadata.method, problem)


def spread_places(index: Tensor) -> Tensor:
    """Return the fractional part of indices times the golden ratio, fp32: the largest lie evenly at every budget."""
    return (index.clamp(min=0).double() * GOLDEN_RATIO).frac().float()


def unrotate_keys(observation: Observation) -> Tensor:
    """Return the keys at position 0 (un-rotated), [B, Hkv, T, D] fp32, computed once per observation."""
    from kvsearch.models.architecture import unrotate

    unknown = "a policy turns keys back and was not given the model's rotary embedding"
    rotary = assert_present(observation.rotary, unknown)

    def compute() -> Tensor:
        positions = observation.index.clamp(min=0)
        cos, sin = (table.float().view(*positions.shape, -1) for table in rotary(positions.flatten()))
        return unrotate(observation.keys.float(), cos, sin)

    return observation.shared("plain_keys", compute)


def select_heads(array: Tensor, observation: Observation) -> Tensor:
    """Select values by kv head [Hkv, ...] for the rows of an observation: [1, Hkv, ...], or [B, 1, ...]."""
    return array[None] if observation.heads is None or len(array) == 1 else array[observation.heads][:, None]
