"""What a dry run says of the time that a job takes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.models.loading import LoadedModel
    from kvsearch.models.speed import Work


def foretold(loaded: LoadedModel, work: Work, talk: Talk) -> dict[str, Any]:
    """Say about how long work takes, by a short measured pass of the model; return that as JSON, under "estimate"."""
    from kvsearch.models.speed import measure_speed

    speed = measure_speed(loaded)
    talk.say(speed.words(work))
    return {"estimate": speed.estimate(work)}


def measured_tflops(loaded: LoadedModel) -> float:
    """Return the 10^12 operations a second that a short pass of the model reaches here."""
    from kvsearch.calibration.polykv.cost import ModelSize, Operations, cost_of, pairs_of
    from kvsearch.models.speed import measure_speed

    speed, size, made = measure_speed(loaded), ModelSize.of(loaded.model), Operations()
    made.add(size.layers * speed.tokens, size.layers * pairs_of(0, speed.tokens), 1)
    return cost_of(size, made, 1.0).flops / (speed.read * speed.tokens) / 1e12
