"""A command stopped by a fault in the layer of files or in a forward pass, and given again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kvsearch.core.files import TEMPORARY
from tests.robustness.inputs import laid_out
from tests.robustness.operations import FREES, Watch
from tests.robustness.processes import Ended, Tree, run_in, start, tree_of
from tests.robustness.writers import Writer

Kind = Literal["kill", "ENOSPC", "EIO", "full", "short", "memory"]
KINDS: tuple[Kind, ...] = ("kill", "ENOSPC", "EIO", "full", "short", "memory")
KILLED = 137


@dataclass
class Faults(Watch):
    """Makes the operation with the number `at` a fault; 0 is none.

    "kill" ends the process there; ENOSPC and EIO are errors of that operation alone, "full" is a disk that has no room
    from there on, but still removes files; a write that fails has written half of its bytes. "short" writes half
    without an error, as the system may; "memory" counts forward passes in place of operations.
    """

    kind: Kind = "kill"
    at: int = 0

    def operation(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        super().operation(name)
        number = len(self.names)
        full = self.kind == "full" and 0 < self.at <= number and can_be(name, "full")
        if self.kind in ("memory", "short") or (number != self.at and not full):
            return
        half()
        if self.kind == "kill":
            os._exit(KILLED)
        code = errno.EIO if self.kind == "EIO" else errno.ENOSPC
        raise OSError(code, os.strerror(code))

    def shortened(self, data: Any) -> Any:
        is_fault = self.kind == "short" and len(self.names) == self.at
        return data[: max(1, len(data) // 2)] if is_fault else data

    def forward(self) -> None:
        super().forward()
        if self.kind == "memory" and self.passes == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def can_be(name: str, kind: Kind) -> bool:
    """Tell whether an operation of that name can have such a fault."""
    if kind in ("ENOSPC", "full"):
        return name not in (*FREES, "flock", "chmod")
    return name == "write" if kind == "short" else True


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
