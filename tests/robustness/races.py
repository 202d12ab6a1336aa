"""Two writers of one directory: `python -m tests.robustness.races --races 200` (`make races`).

Every race forks two processes that give a command with different settings for the same directory, the second one at a
random moment while the first may be at work. What is there in the end has to be what the two leave one after the other,
in some order, or what one of them leaves while the other was refused with exit code 2 and the name of the first: never
a mixture, and no temporary file. A table counts how the races of each command ended.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Words = Sequence[object]
Content = dict[str, object]
REFUSED = "another kvsearch is writing to "
SERIAL, FIRST, SECOND, MIXED = "one after the other", "the first alone", "the second alone", "MIXED"


@dataclass(frozen=True)
class Inputs:
    """Files that commands read."""

    tasks: Path
    texts: Path
    contexts: Path
    plans: tuple[Path, Path]
    profile: Path


@dataclass(frozen=True)
class Race:
    """A command as both give it, in a directory that holds what `before` puts there."""

    words: Callable[[Inputs, Path], tuple[Words, Words]]
    before: Callable[[Inputs, Path], None] | None = None


@dataclass(frozen=True)
class End:
    """How a command ended."""

    code: int
    talk: str

    @property
    def was_refused(self) -> bool:
        """Whether another writer was there, as one line says."""
        return self.code == 2 and self.talk.count(f"error: {REFUSED}") == 1


def calibrated(inputs: Inputs, place: Path) -> None:
    """Put the profile of a PolyKV calibration there."""
    place.mkdir()
    shutil.copyfile(inputs.profile, place / "profile.safetensors")
    (place / "config.json").write_text(json.dumps({"model": "bundled", "recipe": {"method": "polykv"}, "seed": 0}))


def _calibrate(method: str, one: Words, other: Words, *shared: object) -> Race:
    def words(inputs: Inputs, place: Path) -> tuple[Words, Words]:
        data = inputs.contexts if method in ("probe", "query_bank") else inputs.texts
        common = ("calibrate", "tiny", "--method", method, "--data", data, "-o", place, *shared)
        return (*common, *one), (*common, *other)

    return Race(words)


def _asking(verb: str, one: Words, other: Words, *shared: object) -> Race:
    def words(inputs: Inputs, place: Path) -> tuple[Words, Words]:
        common = (verb, "bundled", "--tasks", f"jsonl:{inputs.tasks}", "-o", place, *shared)
        return (*common, *one), (*common, *other)

    return Race(words)


def _validate(inputs: Inputs, place: Path) -> tuple[Words, Words]:
    asked = ("--tasks", f"jsonl:{inputs.tasks}", "--samples", 3, "--phases", "prefill", "--budget", 24)
    one, other = ("validate", place, *asked), ("validate", place, *asked)
    return (*one, "--signals", "cosine"), (*other, "--signals", "entropy")


def _select(inputs: Inputs, place: Path) -> tuple[Words, Words]:
    asked = ("--tasks", f"jsonl:{inputs.tasks}", "--samples", 3, "--budget", 24, "-o", place / "plan.json")
    common = ("select", place, *asked, "--routes", "nll")
    return (*common, "--allocators", "uniform"), (*common, "--allocators", "nll-chosen", "--seed", 1)


def _reproduce(inputs: Inputs, place: Path) -> tuple[Words, Words]:
    common = ("reproduce", "lava-table13", "bundled", "--samples", 1, "--budgets", 16, "-o", place)
    return (*common, "--tasks", f"jsonl:{inputs.tasks}"), (*common, "--tasks", f"jsonl:{inputs.tasks}", "--seed", 1)


def _export(inputs: Inputs, place: Path) -> tuple[Words, Words]:
    one, other = inputs.plans
    return ("export", one, "--to", "folder", "-o", place), ("export", other, "--to", "folder", "-o", place)


def _figures(inputs: Inputs, place: Path) -> tuple[Words, Words]:
    def words(plan: Path) -> Words:
        return ("report", plan, "-o", place.with_suffix(".html"), "--figures", place)

    return words(inputs.plans[0]), words(inputs.plans[1])


FORCE, UNCHECKED = ("--force",), ("--no-check",)
SMALL = ("--budget", 12, "--set", "window=4", "--group-size", 3, "--generations", 1, "--finalists", 2, "--samples", 2)
QUICK = (
    *("--policies", "snapkv", "--rankings", "query_bank", "--fit", 4, "--measure", 2, "--samples", 2, "--no-refine"),
    *("--budget", 40),
)
RACES: dict[str, Race] = {
    "calibrate lukv": _calibrate("lukv", ("--policy", "tova"), ("--policy", "keydiff"), *UNCHECKED),
    "calibrate lukv --force": _calibrate("lukv", ("--policy", "tova"), ("--policy", "keydiff"), *UNCHECKED, *FORCE),
    "calibrate lava": _calibrate("lava", ("--set", "window=4"), ("--set", "window=5")),
    "calibrate cake": _calibrate("cake", ("--set", "window=4"), ("--set", "window=5")),
    "calibrate adakv": _calibrate("adakv", ("--set", "window=4"), ("--set", "window=5")),
    "calibrate polykv": _calibrate(
        "polykv",
        ("--budgets", 24),
        ("--budgets", 32),
        "--patterns",
        "tova,streaming",
        "--policy",
        "tova",
        "--signals",
        "entropy,cosine",
    ),
    "calibrate probe": _calibrate("probe", ("--seed", 0), ("--seed", 1), "--form", "linear", "--answers", "given"),
    "calibrate query_bank": _calibrate("query_bank", ("--seed", 0), ("--seed", 1), "--answers", "given"),
    "calibrate query_statistics": _calibrate("query_statistics", ("--questions", 3), ("--questions", 4)),
    "validate": Race(_validate, calibrated),
    "select": Race(_select, calibrated),
    "evaluate": _asking("evaluate", ("--methods", "tova"), ("--methods", "streaming"), "--budgets", 24, "--samples", 3),
    "evaluate --force": _asking(
        "evaluate", ("--methods", "tova"), ("--methods", "streaming"), "--budgets", 24, "--samples", 3, *FORCE
    ),
    "evolve": _asking("evolve", ("--seed", 0), ("--seed", 1), *SMALL),
    "evolve --resume": _asking("evolve", ("--seed", 0), ("--seed", 1), *SMALL, "--resume"),
    "run": _asking("run", ("--seed", 0), ("--seed", 1), *QUICK),
    "reproduce": Race(_reproduce),
    "export --to folder": Race(_export),
    "report --figures": Race(_figures),
}


def content_of(place: Path) -> Content:
    """Return what a command has left, by file, but for the seconds it took."""
    found: Content = {}
    for path in (place, place.with_suffix(".html")):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file():
                found[str(file.relative_to(place.parent))] = _untimed(file)
    return found


def _untimed(file: Path) -> object:
    data = file.read_bytes()
    if file.name == "SHA256SUMS":  # of files with seconds, too
        return sorted(line.split(maxsplit=1)[1] for line in data.splitlines())
    if file.suffix == ".json":
        return _without_times(json.loads(data))
    if file.suffix == ".jsonl":
        return [_without_times(json.loads(line)) for line in data.splitlines()]
    if file.suffix == ".csv":
        return [
            {key: value for key, value in row.items() if "seconds" not in str(key)}
            for row in csv.DictReader(io.StringIO(data.decode()))
        ]
    return data


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        left = {key for key in value if "seconds" in key or key in ("at", "sha256")}
        return {key: _without_times(one) for key, one in value.items() if key not in left}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


class Runner:
    """Runs commands in processes that are forked from this one, which has the model and all modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, name: str, words: Words, after: float) -> int:
        """Begin a command after so many seconds, and return the id of its process."""
        process = os.fork()
        if process:
            return process
        code = 70
        try:
            time.sleep(after)
            talk = io.StringIO()
            with redirect_stdout(io.StringIO()), redirect_stderr(talk):
                code = command(words)
            (self.folder / name).write_text(talk.getvalue())
        finally:
            os._exit(code)

    def end(self, name: str, process: int) -> End:
        """Wait for a command."""
        _, status = os.waitpid(process, 0)
        return End(os.waitstatus_to_exitcode(status), (self.folder / name).read_text())

    def run(self, words: Words) -> End:
        """Run one command."""
        return self.end("alone", self.start("alone", words, 0.0))


