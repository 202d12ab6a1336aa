"""What a policy returns is looked at: its form at once, its values together with what the host reads anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvsearch.errors import IncompatibleError, KvsearchError, UsageError
from kvsearch.policies.plugins import fault, is_ours
from kvsearch.policies.tensors import Tensor, torch

if TYPE_CHECKING:
    from kvsearch.policies.base import Observation, Policy
    from kvsearch.policies.decoding import State


LENGTHS = "lengths on the host"  # what they are shared by


class Finding(Protocol):
    """What may be wrong, as is known on a device and looked at later."""

    @property
    def wrong(self) -> Tensor:
        """Whether it is, 0-dim bool."""

    def error(self) -> KvsearchError:
        """Return what to raise then."""


class EndsPadded(NamedTuple):
    """Whether a prompt ends with padding: a bool on its device."""

    wrong: Tensor  # 0-dim

    def error(self) -> KvsearchError:
        """Return what to raise if it does."""
        return UsageError("a prompt ends with padding: pad batches on the left (padding_side='left')")


class ReadPadding(NamedTuple):
    """Whether padding was read again as part of a prompt: a bool on its device."""

    wrong: Tensor  # 0-dim

    def error(self) -> KvsearchError:
        """Return what to raise if it was."""
        return UsageError("padding was read again as part of a prompt (kvzip): give `generate` the attention_mask")


class Look(NamedTuple):
    """Scores of a policy in a layer, and whether some that are compared are NaN or infinite: a bool on their device."""

    policy: Policy
    layer: int
    wrong: Tensor  # 0-dim

    def error(self) -> KvsearchError:
        """Return what to raise where they are."""
        if is_ours(type(self.policy)):
            named = f"layer {self.layer}: the scores of {self.policy.name}"
            return IncompatibleError(f"{named} are not finite: the model computes NaN or infinity")
        return fault(type(self.policy), f"gave scores that are NaN or infinite in layer {self.layer}")


def check_form(policy: Policy, what: str, found: object, shape: Sequence[int], beside: Tensor) -> Tensor:
    """Return `found`, once it is seen to be fp32 of a shape, where `beside` is; nothing is waited for.

    Raises:
        EnvironmentFault: a policy of another package returned something else.
        InternalError: one of kvsearch did.
    """
    if not isinstance(found, torch.Tensor):
        raise fault(type(policy), f"returned {type(found).__name__} from {what}(), not a tensor")
    for name, is_, wanted in (
        ("shape", tuple(found.shape), tuple(shape)), ("dtype", found.dtype, torch.float32),
        ("device", found.device, beside.device),
    ):  # fmt: skip
        if is_ != wanted:
            raise fault(type(policy), f"returned {name} {is_} from {what}(), not {wanted}")
    return found


def check_state(policy: Policy, state: State, observation: Observation) -> State:
    """Return the state that `start` made, once its tensors [B, Hkv, T, ...] and [B, Hkv, ...] are seen to be that."""
    shape, device = observation.keys.shape[:3], observation.keys.device
    for tensors, size in ((state.entries, 3), (state.heads, 2)):
        for name, tensor in tensors.items():
            if tensor.shape[:size] != shape[:size] or tensor.device != device:
                problem = f"{tuple(tensor.shape)} on {tensor.device}, not {tuple(shape[:size])} on {device}"
                raise fault(type(policy), f"made the state {name!r} of {problem}")
    return state


def check_scores(policy: Policy, observation: Observation, what: str, scores: object) -> Tensor:
    """Return scores [B, Hkv, T] once their form is checked, and note in `observation.looks` whether they are finite.

    Padding and what the policy protects may have any score: they are not compared.
    """
    found = check_form(policy, what, scores, observation.keys.shape[:3], observation.keys)
    if observation.looks is not None:
        wrong = ~found.isfinite() & observation.candidates(policy.sink_count, policy.recent_count)[:, None]
        observation.looks.append(Look(policy, observation.layer, wrong.any()))
    return found


def require_finite(looks: Iterable[Finding] | None) -> None:
    """Raise for the first scores that are not finite; waits for a device."""
    if found := list(looks or ()):
        _raise_first(found, torch.stack([one.wrong for one in found]).tolist())


def lengths_after(observation: Observation) -> list[int]:
    """Return the real entries per sequence; `require_finite` of what was noted of scores, in the same read."""
    looks, lengths = observation.looks, observation.lengths
    if not looks:
        return lengths_of(observation)
    wrong = torch.stack([one.wrong for one in looks])
    read: list[int] = torch.cat([lengths, wrong.to(lengths.dtype)]).tolist()
    _raise_first(looks, read[len(lengths) :])
    looks.clear()
    return observation.shared(LENGTHS, lambda: read[: len(lengths)])


def lengths_of(observation: Observation) -> list[int]:
    """Return the real entries per sequence; the device is waited for once for each observation."""
    return observation.shared(LENGTHS, lambda: list(map(int, observation.lengths.tolist())))


def _raise_first(looks: Sequence[Finding], wrong: Sequence[int | bool]) -> None:
    for one, is_wrong in zip(looks, wrong, strict=True):
        if is_wrong:
            raise one.error()
