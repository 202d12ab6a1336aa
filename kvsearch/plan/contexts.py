"""Which contexts a plan or profile was fitted, chosen and reported on: a score on those says little about others.

A context is known by the SHA-256 of its text (`context_hash`), whatever is asked about it: budgets are fitted to what
a context holds, so another question about it is no fresh one. Where all examples of a task share one context, such as
the worked examples before a problem, it says nothing about them, and the text with its question is what counts.

Files hold a bounded part of that. Up to `EXACT` contexts are listed, by `DIGITS` hexadecimal digits each (64 bits: two
of a million contexts agree in them with a chance of 3e-8). More are in a Bloom filter (Bloom 1970) of `BITS` bits,
which says "not in the set" of a context in it never, and "in the set" of another one with the probability that the
file states: 1% at 6,800 contexts. Either way every job that added to a set is there with the root of a Merkle tree over
its hashes; all of these are in the directory of the job's run, see `kvsearch.runs.contexts`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from kvsearch.plan.fields import Count, Index, Record, Sha256, Text, refuse

EXACT, DIGITS = 256, 16
BITS, HASHES = 2**16, 7

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


class Sketch(Record):
    """A Bloom filter in base 64; `false_positives` is how likely it takes another context for one of its own."""

    filter: Text
    false_positives: float = Field(ge=0, le=1, allow_inf_nan=False)

    @field_validator("filter")
    @classmethod
    def _whole(cls, text: str) -> str:
        try:
            size = len(base64.b64decode(text, validate=True))
        except binascii.Error:
            size = -1
        if size != BITS // 8:
            refuse([((), f"is no filter of {BITS} bits in base 64: restore the file")])
        return text

    @classmethod
    def of(cls, bits: bytes) -> Sketch:
        """Return the sketch with these bits, [BITS / 8] bytes."""
        filled = int.from_bytes(bits, "big").bit_count() / BITS
        return cls(filter=base64.b64encode(bits).decode(), false_positives=float(f"{filled**HASHES:.3g}"))

    @property
    def bits(self) -> bytes:
        """The filter, [BITS / 8] bytes."""
        return base64.b64decode(self.filter)


class ContextSet(Record):
    """A set of contexts: those of `jobs` together, as `ids` or, where they are more than `EXACT`, as a sketch.

    Raises:
        ValidationError: ids that are not ascending, or a set that is not what its jobs say.
    """

    jobs: tuple[Asked, ...] = ()
    ids: tuple[ContextId, ...] | None = None
    sketch: Sketch | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ContextSet:
        ids = self.ids or ()
        if ids and self.sketch is not None:
            refuse([(("sketch",), "is in place of ids: give one of them")])
        if sorted(set(ids)) != list(ids):
            refuse([(("ids",), "must be ascending, each once")])
        if self.sketch is None and (len(ids) > self.contexts or bool(ids) != bool(self.jobs)):
            refuse([(("ids",), f"has {len(ids)} contexts, the jobs asked {self.contexts}")])
        return self

    @classmethod
    def of(cls, hashes: Iterable[str], questions: int) -> ContextSet:
        """Return the contexts of one job, by their hashes, about which it asked so many questions."""
        found = sorted(set(hashes))
        if not found:
            return cls()
        asked = Asked(root=merkle_root(found), contexts=len(found), questions=questions)
        return _set((asked,), [one[:DIGITS] for one in found], None)

    @property
    def contexts(self) -> int:
        """How many different contexts the jobs asked, each for itself: an upper bound where several shared some."""
        return sum(one.contexts for one in self.jobs)

    @property
    def questions(self) -> int:
        """How many questions the jobs asked."""
        return sum(one.questions for one in self.jobs)

    def has(self, found: str) -> bool:
        """Tell whether the context of a hash is in the set; a sketch may say so of one that is not."""
        short = found[:DIGITS]
        if self.sketch is None:
            return short in (self.ids or ())
        bits = self.sketch.bits
        return all(bits[at // 8] >> at % 8 & 1 for at in _places(short))

    def union(self, other: ContextSet) -> ContextSet:
        """Return the contexts of both; equal jobs count once, those with other questions each."""
        jobs = tuple(dict.fromkeys((*self.jobs, *other.jobs)))
        listed = [one for part in (self, other) for one in part.ids or ()]
        sketches = [part.sketch.bits for part in (self, other) if part.sketch is not None]
        bits = bytes(one[0] | one[-1] for one in zip(*sketches, strict=True)) if sketches else None
        return _set(jobs, listed, bits)


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


def _set(jobs: tuple[Asked, ...], ids: Iterable[str], bits: bytes | None) -> ContextSet:
    """Return the set of `ids` and of what is in the filter `bits`."""
    listed = sorted(set(ids))
    if bits is None and len(listed) <= EXACT:
        return ContextSet(jobs=jobs, ids=tuple(listed) or None)
    filled = bytearray(bits or bytes(BITS // 8))
    for one in listed:
        for at in _places(one):
            filled[at // 8] |= 1 << at % 8
    return ContextSet(jobs=jobs, sketch=Sketch.of(bytes(filled)))


def _places(short: str) -> Iterator[int]:
    """Yield the bits of a context: the hashes of a Bloom filter made of two (Kirsch and Mitzenmacher 2006)."""
    first, step = int(short[:8], 16), int(short[8:], 16) | 1
    return ((first + number * step) % BITS for number in range(HASHES))
