"""Where a file came from: versions, seed, data and settings; never a time, so that equal inputs give equal files."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from kvsearch.core.fields import Count, Index, Record, SettingField, Sha256, Text, is_none, refuse
from kvsearch.core.limits import MOST_SETTINGS
from kvsearch.core.resources import version

DIGITS = 16
Use = Literal["fitted", "chosen", "reported"]
USES: tuple[Use, ...] = get_args(Use)
ContextId = Annotated[str, Field(strict=True, pattern=f"^[0-9a-f]{{{DIGITS}}}$")]


def context_hash(text: str, question: str | None = None) -> str:
    """Return the SHA-256 that a context is known by, or a context with its question; white space is all alike."""
    parts = [text] if question is None else [text, question]
    return hashlib.sha256("\0".join(" ".join(part.split()) for part in parts).encode("utf-8", "replace")).hexdigest()


def merkle_root(hashes: Iterable[str]) -> str:
    """Return the root of the Merkle tree over different hashes in ascending order; there is at least one.

    Leaves and inner nodes are hashed with another first byte, and the last of an odd number goes up as it is
    (RFC 6962, section 2.1).
    """
    nodes = [hashlib.sha256(b"\0" + bytes.fromhex(one)).digest() for one in sorted(set(hashes))]
    while len(nodes) > 1:
        pairs = (nodes[at : at + 2] for at in range(0, len(nodes), 2))
        nodes = [hashlib.sha256(b"\1" + b"".join(pair)).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return nodes[0].hex()


class Asked(Record):
    """What one job asked: different contexts, questions about them, and the Merkle root of the contexts' hashes."""

    root: Sha256
    contexts: Count
    questions: Index


class ContextSet(Record):
    """A set of contexts: the `ids` of those of `jobs` together, None where there are none.

    Raises:
        ValidationError: ids that are not ascending, or a set that is not what its jobs say.
    """

    jobs: tuple[Asked, ...] = ()
    ids: tuple[ContextId, ...] | None = None
    sketch: None = None  # a key that files have, without meaning

    @model_validator(mode="after")
    def _agrees(self) -> ContextSet:
        ids = self.ids or ()
        if sorted(set(ids)) != list(ids):
            refuse([(("ids",), "must be ascending, each once")])
        if len(ids) > self.contexts or bool(ids) != bool(self.jobs):
            refuse([(("ids",), f"has {len(ids)} contexts, the jobs asked {self.contexts}")])
        return self

    @classmethod
    def of(cls, hashes: Iterable[str], questions: int) -> ContextSet:
        """Return the contexts of one job, by their hashes, about which it asked so many questions."""
        found = sorted(set(hashes))
        if not found:
            return cls()
        asked = Asked(root=merkle_root(found), contexts=len(found), questions=questions)
        return cls(jobs=(asked,), ids=tuple(sorted({one[:DIGITS] for one in found})))

    @property
    def contexts(self) -> int:
        """How many different contexts the jobs asked, each for itself: an upper bound where several shared some."""
        return sum(one.contexts for one in self.jobs)

    @property
    def questions(self) -> int:
        """How many questions the jobs asked."""
        return sum(one.questions for one in self.jobs)

    def has(self, found: str) -> bool:
        """Return True if the context of a hash is in the set, as far as it lists its contexts."""
        ids = self.ids or ()
        place = bisect_left(ids, found[:DIGITS])
        return ids[place : place + 1] == (found[:DIGITS],)

    def union(self, other: ContextSet) -> ContextSet:
        """Return the contexts of both; equal jobs count once, those with other questions each."""
        ids = sorted({*(self.ids or ()), *(other.ids or ())})
        return ContextSet(jobs=tuple(dict.fromkeys((*self.jobs, *other.jobs))), ids=tuple(ids) or None)


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


def joined(records: Iterable[ContextRecord | None]) -> ContextRecord | None:
    """Return the record of what is made of several plans or profiles; None where none of them has one."""
    found = list(records)
    known = [one for one in found if one is not None]
    if not known:
        return None
    whole = known[0]
    for one in known[1:]:
        whole = whole.with_more(**{use: getattr(one, use) for use in USES})
    return whole.model_copy(update={"complete": all(one is not None and one.complete for one in found)})


CHANGES = "changes"


class Provenance(Record):
    """How a file came about, without a time stamp: equal inputs give equal bytes.

    `kvsearch`, `torch` and `transformers` are version numbers; `settings` are those of the calibration or search,
    scalars or lists of scalars. `contexts` is what it was fitted, chosen and reported on; None: that is not known, as
    of what was written by hand or by an older version.
    """

    method: Text
    seed: Index
    kvsearch: Text
    torch: Text
    transformers: Text
    data_sha256: Sha256 | None = None
    settings: dict[Text, SettingField] = Field(default_factory=dict, max_length=MOST_SETTINGS)
    contexts: ContextRecord | None = Field(default=None, exclude_if=is_none)


def provenance(
    method: str, seed: int, data_sha256: str | None, settings: Mapping[str, Any], contexts: ContextRecord | None
) -> Provenance:
    """Return the provenance of something made now, by this installation."""
    return Provenance(
        method=method,
        seed=seed,
        kvsearch=version("kvsearch"),
        torch=version("torch"),
        transformers=version("transformers"),
        data_sha256=data_sha256,
        settings=dict(settings),
        contexts=contexts,
    )


def changed(provenance: Provenance, change: str) -> Provenance:
    """Add a line on what was done to `settings["changes"]`, the oldest first."""
    before = provenance.settings.get(CHANGES, ())
    changes = (*before, change) if isinstance(before, tuple) else (before, change)
    return Provenance(**{**dict(provenance), "settings": {**provenance.settings, CHANGES: changes}})