def command(words: Words) -> int:
    """Run a command in this process, as if it had been typed."""
    from kvsearch.cli import app

    sys.argv = ["kvsearch", *map(str, words)]
    try:
        app()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class Track:
    """The races of one command: what its two settings leave one after the other was found out first."""

    def __init__(self, name: str, inputs: Inputs, folder: Path) -> None:
        self.race, self.inputs, self.runner = RACES[name], inputs, Runner(folder)
        self.place = folder / "run"
        self.words = self.race.words(inputs, self.place)
        self.serial: list[tuple[tuple[int, int], Content]] = []
        self.alone: list[Content] = []
        self.seconds = 0.0
        self.clear()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            command(self.words[0])  # what it imports and makes once is there for all processes
        for order in ((0, 1), (1, 0)):
            self.clear()
            began, ends = time.perf_counter(), dict[int, End]()
            for which in order:
                ends[which] = self.runner.run(self.words[which])
                if which == order[0]:
                    self.seconds = max(self.seconds, time.perf_counter() - began)
                    self.alone.append(content_of(self.place))
                    if ends[which].code:
                        raise RuntimeError(f"{name} alone ends with {ends[which]}")
            self.serial.append(((ends[0].code, ends[1].code), content_of(self.place)))
        if self.alone[0] == self.alone[1]:
            raise RuntimeError(f"{name}: both settings leave the same")

    def clear(self) -> None:
        """Leave only what is there before a race."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.with_suffix(".html").unlink(missing_ok=True)
        if self.race.before is not None:
            self.race.before(self.inputs, self.place)

    def run(self, draw: random.Random) -> tuple[str, str]:
        """Run one race; return how it ended, and what to say of it if that is not allowed."""
        self.clear()
        names, first = ("first", "second"), draw.randrange(2)
        delay = draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 1.1 * self.seconds)))
        delays = [0.0, 0.0]
        delays[1 - first] = delay
        started = [self.runner.start(names[which], self.words[which], delays[which]) for which in (0, 1)]
        ends = [self.runner.end(names[which], started[which]) for which in (0, 1)]
        found, left = self._judged(ends), content_of(self.place)
        if any(".kvsearch-" in path for path in left):
            return MIXED, f"left behind: {[path for path in left if '.kvsearch-' in path]}"
        return found, f"after {delay:.3f} s: {ends}, files {sorted(left)}"

    def _judged(self, ends: list[End]) -> str:
        left = content_of(self.place)
        refused = [end.was_refused for end in ends]
        for winner, what in ((0, FIRST), (1, SECOND)):
            if refused[1 - winner] and not refused[winner] and ends[winner].code == 0 and left == self.alone[winner]:
                return what
        if not any(refused) and ((ends[0].code, ends[1].code), left) in self.serial:
            return SERIAL
        return MIXED


def made_inputs(folder: Path) -> Inputs:
    """Write small files that all commands read."""
    from kvsearch.models.loading import load
    from kvsearch.plan import save_plan
    from tests import tiny
    from tests.signals.profiles import make_signals, signal_metadata

    folder.mkdir()
    model = load("bundled")
    tasks = tiny.task_file(folder / "mine.jsonl", 60, length=110, facts=3)
    texts, contexts = calibration_file(folder / "texts.json", 4), calibration_file(folder / "contexts.json", 8)
    plans = folder / "one" / "plan.json", folder / "other" / "plan.json"
    layers, heads = model.fingerprint.layers, model.fingerprint.kv_heads
    for plan, budget in zip(plans, (20, 24), strict=True):
        plan.parent.mkdir()
        save_plan(tiny.plan_for(model, [[budget] * heads] * layers), plan)
    patterns: dict[str, dict[str, Any]] = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}}
    profile = folder / "profile.safetensors"
    profile.write_bytes(make_signals(signal_metadata(model.fingerprint, patterns, budgets=(24,))).to_bytes())
    return Inputs(tasks, texts, contexts, plans, profile)


def calibration_file(path: Path, contexts: int, length: int = 100) -> Path:
    """Write calibration data: so many contexts of some `length` words, with two questions each."""
    from tests import tiny

    data = tiny.calibration_data(*[length + number for number in range(contexts)])
    texts = [
        {"text": one.text, "questions": [{"question": pair.question, "answer": pair.answer} for pair in one.questions]}
        for one in data.contexts
    ]
    path.write_text(json.dumps({"name": "tiny", "prompt": " {question}", "contexts": texts}))
    return path


def held_models() -> None:
    """Load the models once for all processes, and import what commands import; no thread may be left."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    import kvsearch.models.loading as loading
    from kvsearch.cli import VERBS, load_command
    from tests import tiny

    held = {"bundled": loading.load("bundled"), "tiny": tiny.loaded()}
    loading.load = lambda name, *_: held[name]
    for verb in VERBS:
        load_command(verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Race all commands, or those that are named; the exit code is 1 if one ended in a mixture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--races", type=int, default=200, help="of each command")
    parser.add_argument("--only", action="append", choices=list(RACES), help="this command; repeatable")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no race of a command after so long")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    worst = 0
    say = sys.stdout.write
    say(f"{'command':<28} {'races':>6} {SERIAL:>20} {FIRST:>16} {SECOND:>17} {'mixed':>6}\n")
    with tempfile.TemporaryDirectory() as folder:
        held_models()
        inputs = made_inputs(Path(folder) / "inputs")
        for name in given.only or RACES:
            place = Path(folder) / "track"
            place.mkdir()
            track, draw, counted = Track(name, inputs, place), random.Random(f"{given.seed} {name}"), Counter[str]()
            began = time.monotonic()
            while counted.total() < given.races and time.monotonic() - began < given.seconds:
                end, told = track.run(draw)
                counted[end] += 1
                if end == MIXED:
                    worst = 1
                    sys.stderr.write(f"{name}: {told}\n")
            ends = f"{counted[SERIAL]:>20} {counted[FIRST]:>16} {counted[SECOND]:>17} {counted[MIXED]:>6}"
            say(f"{name:<28} {counted.total():>6} {ends}\n")
            sys.stdout.flush()
            shutil.rmtree(place)
    return worst


if __name__ == "__main__":
    sys.exit(main())
