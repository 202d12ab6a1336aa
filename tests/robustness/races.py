"""Two writers of one folder: `python -m tests.robustness.races --races 200` (`make races`).

Every race forks two processes that give a command with different settings in the same folder. In most of them the
first one is stopped before an operation on a file, often one of the first or last ones, where locks are taken and given
back; the other one works to its end, or is stopped before an operation itself while the first ends. In the others both
work at once, the second a random moment later. What is there in the end has to be what the two leave one after the
other, in some order, or what one of them leaves while the other was refused with exit code 2 and the name of the first:
never a mixture, and no temporary file. A table counts how the races of each command ended.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from kvsearch.core.files import TEMPORARY
from tests.robustness.inputs import laid_out
from tests.robustness.operations import Watch
from tests.robustness.processes import Ended, Tree, hold_models, run_in, start, tree_of, warm
from tests.robustness.writers import WRITERS, Writer

REFUSED = "error: another kvsearch is writing to "
SERIAL, FIRST, SECOND, MIXED = "one after the other", "the first alone", "the second alone", "MIXED"
EDGE = 8  # operations at either end that are stopped before more often


@dataclass
class Stop(Watch):
    """Says that it has come to the operation with the number `at`, and waits there; 0 is none."""

    at: int = 0
    arrived: tuple[int, int] = field(default_factory=os.pipe)
    let_go: tuple[int, int] = field(default_factory=os.pipe)

    def operation(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        super().operation(name, half)
        if len(self.names) == self.at:
            os.write(self.arrived[1], b".")
            os.read(self.let_go[0], 1)


class Paused:
    """A command in a process of its own, with a stop."""

    def __init__(self, folder: Path, words: Sequence[str], name: str, at: int) -> None:
        self.folder, self.words, self.name, self.at = folder, words, name, at

    def begin(self) -> None:
        """Let it work until it is stopped, or has ended."""
        self.stop = Stop(self.folder, at=self.at)
        self.process = start(self.stop, self.words, self.name)
        os.close(self.stop.arrived[1])  # so that the end of the process ends the wait
        os.read(self.stop.arrived[0], 1)

    def end(self) -> Ended:
        """Let it go, and wait for it."""
        os.write(self.stop.let_go[1], b".")
        ended = self.process.end()
        for number in (self.stop.arrived[0], *self.stop.let_go):
            os.close(number)
        return ended


@dataclass(frozen=True)
class Draw:
    """A race: who begins; before which operations the two are stopped, 0: none; or the delay of a race in real time."""

    first: int
    stops: tuple[int, int] = (0, 0)
    delay: float | None = None


class Track:
    """The races of one command: what its two settings leave alone and one after the other was found out first."""

    def __init__(self, writer: Writer, place: Path) -> None:
        self.writer, self.made, self.folder = writer, place / "made", place / "folder"
        self.words = writer.words(writer.one), writer.words(writer.other)
        self.serial, self.alone = list[tuple[tuple[int, int], Tree]](), list[Tree]()
        self.operations, self.seconds = [0, 0], 0.0
        self.clear()
        before = tree_of(self.folder)
        warm(self.folder, self.words[0])
        for order in ((0, 1), (1, 0)):
            self.clear()
            ends = dict[int, Ended]()
            for which in order:
                began = time.perf_counter()
                ends[which] = run_in(self.folder, self.words[which])
                if which == order[0]:
                    self.seconds = max(self.seconds, time.perf_counter() - began)
                    self.operations[which] = len(ends[which].operations)
                    self.alone.append(tree_of(self.folder))
                    if ends[which].code:
                        raise RuntimeError(f"{self.words[which]} alone ends with {ends[which]}")
            self.serial.append(((ends[0].code, ends[1].code), tree_of(self.folder)))
        self.has_one_file = len(self.alone[0].keys() - before.keys()) == 1  # which needs no lock: the later one wins
        if self.alone[0] == self.alone[1]:
            raise RuntimeError(f"{self.words[0]} and {self.words[1]} leave the same")

    def clear(self) -> None:
        """Leave only what is there before a race."""
        laid_out(self.writer, self.made, self.folder)

    def drawn(self, draw: random.Random) -> Draw:
        """Draw a race."""
        first = draw.randrange(2)
        if draw.random() < 0.3:
            spans = (0.0, 0.02), (0.0, self.seconds), (0.9 * self.seconds, 1.1 * self.seconds)
            return Draw(first, delay=draw.choice((0.0, draw.uniform(*draw.choice(spans)))))
        return Draw(first, (self._stop(draw, first), draw.choice((0, self._stop(draw, 1 - first)))))

    def _stop(self, draw: random.Random, which: int) -> int:
        most = self.operations[which]
        return draw.choice(
            (draw.randint(1, min(EDGE, most)), draw.randint(max(1, most - EDGE), most), draw.randint(1, most))
        )

    def run(self, race: Draw) -> tuple[str, str]:
        """Run a race; return how it ended, and what to say of it if that is not allowed."""
        self.clear()
        ends = self._at_once(race) if race.delay is not None else self._in_turns(race)
        left = tree_of(self.folder)
        told = f"{race}: {ends[0].code} {ends[0].last!r}, {ends[1].code} {ends[1].last!r}, files {sorted(left)}"
        if any(TEMPORARY in path for path in left):
            return MIXED, told
        return self._judged(ends, left), told

    def _at_once(self, race: Draw) -> list[Ended]:
        delays = [0.0, 0.0]
        delays[1 - race.first] = race.delay or 0.0
        started = [
            start(Watch(self.folder), self.words[which], str(which), lambda wait=delays[which]: time.sleep(wait))  # type: ignore[misc]
            for which in (0, 1)
        ]
        return [process.end() for process in started]

    def _in_turns(self, race: Draw) -> list[Ended]:
        one, other = (
            Paused(self.folder, self.words[which], str(which), stop)
            for which, stop in zip((race.first, 1 - race.first), race.stops, strict=True)
        )
        for process in (one, other):
            process.begin()
        ends = [process.end() for process in (one, other)]
        return ends if race.first == 0 else ends[::-1]

    def _judged(self, ends: list[Ended], left: Tree) -> str:
        refused = [end.code == 2 and end.talk.count(REFUSED) == 1 for end in ends]
        for winner, what in ((0, FIRST), (1, SECOND)):
            if refused[1 - winner] and ends[winner].code == 0 and left == self.alone[winner]:
                return what
        codes = ends[0].code, ends[1].code
        if not any(refused) and (codes, left) in self.serial:
            return SERIAL
        return SERIAL if self.has_one_file and codes == (0, 0) and left in self.alone else MIXED


def main(arguments: Sequence[str] | None = None) -> int:
    """Race all commands, or those that are named; the exit code is 1 if one ended in a mixture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=200, help="of each command")
    parser.add_argument("--only", action="append", choices=list(WRITERS), help="this command; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    worst, say = 0, sys.stdout.write
    say(f"{'command':<28} {'races':>6} {SERIAL:>20} {FIRST:>16} {SECOND:>17} {'mixed':>6}\n")
    hold_models()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only or WRITERS:
            track, draw = Track(WRITERS[name], Path(folder)), random.Random(f"{given.seed} {name}")
            counted = Counter[str]()
            for _ in range(given.races):
                end, told = track.run(track.drawn(draw))
                counted[end] += 1
                if end == MIXED:
                    worst = 1
                    sys.stderr.write(f"{name}: {told}\n")
            ends = f"{counted[SERIAL]:>20} {counted[FIRST]:>16} {counted[SECOND]:>17} {counted[MIXED]:>6}"
            say(f"{name:<28} {counted.total():>6} {ends}\n")
            sys.stdout.flush()
    return worst


if __name__ == "__main__":
    sys.exit(main())
