"""Formats: how a valid file of each is changed, by chance alone, into one that may not be valid.

A third of all changes is to bytes, words or lines, whatever they mean. The others are to what the file says, put back
into the format: sizes, digests and checksums fit again, so that what lies behind these checks is reached.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, ClassVar, Protocol

import numpy as np
import yaml

from tests.robustness.mutations import YAML_WORDS, mutated_bytes, mutated_lines, mutated_tree, mutated_words
from tests.robustness.trees import Object, dump, parse

RAW = 0.35  # the share of changes that know nothing of the format
METADATA = "__metadata__"
_SEAL = re.compile(rb'(, )?"line": \d+, "checksum": "[0-9a-f]{16}"\}$')


class Form(Protocol):
    """A format of files."""

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """Return another file."""
        ...


@dataclass(frozen=True)
class Text:
    """Plain text; `words` are such as the format of the text gives a meaning to."""

    words: tuple[str, ...] = ()

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """See `Form`."""
        return rng.choice((mutated_bytes, mutated_lines, lambda *given: mutated_words(*given, self.words)))(data, rng)


@dataclass(frozen=True)
class Json:
    """JSON."""

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """See `Form`."""
        return Text().mutated(data, rng) if rng.random() < RAW else changed_json(data, rng)


@dataclass(frozen=True)
class Yaml:
    """YAML, of which JSON is a part."""

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """See `Form`."""
        if rng.random() < 0.6:
            return Text(YAML_WORDS).mutated(data, rng)
        return changed_json(_yaml_as_json(data), rng)


@dataclass(frozen=True)
class JsonLines:
    """A JSON text per line."""

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """See `Form`."""
        return Text().mutated(data, rng) if rng.random() < RAW else changed_lines(data, rng)


@dataclass(frozen=True)
class Ledger:
    """Lines of JSON that have numbers and checksums with the `identity` of the run."""

    identity: Callable[[], str]

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """See `Form`; lines that were changed get new checksums, most often."""
        if rng.random() < 0.15:
            return Text().mutated(data, rng)
        plain = b"\n".join(_SEAL.sub(b"}", line) for line in data.split(b"\n"))
        found = Text().mutated(plain, rng) if rng.random() < RAW else changed_lines(plain, rng)
        return self._sealed(found)

    def _sealed(self, data: bytes) -> bytes:
        """Seal lines as `kvsearch.runs.ledger` does, whatever is in them."""
        identity = self.identity().encode()
        lines = list[bytes]()
        *full, last = data.split(b"\n")
        for number, line in enumerate(full, 1):
            body = line[:-1] + (b", " if line != b"{}" else b"") + f'"line": {number}'.encode()
            checksum = hashlib.sha256(identity + body).hexdigest()[:16]
            lines.append(body + f', "checksum": "{checksum}"}}'.encode())
        return b"\n".join([*lines, last])


@dataclass(frozen=True)
class Safetensors:
    """Arrays with a header; `nested` is the text in it that is JSON, `sealed` puts digests right."""

    nested: str | None = "kvsearch"
    sealed: Callable[[bytes], bytes] = bytes
    dtypes: ClassVar = tuple("F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL U16 U32 U64 F8_E4M3 F8_E5M2".split())

    def mutated(self, data: bytes, rng: Random) -> bytes:
        """See `Form`."""
        kind = rng.random()
        if kind < 0.25:
            return mutated_bytes(data, rng)
        about, header, arrays = pickle.loads(_split(data, self.nested))
        if kind < 0.5 and about is not None:
            about = several(about, rng)
        elif kind < 0.65:
            header = several(header, rng)
        elif kind < 0.8:
            _change_shape(header, rng)
        else:
            arrays = _changed_numbers(arrays, header, rng)
        found = _joined(about, header, arrays, self.nested)
        return found if rng.random() < 0.1 else self.sealed(found)


def several(tree: Any, rng: Random) -> Any:
    """Change a tree once, twice or three times, most often once."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        tree = mutated_tree(tree, rng)
    return tree


def changed_json(data: bytes, rng: Random) -> bytes:
    """Change what JSON says."""
    text = dump(several(pickle.loads(_tree(data)), rng))
    if rng.random() < 0.1:  # as other programs write it: no escapes
        text = re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)
    return text.encode("utf-8", "surrogatepass")


def changed_lines(data: bytes, rng: Random) -> bytes:
    """Change what one or two lines say that are JSON."""
    lines = data.split(b"\n")
    full = [number for number, line in enumerate(lines) if line]
    for _ in range(rng.choice((1, 1, 2))):
        number = rng.choice(full)
        lines[number] = changed_json(lines[number], rng) if _is_json(lines[number]) else lines[number]
    return b"\n".join(lines)


@lru_cache(maxsize=256)
def _tree(data: bytes) -> bytes:
    return pickle.dumps(parse(data))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


