"""The Policy interface: WHAT to evict. A policy ranks cached entries; how many stay is up to the budget.

A policy is a frozen dataclass of its hyper-parameters. It declares what it needs, and the runtime computes only that,
never a T x T matrix. Scores say how much an entry is worth keeping; protection (sinks and recent window), padding and
budgets are applied outside, in the same way for every policy: in `ranking` for the prompt, in `decoding` afterwards.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from kvsearch.core.errors import InternalError, UsageError, assert_present
from kvsearch.plan.schema import ModelFingerprint, PolicySpec
from kvsearch.policies.decoding import Cached, State, Step
from kvsearch.policies.tensors import Tensor

if TYPE_CHECKING:
    from kvsearch.policies.checks import DeferredCheck

# hidden states that enter the attention of a layer [B, q, d_model], its index -> something of each entry [B, Hkv, q]
OfHidden = Callable[[Tensor, int], Tensor]


class SecondPass(NamedTuple):
    """How a prompt is read again, after itself: `chunk` tokens at a time, and what is measured (see `KVzip`)."""

    chunk: int
    plus: bool


@dataclass(frozen=True)
class Needs:
    """What a policy needs of the prompt besides keys and values."""

    query_rows: int = 0  # the last so many query rows
    query_statistics_from: int | None = None  # mean and covariance of the unrotated queries from this position on
    column_sums: bool = False  # attention that every entry received from all queries
    projection: bool = False  # norms of the values behind the output projection W_O
    unrotated: bool = False  # keys turned back to position 0, which not every model's rotary embedding allows
    references: int = 0  # so many queries of tokens that lie evenly over the prompt, turned back to position 0

    hidden: OfHidden | None = None  # what this makes of hidden states, which are not kept themselves
    reread: SecondPass | None = None  # attention from the prompt when it is read again

    def describe(self) -> list[str]:
        """Describe the needs, for messages and listings."""
        parts: list[str] = []
        if self.query_rows:
            parts.append("last query row" if self.query_rows == 1 else f"last {self.query_rows} query rows")
        if self.query_statistics_from is not None:
            parts.append(f"query mean and covariance from position {self.query_statistics_from} on")
        if self.column_sums:
            parts.append("attention column sums")
        if self.projection:
            parts.append("projected value norms")
        if self.unrotated:
            parts.append("keys at position 0")
        if self.references:
            parts.append(f"{self.references} query rows from all over the prompt")
        if self.hidden is not None:
            parts.append("hidden states")
        if self.reread:
            parts.append(f"the prompt read again, {self.reread.chunk} tokens at a time")
        return parts


@dataclass(frozen=True)
class QueryStatistics:
    """Mean and covariance (divided by N) of the unrotated queries of a prompt, per query head."""

    mean: Tensor  # [B, Hq, D] fp32
    covariance: Tensor  # [B, Hq, D, D] fp32


class References(NamedTuple):
    """Queries of N tokens that lie evenly over each prompt, in no order; of a shorter one some are not real."""

    queries: Tensor  # [B, Hq, N, D] fp32, at position 0
    real: Tensor  # [B, N] bool


Shared = TypeVar("Shared")
Norm = Literal["l1", "l2"]
AttentionRow = Literal["group", "layer"]
Running = Literal["position", "mass", "stored", "row", "persistence", "pooled"]
AS_WINDOW = -1  # a `protect` that is as large as the window
Projection = Callable[[Tensor, Norm], Tensor]  # values [B, Hkv, T, Dv] -> |v W_O[q]|, [B, Hkv, G, T] fp32


@dataclass(frozen=True)
class Observation:
    """One layer as seen at the end of prefill, or later. Batches are padded on the left; T counts padding.

    Queries and keys are rotated (RoPE) and normalised (q_norm, k_norm) as attention sees them. Columns are in the order
    of their positions.
    """

    keys: Tensor  # [B, Hkv, T, D]
    values: Tensor  # [B, Hkv, T, Dv]
    valid: Tensor  # [B, T] bool, False where padding
    scaling: float  # logits = scaling * q.k
    queries: Tensor | None = None  # [B, Hq, rows, D], the last rows seen
    softcap: float | None = None
    statistics: Mapping[int, QueryStatistics] = field(default_factory=dict)  # by the position they start from
    references: References | None = None
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # positions [N] -> cos, sin [N, rotary dims]
    next_position: Tensor | None = None  # [B] rotary position of the token that comes next; default: the lengths
    column_sums: Tensor | None = None  # [B, Hkv, T] fp32, attention received from all rows, mean over the query group
    projection: Projection | None = None
    rereads: Mapping[SecondPass, Tensor] = field(default_factory=dict)  # [B, Hkv, T] fp32 each
    hidden: Mapping[OfHidden, Tensor] = field(default_factory=dict)  # [B, Hkv, T] fp32 each
    token_index: Tensor | None = None  # [B, T] index of each entry among its sequence's tokens; default: none is gone
    token_count: Tensor | None = None  # [B] tokens each sequence has had, evicted ones counted; default: the lengths
    layer: int = 0
    sinks: Tensor | None = None  # [Hkv, G] fp32, or [B, 1, G] of one kv head each: logits that are no entry (gpt-oss)
    heads: Tensor | None = None  # [B] kv head of each row, where rows are of one head each; default: all, in order
    # what was noted of the prompt and of scores that policies gave, until the host looks at it; None: nothing is noted
    checks: list[DeferredCheck] | None = field(default_factory=list, compare=False, repr=False)
    _memo: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def lengths(self) -> Tensor:
        """Real entries per sequence, [B]."""
        return self.shared("lengths", lambda: self.valid.sum(-1))

    @property
    def index(self) -> Tensor:
        """Index of each entry among the tokens of its sequence, evicted ones counted, [B, T]; -1 where padding."""
        if self.token_index is not None:
            return self.token_index
        return self.shared("index", lambda: (self.valid.cumsum(-1) - 1).masked_fill(~self.valid, -1))

    @property
    def seen(self) -> Tensor:
        """Tokens each sequence has had so far, [B]."""
        count: Tensor = self.lengths if self.token_count is None else self.token_count
        return count

    @property
    def following(self) -> Tensor:
        """Rotary position of the token that comes next, [B]."""
        return self.seen if self.next_position is None else self.next_position

    def candidates(self, sinks: int, recent: int) -> Tensor:
        """Mark the real entries that are neither among the first `sinks` nor the last `recent`, [B, T] bool."""

        def mark() -> Tensor:
            return self.valid & (self.index >= sinks) & (self.index < (self.seen - recent)[:, None])

        return self.shared(("candidates", sinks, recent), mark)

    @property
    def last_queries(self) -> Tensor:
        """The last query rows, [B, Hq, rows, D]."""
        return assert_present(self.queries, "a policy asked for query rows but did not declare that it needs them")

    @property
    def group(self) -> int:
        """Query heads per kv head (of an observation with query rows)."""
        return self.last_queries.shape[1] // self.keys.shape[1]

    def sinks_of(self, heads: slice) -> Tensor | None:
        """Return the sinks of some kv heads beside rows of logits, [B or 1, heads, G, 1, 1]."""
        if self.sinks is None:
            return None
        sinks = self.sinks if self.sinks.dim() == 3 else self.sinks[None]
        return sinks[:, heads, :, None, None]

    def shared(self, key: Hashable, compute: Callable[[], Shared]) -> Shared:
        """Return what `compute` returns, computed once per observation however many policies ask for it by `key`."""
        # Policies of a plan share one observation: what one has computed is there for the next.
        if key not in self._memo:
            self._memo[key] = compute()
        value: Shared = self._memo[key]
        return value

    def value_norms(self, order: int) -> Tensor:
        """Return |v_i| of every entry, L1 or L2 by `order`, [B, Hkv, T] fp32."""
        norms: Tensor = self.shared(("value_norms", order), lambda: self.values.float().norm(p=order, dim=-1))
        return norms

    def projected_norms(self, order: Norm) -> Tensor:
        """Return |v_i W_O[q]| of every entry under every query head of its group, [B, Hkv, G, T] fp32."""
        undeclared = "a policy asked for projected value norms but did not declare that it needs them"
        project = assert_present(self.projection, undeclared)
        return self.shared(("projected_norms", order), lambda: project(self.values, order))

    def of_hidden(self, what: OfHidden) -> Tensor:
        """Return what `what` computes of the hidden states, [B, Hkv, T] fp32; UsageError where they are not seen."""
        if what not in self.hidden:
            raise UsageError("a policy wants hidden states (kvzap), which cannot be seen here: use another policy")
        return self.hidden[what]

    def reread(self, how: SecondPass) -> Tensor:
        """Return the scores of the prompt's second pass, [B, Hkv, T] fp32; UsageError where it was not read again."""
        if how not in self.rereads:
            raise UsageError(
                "a policy wants the prompt read again (kvzip), which cannot be done here: use `kvsearch generate`, "
                "`evaluate` or `calibrate`, or attach(model, plan).generate on token ids"
            )
        return self.rereads[how]

    def received(self) -> Tensor:
        """Return the attention each entry received from all queries so far, [B, Hkv, T] fp32, mean over the group."""
        undeclared = "a policy asked for attention column sums but did not declare that it needs them"
        return assert_present(self.column_sums, undeclared)


