"""How fast a model is, from a clock that is made up: every pass has a start, time per token, and attention's part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvsearch.models.work import StageCost, Work
from kvsearch.runtime import speed
from kvsearch.runtime.speed import Speed
from tests import tiny

START, READ = 0.5, 0.01  # seconds: more than any pass takes here, so that a short one is slow, too


class Passes:
    """Makes every pass of a model take so long; `share` is the part of a token's work that a pair is.

    A step of decoding takes `decode` seconds more for every reply.
    """

    def __init__(self, model: Any, now: list[float]) -> None:
        self.model = model
        self.now = now
        self.share = self.decode = 0.0
        self.factors: Iterator[float] = iter(())
        self.seen: set[int] = set()

    def __call__(self, _: Any, arguments: Any, keywords: Any) -> None:
        rows, length = keywords["input_ids"].shape
        self.seen.add(length)
        seconds = START + READ * rows * (length + self.share * length**2 / 2) + self.decode * rows * (length == 1)
        self.now[0] += seconds * next(self.factors, 1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    """Passes over a tiny model, by which the clock goes on."""
    model = tiny.loaded("llama").model
    speed.SPEEDS.pop(model, None)
    now = [0.0]
    passes = Passes(model, now)
    monkeypatch.setattr(speed, "perf_counter", lambda: now[0])
    monkeypatch.setattr(speed, "MIN_LONG_PASS", 64)
    monkeypatch.setattr(speed, "PATIENCE", 1e9)
    with model.register_forward_pre_hook(passes, with_kwargs=True):
        yield passes


def test_a_slow_start_is_not_taken_for_all(clock: Passes) -> None:
    """Two lengths are timed, whatever the first one takes: else all were passes times the start."""
    found = Speed.of(clock.model, [StageCost("read", 2, 0, Work.over([80, 96]))])
    assert found.tokens == 96
    # replies to a prompt that leaves room for them are decoded, too
    assert clock.seen == {speed.SHORT_PASS, 96, 96 - 1 - speed.DECODED_STEPS, 1}
    assert found.step == pytest.approx(START, rel=0.2)
    for length in (48, 95, 104):  # from half as long to about as long
        assert Speed.of(clock.model, [StageCost("read", 1, 0, Work.over([length]))]) is found
    clock.share = found.pair / found.read
    again = Speed(clock.model, 96)
    assert (again.start, again.read) == (pytest.approx(START, rel=0.02), pytest.approx(READ))
    for length in (32, 96, 192):  # the part that grows with the square of the length, too
        exact = START + READ * (length + clock.share * length**2 / 2)
        assert again.seconds(Work.over([length])) == pytest.approx(exact, rel=0.02)
    assert not again.is_busy
    for length in (192, 80):
        assert Speed.at_length(clock.model, length) is not found  # much longer, then less than half of that


def test_steps_of_decoding_take_longer_for_more_replies(clock: Passes) -> None:
    clock.decode = 0.25
    found = Speed(clock.model, 96)
    assert (found.step, found.decode) == (pytest.approx(START, rel=0.02), pytest.approx(0.25, rel=0.02))
    work = Work(tokens=30, steps=10, decoded=30)  # three replies of ten tokens
    assert found.seconds(work) == pytest.approx(10 * (START + 3 * (0.25 + READ)), rel=0.02)


def test_contexts_take_as_much_longer_as_the_first_one_does(clock: Passes) -> None:
    works = [Work.over([50]), Work.over([100]), Work.over([50])]
    plain = Speed.at_length(clock.model, 100)

    def measure_first() -> None:
        clock.now[0] += 3 * plain.seconds(works[0])

    total = speed.scale_to_first(clock.model, works, measure_first)
    assert (total.passes, total.tokens) == (3, 200)  # counts stay
    assert plain.seconds(total) == pytest.approx(3 * sum(plain.seconds(work) for work in works))
