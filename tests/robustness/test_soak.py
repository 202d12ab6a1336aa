"""The soak: what it says of samples, and a search that is sampled for a moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.robustness.soak import GROWTH, Sample, growth, samples, tenths


def _taken(*memory: int) -> list[Sample]:
    return [Sample(float(second), held, 5) for second, held in enumerate(memory)]


def test_growth_after_the_beginning_is_seen() -> None:
    """What is loaded in the first fifth does not count; a leak after it does."""
    flat = growth(tenths(_taken(*range(10, 30), *[100] * 80)))
    assert (flat.memory, flat.files) == (1.0, 1.0)
    assert growth(tenths(_taken(*[100] * 30, *range(100, 170)))).memory > 1.5 > GROWTH


def test_too_few_samples_are_an_error() -> None:
    """A part of the time without a sample is not passed over."""
    with pytest.raises(ValueError, match="too few"):
        tenths(_taken(1, 2, 3))
    with pytest.raises(ValueError, match="too few"):
        tenths([])


def test_a_process_is_sampled() -> None:
    """Memory and files of a process that opens some."""
    code = "import time; kept = [open('/dev/null') for _ in range(40)]; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = next(samples(process, 0.0))
        process.kill()
    assert found.files >= 40
    assert found.memory > 1e6
