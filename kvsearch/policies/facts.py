"""What is told about a policy: plain data, ready for JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter. `default` is None where a value must be given."""

    name: str
    type: str
    default: bool | int | float | str | None


@dataclass(frozen=True)
class DecodeRule:
    """How entries are chosen while decoding.

    `rule` says it in words. An `online` policy updates its state in every step and reads one attention row (`row`:
    "group" or "layer", None: no row); other policies are scored anew `every` so many steps. Of a budget of 1000 entries
    the most recent `recent_of_1000` are protected, and `leave_of_1000` leave at once when it is exceeded. If it
    `merges`, what leaves is folded into what stays.
    """

    rule: str
    online: bool
    every: int | None
    row: str | None
    recent_of_1000: int
    leave_of_1000: int
    merges: bool


@dataclass(frozen=True)
class PolicyFacts:
    """A policy under its default parameters.

    `phases` are those in which it evicts, `stages` how many scores choose what stays of the prompt. `needs`, `sinks`,
    `window`, `stages` and `decode` are None where parameters without a default decide them.
    """

    name: str
    package: str  # "kvsearch", or the distribution that brings the policy
    implementation: str  # module:Class
    source: str
    title: str
    formula: str
    parameters: tuple[Parameter, ...]
    phases: tuple[str, ...]
    stages: int | None
    needs: tuple[str, ...] | None  # besides keys and values
    sinks: int | None
    window: int | None
    decode: DecodeRule | None


@dataclass(frozen=True)
class PolicyFault:
    """A registered policy that cannot be used, and why, on one line."""

    name: str
    package: str
    error: str
