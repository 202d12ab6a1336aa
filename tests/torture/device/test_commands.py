"""Every command that loads a model, spread over both devices: results are those of the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.cli.conftest import done
from tests.cli.test_calibrate import short
from tests.torture.device.accelerator import backend, spread

__all__ = ["short"]

TOLERANCE = 1e-3
# keys, and all that end in one of them
# bytes: there are fewer, wider blocks where launching kernels is what costs; the SHA-256 of a profile: sums are of
# smaller chunks on a CPU, so last bits differ
NOT_RESULTS = set("seconds at device versions speedup per_second bytes floor_share machine profile_sha256".split())
ASKED = ("--length", 512, "--samples", 1, "--tasks", "synthetic:single")
PAIRED = (*ASKED, "--samples", 2)  # an interval takes two contexts
WINDOW, TWO = ("--set", "window=8"), ("--questions", 2)
# in this order: later ones use what earlier ones wrote, in the folder {}
COMMANDS = {
    "lukv": ("calibrate", "bundled", "--policy", "snapkv", *WINDOW, *TWO, "--answers", "given", "-o", "{}/lukv"),
    "cake": ("calibrate", "bundled", "--method", "cake", *WINDOW, *TWO, "-o", "{}/cake"),
    "polykv": ("calibrate", "bundled", "--method", "polykv", "--patterns", "snapkv,h2o", "--budgets", 64,
               *TWO, "-o", "{}/polykv"),
    "probe": ("calibrate", "bundled", "--method", "probe", "--form", "linear", "--entries", 100,
              "--answer-tokens", 2, "-o", "{}/probe"),
    "export": ("export", "{}/lukv", "--ratio", 0.8, "-o", "{}/plan.json"),
    "generate": ("generate", "bundled", "--plan", "{}/plan.json", "--max-new-tokens", 4),
    "compress": ("compress", "bundled", "--plan", "{}/plan.json", "-o", "{}/cache.safetensors"),
    "ask": ("generate", "bundled", "--cache", "{}/cache.safetensors", "--max-new-tokens", 4),
    "bench": ("bench", "bundled", "--plan", "{}/plan.json", "--length", 64, "--rounds", 1, "--new-tokens", 2),
    "evaluate": ("evaluate", "bundled", "--methods", "uniform,h2o,lava,probe={}/probe", "--phases", "both",
                 "--budgets", 48, *ASKED, "--losses", "-o", "{}/evaluation"),
    "text": ("evaluate", "bundled", "--methods", "uniform", "--ratios", 0.8, *WINDOW, "--length", 256,
                   "--tasks", "ppl:data/calibration/novel.txt", "--samples", 1),
    "headroom": ("headroom", "bundled", *ASKED),
    "evolve": ("evolve", "bundled", "--budget", 48, *WINDOW, "--generations", 1, "--finalists", 1, "--population", 4,
               *PAIRED, "--group-size", 6, "-o", "{}/evolve"),
    "select": ("select", "{}/polykv", "--budget", 64, *PAIRED, "-o", "{}/selected.json"),
}  # fmt: skip
WITH_DATA = ("lukv", "cake", "probe")
PLACES = {"cpu": ("--device", "cpu"), "both": ("--device-map", "auto")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {place: tmp_path_factory.mktemp("on") for place in PLACES}


@pytest.fixture(autouse=True)
def spreading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device maps, which accelerate makes for devices that it knows, spread a model over both."""
    load = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, device_map: str, **options: Any) -> Any:
        model, info = load(*args, device_map="cpu" if device_map == "auto" else device_map, **options)
        return (spread(model) if device_map == "auto" else model), info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)


@pytest.mark.parametrize("name", COMMANDS)
def test_results(name: str, folders: dict[str, Path], short: Path) -> None:
    found: list[Any] = []
    for place, folder in folders.items():
        command = [str(word).replace("{}", str(folder)) for word in COMMANDS[name]]
        command += [] if name == "export" else PLACES[place]
        backend().reset_peak(1)
        out, _ = done(*command, *(("--data", short) if name in WITH_DATA else ()), "--json")
        found.append(json.loads(out.replace(str(folder), "")))
        assert different(found[-1], found[0]) == [], place
        assert name == "export" or place == "cpu" or backend().peak_bytes(1) > 10**6  # it was there


def different(made: Any, expected: Any, at: str = "") -> list[str]:
    """Where two JSON values are not the same, numbers up to the tolerance."""
    if isinstance(made, dict) and isinstance(expected, dict):
        keys = {key for key in made | expected if not any(key == end or key.endswith(f"_{end}") for end in NOT_RESULTS)}
        return [one for key in sorted(keys) for one in different(made.get(key), expected.get(key), f"{at}.{key}")]
    if isinstance(made, list) and isinstance(expected, list) and len(made) == len(expected):
        pairs = enumerate(zip(made, expected, strict=True))
        return [one for place, (mine, other) in pairs for one in different(mine, other, f"{at}[{place}]")]
    if isinstance(made, float) and isinstance(expected, float | int):
        close = math.isclose(made, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return [] if close or made == expected else [f"{at}: {made} and {expected}"]
    return [] if made == expected else [f"{at}: {made!r} and {expected!r}"]
