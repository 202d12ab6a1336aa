"""A command stopped by a fault and given again: what it left then, compared byte for byte."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsearch.core.files import TEMPORARY
from tests.robustness.crash.faults import KILLED, Faults, Kind, can_be
from tests.robustness.inputs import laid_out
from tests.robustness.operations import FREES
from tests.robustness.processes import Ended, Tree, run_in, start, tree_of
from tests.robustness.writers import Writer

FAULT = 3  # the exit code of a machine at fault
Point = tuple[Kind, int]


@dataclass(frozen=True)
class Undisturbed:
    """A command that has a folder below `place` to itself, how it ends there, and what it leaves."""

    writer: Writer
    made: Path
    place: Path
    ended: Ended
    wanted: Tree

    @classmethod
    def of(cls, writer: Writer, made: Path, place: Path) -> Undisturbed:
        """Run it; RuntimeError if it fails."""
        folder = laid_out(writer, made, place / "reference")
        ended = run_in(folder, writer.words(writer.one))
        if ended.code:
            raise RuntimeError(f"{writer.words(writer.one)} fails by itself with {ended.code}: {ended.talk}")
        return cls(writer, made, place, ended, tree_of(folder))

    def points(self, kinds: Sequence[Kind], every: int = 1) -> Iterator[Point]:
        """Yield the faults there can be: each operation in every way, each forward pass without memory."""
        for kind in kinds:
            names = [""] * self.ended.passes if kind == "memory" else self.ended.operations
            yield from [(kind, at) for at, name in enumerate(names, 1) if can_be(name, kind)][::every]

    def problem(self, point: Point) -> str | None:
        """Return what is wrong after a fault and after the command was given again; None if nothing is."""
        kind, at = point
        folder = self.place / f"{kind[0]}{at:08}"  # as long as the name of the reference, as paths are part of files
        try:
            return self._problem_in(laid_out(self.writer, self.made, folder), kind, at)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def told(self, point: Point) -> str:
        """Return what a point is."""
        kind, at = point
        return f"{kind} at {at}, {'a pass' if kind == 'memory' else self.ended.operations[at - 1]}"

    def _problem_in(self, folder: Path, kind: Kind, at: int) -> str | None:
        words, before = self.writer.words(self.writer.one), tree_of(folder)
        stopped = start(Faults(folder, kind=kind, at=at), words).end()
        after = tree_of(folder)
        is_other = stopped.code == 0 and kind == "memory"  # it went on with smaller batches, which decide last bits
        if problem := _badly_stopped(stopped, kind) or self._lost(before, after, is_other):
            return problem
        stays = kind != "memory" and self.ended.operations[at - 1] in (*FREES, "flock")  # until it is given again
        if kind != "kill" and not stays and (left := _temporary(after)):
            return f"ends, and leaves {left}"
        if after == self.wanted or is_other:
            return None
        ended = run_in(folder, [*words, *(self.writer.again or "").split()])
        if ended.code:
            return f"given again it ends with {ended.code}: {ended.last}"
        return self._difference(tree_of(folder))

    def _lost(self, before: Tree, after: Tree, is_other: bool) -> str | None:
        """Return which inputs are not as they were, or, of those that are replaced, neither that nor as wanted.

        `is_other`: what replaces them may be something else.
        """
        anew = tuple(place for place in self.writer.replaces if place.endswith("/"))
        lost = []
        replaced = set(self.writer.replaces)
        for name in before.keys() - replaced if is_other else before.keys() | replaced:
            allowed = [before.get(name), *([self.wanted.get(name)] if name in self.writer.replaces else [])]
            if after.get(name) not in allowed and not name.startswith(anew):
                lost.append(name)
        return f"lost or changed {sorted(lost)}" if lost else None

    def _difference(self, found: Tree) -> str | None:
        if left := _temporary(found):
            return f"leaves {left} for good"
        other = sorted(name for name in found.keys() | self.wanted if found.get(name) != self.wanted.get(name))
        return f"given again it writes something else: {other}" if other else None


def _temporary(tree: Tree) -> list[str]:
    return [name for name in tree if TEMPORARY in name]


def _badly_stopped(ended: Ended, kind: Kind) -> str | None:
    """Return what is wrong with how a command ended that ran into a fault: one line and exit code 3 are right."""
    errors = [line for line in ended.talk.splitlines() if line.startswith("kvsearch: error")]
    if (ended.code == 0 and not errors) or (kind == "kill" and ended.code == KILLED):
        return None
    if ended.code == FAULT and len(errors) == 1 and "Traceback" not in ended.talk and kind != "short":
        return None
    return f"ends with {ended.code}: {ended.last}"