@lru_cache(maxsize=256)
def _yaml_as_json(data: bytes) -> bytes:
    return json.dumps(yaml.safe_load(data)).encode()


@lru_cache(maxsize=256)
def _split(data: bytes, nested: str | None) -> bytes:
    """Return what is nested (None: nothing), the header, and the bytes of the arrays, pickled."""
    size = int.from_bytes(data[:8], "little")
    header = parse(data[8 : 8 + size])
    about = None
    for key, value in header:
        if key == METADATA:
            for pair in value:
                if pair[0] == nested:
                    about, pair[1] = parse(pair[1]), None
    return pickle.dumps((about, header, data[8 + size :]))


def _joined(about: Any, header: Any, arrays: bytes, nested: str | None) -> bytes:
    if about is not None and isinstance(header, Object):
        for key, value in header:
            if key == METADATA and isinstance(value, Object):
                for pair in value:
                    if pair[0] == nested and pair[1] is None:
                        pair[1] = dump(about).encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    text = dump(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + arrays


def _entries(header: Any) -> list[Object]:
    return [value for key, value in header if key != METADATA]


def _field(entry: Object, name: str) -> list[Any]:
    return next(pair for pair in entry if pair[0] == name)


def _change_shape(header: Any, rng: Random) -> None:
    """Give an array another shape or type of the same size, or the place of another one."""
    entries = _entries(header)
    if not entries:
        return
    entry, other = rng.choice(entries), rng.choice(entries)
    shape = _field(entry, "shape")
    count = int(np.prod(shape[1]))
    kind = rng.randrange(5)
    if kind == 0:
        shape[1] = rng.choice(
            (
                [count],
                [1, *shape[1]],
                [*shape[1], 1],
                shape[1][::-1],
                [1] * 70 + shape[1],
                [count, 1, 1, 1, 1],
                [1] * 3_000 + [count],
            )
        )
    elif kind == 1:
        _field(entry, "dtype")[1] = rng.choice(Safetensors.dtypes)
    elif kind == 2:
        entry[:], other[:] = pickle.loads(pickle.dumps(list(other))), pickle.loads(pickle.dumps(list(entry)))
    elif kind == 3:  # nothing in it
        shape[1] = rng.choice(([0], [0, 2**40], [2**62, 4], [2**31, 2**31, 4], [0] * 3, [0, *shape[1]]))
        begin = _field(entry, "data_offsets")[1][0]
        _field(entry, "data_offsets")[1] = [begin, begin]
    elif count % 2 == 0:  # twice as many of half the size
        halves = {"F64": "F32", "F32": "F16", "I64": "I32", "I32": "I16"}
        dtype = _field(entry, "dtype")
        if dtype[1] in halves:
            dtype[1], shape[1] = halves[dtype[1]], [*shape[1][:-1], shape[1][-1] * 2] if shape[1] else [2]


_NUMBERS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i"}
_HOSTILE = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, -0.0, 2.0, 0.5, 1e30, -1e30, 1e300, 5e-324, 1e-30)
_WHOLE = (-1, 0, 1, 2, 7, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63))


def _changed_numbers(arrays: bytes, header: Any, rng: Random) -> bytes:
    """Put other numbers into an array: into one item, a run of them, or all."""
    entries = [entry for entry in _entries(header) if _field(entry, "dtype")[1] in _NUMBERS]
    if not entries:
        return mutated_bytes(arrays, rng)
    entry = rng.choice(entries)
    form = _NUMBERS[_field(entry, "dtype")[1]]
    begin, end = _field(entry, "data_offsets")[1]
    size = struct.calcsize(form)
    count = (end - begin) // size
    if not count:
        return arrays
    first = rng.randrange(count)
    length = rng.choice((1, 1, 1, 4, count))
    first, length = (0, count) if length == count else (first, min(length, count - first))
    if form in ("<d", "<f"):
        value: Any = rng.choice(_HOSTILE)
        value = max(min(value, 3e38), -3e38) if form == "<f" and abs(value) < np.inf else value
    else:
        value = rng.choice([one for one in _WHOLE if -(2 ** (8 * size - 1)) <= one < 2 ** (8 * size - 1)])
    place = begin + first * size
    return arrays[:place] + struct.pack(form, value) * length + arrays[place + length * size :]


def sealed_cache(data: bytes) -> bytes:
    """Put the SHA-256 of the whole into a cache file, as `kvsearch.runtime.store.tensor_file` does."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    there = re.search(rb'"sha256": ?"[^"]*"', header)
    if there is None:
        return data

    def signed(digest: str) -> bytes:
        return header[: there.start()] + f'"sha256":"{digest}"'.encode() + header[there.end() :]

    whole = hashlib.sha256(signed("0" * 64))
    whole.update(data[8 + size :])
    found = signed(whole.hexdigest())
    return len(found).to_bytes(8, "little") + found + data[8 + size :]
