"""How far a run of many stages is: one display over all of them, with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from kvsearch.jobs.talk import Talk
from kvsearch.progress import Progress

PARTS = 1000  # of the whole, as the display counts them


@dataclass
class Overall:
    """Stages by name, each with its share of the work in any unit; those that were finished before take no time."""

    talk: Talk
    work: Mapping[str, float]
    show: Progress
    clock: Callable[[], float] = time.monotonic
    done: float = 0.0
    _begun: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @contextmanager
    def stage(self, name: str, words: str) -> Iterator[StageTalk]:
        """Begin a stage, and give whom its job talks to."""
        self._begun += 1
        before = self.done
        self.talk.say(f"{self._begun}/{len(self.work)} {words}{self._left()}")
        yield StageTalk(self.talk, lambda share: self._at(before + share * self.work[name]))
        self._at(before + self.work[name])

    def _at(self, done: float) -> None:
        self.done = max(self.done, done)
        self.show(round(PARTS * self.done / sum(self.work.values())), PARTS)

    def _left(self) -> str:
        """Return the time that is left at the speed so far, in words; nothing before anything is done."""
        spent, whole = self.clock() - self._started, sum(self.work.values())
        if self.done <= 0 or spent < 1:
            return ""
        left = round(spent * (whole - self.done) / self.done)
        return f" (about {left // 60}:{left % 60:02d} left)"


@contextmanager
def overall(talk: Talk, work: Mapping[str, float]) -> Iterator[Overall]:
    """Show one bar for stages with these shares of the work."""
    with talk.progress("parts in 1000") as show:
        yield Overall(talk, work, show)


@dataclass(frozen=True)
class StageTalk:
    """A `Talk` whose progress is that of a stage; what its steps count from 0 again does not go back."""

    talk: Talk
    at: Callable[[float], None]

    def part(self, begin: float, share: float) -> StageTalk:
        """Return the talk of a part of the stage, which has that `share` of its work."""
        return StageTalk(self.talk, lambda done: self.at(begin + share * done))

    def say(self, text: str) -> None:
        """Keep it: what a stage begins with and what it has kept is told once, of all stages."""

    def warn(self, text: str) -> None:
        """See `Talk.warn`."""
        self.talk.warn(text)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:  # noqa: ARG002 - there is one display
        """See `Talk.progress`."""
        yield lambda done, total: self.at(done / total if total else 1.0)

    def live(self, title: str) -> AbstractContextManager[Callable[[Sequence[str]], None]]:
        """See `Talk.live`."""
        return self.talk.live(title)

    def loading(self, name: str) -> AbstractContextManager[None]:
        """See `Talk.loading`."""
        return self.talk.loading(name)
