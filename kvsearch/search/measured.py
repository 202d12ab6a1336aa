"""Which candidates a ledger knows: in which line each was measured. What became of it is read again from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvsearch.search.jobs import Result
from kvsearch.search.records import ComputedLine

KEY = 16  # bytes of a SHA-256 that tell candidates apart


class Measured:
    """The numbers of the lines in which candidates were measured; `read` returns such a line.

    A failure stands once the optimiser was told it. Until then it may be that of a machine since repaired, and is left
    out, so that the candidate is evaluated again.
    """

    def __init__(self, read: Callable[[int], ComputedLine]) -> None:
        self._read = read
        self._lines: dict[bytes, int] = {}
        self._failed: dict[bytes, int] = {}  # not told yet
        self._told: dict[bytes, int] = {}  # failures that stand, and the lines that they were told in
        self._recent: dict[int, ComputedLine] = {}  # since the last generation was told

    @property
    def count(self) -> int:
        """How many different candidates were measured, failures among them."""
        return len(self._lines) + sum(key not in self._lines for key in self._failed)

    def take(self, number: int, line: ComputedLine) -> None:
        """Take in a line, with its number."""
        self._recent[number] = line
        for key, result in line.results.items():
            self._failed.pop(_short(key), None)
            (self._lines if result.kind == "ok" else self._failed)[_short(key)] = number

    def tell(self, number: int) -> None:
        """Hear that a generation was told in a line of that number."""
        self._lines |= self._failed
        self._told |= dict.fromkeys(self._failed, number)
        self._failed.clear()
        self._recent.clear()

    def before(self, number: int) -> Mapping[str, Result]:
        """Return what became of candidates, by `candidate_key`, as it stood before the line of that number."""
        return _Before(self, number)

    def line_of(self, key: bytes, before: int) -> int | None:
        """Return the number of the line in which a candidate was measured, if what it says stood before another."""
        number = self._lines.get(key)
        return None if number is None or self._told.get(key, number) >= before else number

    def line(self, number: int) -> ComputedLine:
        """Return a line in which candidates were measured."""
        return self._recent.get(number) or self._read(number)

    def numbers(self, before: int) -> Iterator[int]:
        """Yield the numbers of lines in which candidates were measured, as what they say came to stand."""
        found = (self.line_of(key, before) for key in self._lines)
        yield from dict.fromkeys(number for number in found if number is not None)


class _Before(Mapping[str, Result]):
    def __init__(self, measured: Measured, number: int) -> None:
        self._measured, self._number = measured, number

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._measured.line_of(_short(key), self._number) is not None

    def __getitem__(self, key: str) -> Result:
        number = self._measured.line_of(_short(key), self._number)
        if number is None:
            raise KeyError(key)
        return self._measured.line(number).results[key]

    def __iter__(self) -> Iterator[str]:
        for number in self._measured.numbers(self._number):
            keys = self._measured.line(number).keys
            yield from (key for key in keys if self._measured.line_of(_short(key), self._number) == number)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _short(key: str) -> bytes:
    return bytes.fromhex(key)[:KEY]