@dataclass(frozen=True, eq=False)  # else subclasses that are equal to none but themselves would all be equal
class Policy(ABC):
    """Base of all eviction policies.

    `sinks` and `window` are the protected entries: the first real tokens and the most recent ones of a sequence. Where
    `window` says how many queries are looked at, `protect` says how many recent entries are protected; by default as
    many, and then it is not stated in plans.

    While decoding, a policy that `has_decode_rule` reads one attention row per step (`row`) or none, and has its state
    (`start`, `step`); every other policy is scored anew every `refresh` steps over the last query rows.

    Examples:
        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> import torch
        >>> from kvsearch.policies import Observation, Policy, rank_under
        >>> @dataclass(frozen=True)
        ... class Longest(Policy):
        ...     name: ClassVar[str] = "longest"
        ...     source: ClassVar[str] = "an example"
        ...     sinks: int = 1
        ...
        ...     def score(self, observation):
        ...         return observation.value_norms(2)
        >>> values = torch.tensor([0.0, 3.0, 1.0, 2.0]).view(1, 1, 4, 1)
        >>> prompt = Observation(values, values, torch.ones(1, 4, dtype=torch.bool), scaling=1.0)
        >>> rank_under(Longest(), prompt)[0, 0].tolist()  # the sink first, then by score
        [0, 1, 3, 2]
    """

    name: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str] = ""  # the score of an entry, in a line
    weakness: ClassVar[str] = ""  # when it fails, in a line
    # of a class itself, its subclasses do not inherit them:
    is_baseline: ClassVar[bool] = False  # whether `run` compares its plans with this policy under even budgets
    is_rival: ClassVar[bool] = False  # whether fitted rankings are compared with it: it orders all entries of a prompt
    is_fitted: ClassVar[bool] = False  # whether its weights lie in a file: it is given as NAME=DIR

    # whether scores may be below 0: they have no shares and no entropy
    signed_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise UsageError for a parameter out of range: here the parameters that this class reads."""
        self._settle_protect()
        self._at_least(0, *(name for name in ("sinks", "window", "protect", "refresh") if hasattr(self, name)))

    @property
    def sink_count(self) -> int:
        return int(getattr(self, "sinks", 0))

    @property
    def recent_count(self) -> int:
        return int(getattr(self, "protect", self.observed))

    @property
    def observed(self) -> int:
        """How many of the last queries decide: `window`, 0 for a policy that has none."""
        return int(getattr(self, "window", 0))

    @property
    def protecting(self) -> list[str]:
        """The parameters that say how many entries are protected and are not 0, for messages."""
        # Where a policy has both, the window says how many queries are read, and `protect` what stays.
        names = ("sinks", "protect" if hasattr(self, "protect") else "window", "recent")
        return [name for name in names if getattr(self, name, 0)]

    def check_model(self, model: ModelFingerprint) -> None:  # noqa: B027 - most can be used on every model
        """Raise IncompatibleError if the policy cannot be used on the model of this fingerprint."""

    # --- the end of the prompt ------------------------------------------------------------------------------------

    def needs(self) -> Needs:
        """Return what must be in the observation besides keys, values and validity."""
        return Needs()

    @abstractmethod
    def score(self, observation: Observation) -> Tensor:
        """Return keep-priorities, [B, Hkv, T] fp32, higher is kept; padding and protected columns are ignored.

        All others must be finite.
        """

    def first_stage(self, observation: Observation) -> Tensor | None:  # noqa: ARG002
        """Return priorities [B, Hkv, T] that take `first_stage_budget` entries; `score` picks the others. None: all."""
        return None

    def first_stage_budget(self, budget: int) -> int:  # noqa: ARG002
        """Return how many entries of a head's budget the first stage takes, protected ones included.

        Must grow with the budget, by at most one per entry once it is below the budget.
        """
        return 0

    @property
    def least(self) -> int:
        """The fewest entries a kv head may have: those that are always kept (sinks and recent ones), at least one."""
        return max(1, self.sink_count + self.recent_count)

    def protected(self, length: int) -> int:
        """Return how many entries of a sequence of `length` tokens are protected."""
        return min(length, self.sink_count + self.recent_count)

    def keeps_all(self, budget: int, length: int) -> bool:  # noqa: ARG002
        """Return whether a head with `budget` is never evicted after a prompt of `length` tokens."""
        return False

    # --- decoding -------------------------------------------------------------------------------------------------

    @property
    def has_decode_rule(self) -> bool:
        """Whether the policy has a decode rule of its own, `step`; if not, it is scored anew now and then."""
        return type(self).step is not Policy.step

    def no_decode_rule(self) -> str | None:
        """Say why the policy cannot decide anything while decoding; None: it can."""
        needs = Needs() if self.has_decode_rule else self.needs()
        if not needs.column_sums and needs.reread is None:
            return None
        missing = "attention column sums" if needs.column_sums else "the prompt read again"
        return f"policy {self.name} needs {missing} and has no decode rule: use it in prefill"

    @property
    def signed(self) -> bool:
        """Whether priorities may be below 0 while decoding."""
        return self.signed_scores

    @property
    def row(self) -> AttentionRow | None:
        """The attention row of a decode step that `step` and `merge` read: mean over the query group, or the layer."""
        return None

    @property
    def merges(self) -> bool:
        """Whether entries that leave are folded into those that stay, by `merge`."""
        return False

    @property
    def merges_prompt(self) -> bool:
        """Whether the entries that leave at the end of the prompt are merged, too."""
        return self.merges

    @property
    def refresh_interval(self) -> int:
        """Decode steps between two scorings, for policies without a decode rule of their own."""
        return max(1, int(getattr(self, "refresh", 0)) or self.observed // 2)

    def recent_at(self, budget: int) -> int:  # noqa: ARG002
        """Return how many of the most recent entries are protected while decoding with `budget`."""
        return self.recent_count

    def drop_at(self, budget: int) -> int:  # noqa: ARG002
        """Return how many entries leave at once when a head with `budget` is over it."""
        return 1

    def protected_at(self, budget: int) -> tuple[int, int]:
        """Return the sinks and recent entries that fit a budget while decoding.

        The window shrinks first, down to one entry, then the sinks. A policy without a window protects sinks only.
        """
        # The newest token has its place before any sink has one.
        recent = self.recent_at(budget)
        sinks = min(self.sink_count, budget - (recent > 0))
        return sinks, min(recent, budget - sinks)

    @property
    def running(self) -> Running | None:
        """The kernel rule that equals `step`: positions, attention received, scores on arrival, or the attention row.

        Attention received and scores are all that the running state has of entries; a score on arrival is that of
        `arriving`. "row" is the step's own row as it is. "persistence" is Scissorhands', "pooled" CAKE's.
        """
        return None

    @property
    def running_constants(self) -> dict[str, int | str]:
        """What the kernel of `running` is compiled for."""
        return {}

    def arriving(self, step: Step) -> Tensor:  # noqa: ARG002
        """Return the scores of the tokens of `step.arrived`, [S, K] fp32, where scores are made as entries arrive.

        They depend on the token and what holds for all of a sequence alone: K tokens that are protected are scored at
        once, except where hidden states are read.
        """
        raise InternalError(f"policy {self.name} makes no scores of entries that arrive")

    def start(self, observation: Observation) -> State:  # noqa: ARG002
        """Return the running state at the end of the prompt: per entry [B, Hkv, T, ...] and per head [B, Hkv, ...]."""
        return State()

    def step(self, step: Step) -> Tensor:  # noqa: ARG002
        """Update `step.cached.state` in place; keep-priority of every entry, [S, C] fp32, the lowest leaves first."""
        raise InternalError(f"policy {self.name} has no decode rule of its own")

    def merge(self, cached: Cached, leaving: Tensor) -> None:  # noqa: ARG002
        """Fold the entries in slots `leaving` [S, E] (-1: none; ascending positions) into those that stay, in place."""
        raise InternalError(f"policy {self.name} does not merge")

    # --- hyper-parameters -----------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, int | float | bool | str]:
        """Return the hyper-parameters by name, as a plan stores them."""
        # A `protect` that is the default is left out, so that both ways to say so give equal plans.
        stated = dataclasses.asdict(self)
        if "protect" in stated and "window" in stated and stated["protect"] == self.observed:
            del stated["protect"]
        return stated

    @property
    def spec(self) -> PolicySpec:
        """The policy as a plan states it; `policy_of` makes a policy of it again."""
        return PolicySpec(name=self.name, params=self.parameters())

    def _settle_protect(self) -> None:
        """Replace a `protect` of `AS_WINDOW` by the window's size, so that both ways to say so make equal policies."""
        if getattr(self, "protect", None) == AS_WINDOW:
            # The dataclass is frozen, and -1 must not reach a plan.
            object.__setattr__(self, "protect", self.observed)

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise UsageError(f"policy {self.name}: {problem}")

    def _at_least(self, minimum: int, *names: str) -> None:
        for name in names:
            self._require(
                getattr(self, name) >= minimum, f"{name} must be {minimum} or more, got {getattr(self, name)}"
            )

    def _one_of(self, name: str, *known: str) -> None:
        given = getattr(self, name)
        self._require(given in known, f"{name} is {', '.join(known[:-1])} or {known[-1]}, got {given!r}")
