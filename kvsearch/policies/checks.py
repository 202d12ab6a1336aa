"""Checks of what a policy returns: its form at once, its values together with what the host reads anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvsearch.core.errors import KvsearchError, NonFiniteError
from kvsearch.core.parsing import format_error
from kvsearch.models.memory import is_out_of_memory
from kvsearch.policies.registry import is_ours, policy_error
from kvsearch.policies.tensors import Tensor, torch

if TYPE_CHECKING:
    from kvsearch.policies.base import Observation, Policy
    from kvsearch.policies.decoding import State


LENGTHS_KEY = "lengths on the host"  # what they are shared by


class DeferredCheck(NamedTuple):
    """A check whose result, [B] bool on the device, is looked at later, with the error to raise."""

    wrong: Tensor
    error: Callable[[int], KvsearchError]  # by the first sequence that is wrong

    def in_segments(self, rows: Tensor) -> DeferredCheck:
        """Return the check where `wrong` is [S], of segments that belong to sequences `rows` [S]."""
        return DeferredCheck(self.wrong, lambda segment: self.error(int(rows[segment])))


def make_finite_check(policy: Policy, layer: int, wrong: Tensor) -> DeferredCheck:
    """Return the check of whether scores [B, ...] of a policy that are compared are `wrong`, NaN or infinite."""
    return DeferredCheck(wrong.flatten(1).any(-1), partial(_score_error, policy, layer))


def _score_error(policy: Policy, layer: int, row: int) -> KvsearchError:
    if is_ours(type(policy)):
        named = f"layer {layer}: the scores of {policy.name}"
        return NonFiniteError(f"{named} are not finite: the model computes NaN or infinity", row)
    return policy_error(type(policy), f"gave scores that are NaN or infinite in layer {layer}")


@contextmanager
def name_package_on_error(policy: Policy, method: str) -> Iterator[None]:
    """Add a third-party policy's package to the errors of its `method`.

    Raises:
        EnvironmentFault: it raised something else than a KvsearchError or for want of memory.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, KvsearchError) or is_out_of_memory(error) or is_ours(type(policy)):
            raise
        raise policy_error(type(policy), f"failed in {method}() ({format_error(error)})") from error


def check_form(policy: Policy, what: str, tensor: object, shape: Sequence[int], beside: Tensor) -> Tensor:
    """Return `tensor` if it is fp32 of this shape on the device of `beside`; the device is not waited for.

    Raises:
        EnvironmentFault: a policy of another package returned something else.
        InternalError: one of kvsearch did.
    """
    if not isinstance(tensor, torch.Tensor):
        raise policy_error(type(policy), f"returned {type(tensor).__name__} from {what}(), not a tensor")
    for name, is_, wanted in (
        ("shape", tuple(tensor.shape), tuple(shape)), ("dtype", tensor.dtype, torch.float32),
        ("device", tensor.device, beside.device),
    ):  # fmt: skip
        if is_ != wanted:
            raise policy_error(type(policy), f"returned {name} {is_} from {what}(), not {wanted}")
    return tensor


def start_state(policy: Policy, observation: Observation) -> State:
    """Return a policy's running state after the prompt, by its `start`."""
    with name_package_on_error(policy, "start"):
        return policy.start(observation)


def check_scores(policy: Policy, observation: Observation, what: str, scores: object) -> Tensor:
    """Return scores [B, Hkv, T] once their form is checked, and note in `observation.checks` whether they are finite.

    Padding and what the policy protects may have any score: they are not compared.
    """
    # The form costs nothing to look at; values would be waited for, so whether they are finite is noted for later.
    checked = check_form(policy, what, scores, observation.keys.shape[:3], observation.keys)
    if observation.checks is not None:
        wrong = ~checked.isfinite() & observation.candidates(policy.sink_count, policy.recent_count)[:, None]
        observation.checks.append(make_finite_check(policy, observation.layer, wrong))
    return checked


def require_finite(checks: Iterable[DeferredCheck] | None) -> None:
    """Raise for the first scores that are not finite; waits for the device of the first, wherever the others are."""
    pending = list(checks or ())
    if pending:
        device = pending[0].wrong.device
        _raise_first(pending, torch.cat([check.wrong.to(device) for check in pending]).tolist())


def read_checked_lengths(observation: Observation) -> list[int]:
    """Return the real entries per sequence; `require_finite` of what was noted of scores, in the same read."""
    checks = observation.checks
    lengths = observation.lengths
    if not checks:
        return read_lengths(observation)
    wrong = torch.cat([check.wrong for check in checks])
    read: list[int] = torch.cat([lengths, wrong.to(lengths.dtype)]).tolist()
    _raise_first(checks, read[len(lengths) :])
    checks.clear()
    return observation.shared(LENGTHS_KEY, lambda: read[: len(lengths)])


def read_lengths(observation: Observation) -> list[int]:
    """Return the real entries per sequence; the device is waited for once for each observation."""
    return observation.shared(LENGTHS_KEY, lambda: list(map(int, observation.lengths.tolist())))


def _raise_first(checks: Sequence[DeferredCheck], wrong: Sequence[int | bool]) -> None:
    first = 0
    for check in checks:
        own_part = wrong[first : first + len(check.wrong)]
        if any(own_part):
            raise check.error(own_part.index(True))
        first += len(own_part)
