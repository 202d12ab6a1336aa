"""Where a file came from: versions, seed, data and settings; never a time, so that equal inputs give equal files."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from kvsearch.core.fields import Count, Index, Record, SettingField, Sha256, Text, is_none, require_ascending
from kvsearch.core.resources import read_version

HASH_DIGITS = 16
Use = Literal["fitted", "chosen", "reported"]
USES: tuple[Use, ...] = get_args(Use)
ContextId = Annotated[str, Field(strict=True, pattern=f"^[0-9a-f]{{{HASH_DIGITS}}}$")]


def hash_context(text: str, question: str | None = None) -> str:
    """Hash a context, or a context with its question, with SHA-256; all white space counts as equal."""
    parts = [text] if question is None else [text, question]
    return hashlib.sha256("\0".join(" ".join(part.split()) for part in parts).encode("utf-8", "replace")).hexdigest()


class ContextSet(Record):
    """A set of contexts, by the first digits of their hashes.

    Raises:
        ValidationError: ids that are not ascending.
    """

    ids: Annotated[tuple[ContextId, ...], AfterValidator(require_ascending)] = ()

    @classmethod
    def of(cls, hashes: Iterable[str]) -> ContextSet:
        """Return the contexts of these hashes."""
        return cls(ids=tuple(sorted({digest[:HASH_DIGITS] for digest in hashes})))

    def has(self, digest: str) -> bool:
        """Return True if the context of a hash is in the set."""
        place = bisect_left(self.ids, digest[:HASH_DIGITS])
        return self.ids[place : place + 1] == (digest[:HASH_DIGITS],)

    def union(self, other: ContextSet) -> ContextSet:
        """Return the contexts of both."""
        return ContextSet.of((*self.ids, *other.ids))


class ContextRecord(Record):
    """What a plan or profile was fitted on, chosen on and reported on.

    `complete` is off where something that it was made of has no record, such as a plan written by hand.
    """

    fitted: ContextSet = ContextSet()
    chosen: ContextSet = ContextSet()
    reported: ContextSet = ContextSet()
    complete: bool = True

    @property
    def used(self) -> ContextSet:
        """What it was fitted or chosen on."""
        return self.fitted.union(self.chosen)

    def with_more(self, **more: ContextSet) -> ContextRecord:
        """Return the record with more contexts in the sets of these names."""
        return self.model_copy(update={use: getattr(self, use).union(added) for use, added in more.items()})


def join_records(records: Iterable[ContextRecord | None]) -> ContextRecord | None:
    """Join the records of several plans or profiles to one; None if no record exists."""
    records_given = list(records)
    known = [record for record in records_given if record is not None]
    if not known:
        return None
    whole = ContextRecord(complete=len(known) == len(records_given) and all(record.complete for record in known))
    for record in known:
        whole = whole.with_more(**{use: getattr(record, use) for use in USES})
    return whole


ShareField = Annotated[float, Field(strict=True, ge=0, le=1)]


class Guarantee(Record):
    """What a plan was shown to lose at most, whatever the distribution of losses, see `kvsearch.evaluation.guarantee`.

    With probability `confidence` the mean loss to the full cache is at most `loss`, on contexts such as the `contexts`
    that it was shown on, which nothing was fitted or chosen by: `tasks` counts them by task, `mean_loss` is what was
    lost there. Losses are in [0, 1]. `evicted_mass` is the least and the most that these contexts had of the
    attention at their end on what left them, see `PlanCache.evicted_mass`. `plan_sha256` is the content of the plan
    without its provenance: of a plan that was changed since nothing is known.
    """

    loss: Annotated[float, Field(strict=True, gt=0, le=1)]
    confidence: Annotated[float, Field(strict=True, ge=0.5, lt=1)]
    contexts: Count
    mean_loss: ShareField
    tasks: dict[Text, Count]
    protocol: Text
    evicted_mass: tuple[ShareField, ShareField] | None = Field(default=None, exclude_if=is_none)
    plan_sha256: Sha256


CHANGES = "changes"


class Provenance(Record):
    """How a file came about, without a time stamp: equal inputs give equal bytes.

    `kvsearch`, `torch` and `transformers` are version numbers; `settings` were set for the calibration or search,
    scalars or lists of scalars. `contexts` is what it was fitted, chosen and reported on; None: that is not known, as
    of what was written by hand or by an older version. `guarantee` is what a plan was shown to lose at most; see
    `Plan.guarantee`.
    """

    method: Text
    seed: Index
    kvsearch: Text
    torch: Text
    transformers: Text
    data_sha256: Sha256 | None = None
    settings: dict[Text, SettingField] = Field(default_factory=dict)
    contexts: ContextRecord | None = Field(default=None, exclude_if=is_none)
    guarantee: Guarantee | None = Field(default=None, exclude_if=is_none)


def make_provenance(
    method: str, seed: int, data_sha256: str | None, settings: Mapping[str, Any], contexts: ContextRecord | None
) -> Provenance:
    """Return the provenance of something made now, by this installation."""
    return Provenance(
        method=method,
        seed=seed,
        kvsearch=read_version("kvsearch"),
        torch=read_version("torch"),
        transformers=read_version("transformers"),
        data_sha256=data_sha256,
        settings=dict(settings),
        contexts=contexts,
    )


def record_change(provenance: Provenance, change: str) -> Provenance:
    """Add a line on what was done to `settings["changes"]`, the oldest first; a guarantee is not of what is made."""
    before = provenance.settings.get(CHANGES, ())
    changes = (*before, change) if isinstance(before, tuple) else (before, change)
    settings = {**provenance.settings, CHANGES: changes}
    return Provenance(**{**dict(provenance), "settings": settings, "guarantee": None})
