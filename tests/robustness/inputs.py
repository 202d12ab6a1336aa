"""What the commands of `writers` read: tasks, texts, and what other commands make of them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

from tests import tiny
from tests.robustness.processes import run_in
from tests.robustness.writers import WRITERS, Writer

CONTEXTS = 24
LENGTHS = {"tasks.jsonl": 40, "texts.json": 40, "text.txt": 40, "long.jsonl": 150, "long.json": 150}  # in words
CALIBRATIONS = {"texts.json": 2, "long.json": 4}  # and how many texts are in them
POLY, LUKV, SCORES = (WRITERS[name] for name in ("calibrate polykv", "calibrate lukv", "evaluate"))
MADE = {  # by these commands, of what is above
    "cal": LUKV.words("--policy knorm"),
    "poly": POLY.words("--budgets 12"),
    "scores": SCORES.words("knorm"),
    "plan.json": "plan uniform tiny --policy snapkv --set window=4 --budget 10 -o out".split(),
    "other.json": "plan uniform tiny --policy knorm --budget 12 -o out".split(),
    "plan.yaml": "plan yaml plan.json -o out".split(),
    "other.yaml": "plan yaml other.json -o out".split(),
}


def laid_out(writer: Writer, made: Path, folder: Path) -> Path:
    """Return a new folder with what a command reads; that is made in the folder `made`, once."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for item in (*_named(writer.typed.split()), *writer.inputs):
        name, _, place = item.partition("=")
        source, target = _made(name, made), folder / (place or name)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
    return folder


def _named(words: list[str]) -> list[str]:
    """Return the tasks and texts that a command names."""
    return [name for name in LENGTHS if any(word.endswith(name) for word in words)]


def _made(name: str, folder: Path) -> Path:
    """Return what a command reads, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if path.exists():
        return path
    if name in MADE:
        words = [name if word == "out" else word for word in MADE[name]]
        for needed in (*_named(words), *(word for word in words if word in MADE and word != name)):
            _made(needed, folder)
        ended = run_in(folder, words)
        if ended.code:
            raise RuntimeError(f"{' '.join(words)} fails by itself with {ended.code}: {ended.talk}")
    elif name in CALIBRATIONS:
        calibration_file(path, CALIBRATIONS[name], LENGTHS[name])
    elif name == "text.txt":
        path.write_text(" ".join(tiny.document(LENGTHS[name]).words[1:]))
    else:
        _answerable(tiny.task_file(path, CONTEXTS, LENGTHS[name], facts=2))
    return path


def _answerable(tasks: Path) -> None:
    """Make what the model says of its full cache the right answer to two of three questions: else nothing is right."""
    asked = f"evaluate tiny --methods knorm --budgets 12 --samples {CONTEXTS} --tasks jsonl:{tasks.name}"
    run_in(tasks.parent, f"{asked} -o said --force".split())
    with (tasks.parent / "said" / "samples.csv").open() as file:
        said = {(row["key"], row["question"]): row["reply"] for row in csv.DictReader(file) if row["method"] == "full"}
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    for number, row in enumerate(rows):
        if number % 3:
            row["answers"] = [said[str(number // 2), str(number % 2)]]
    tasks.write_text("\n".join(map(json.dumps, rows)))


def calibration_file(path: Path, contexts: int, length: int = 100) -> Path:
    """Write calibration data: so many contexts of some `length` words, with two questions each."""
    data = tiny.calibration_data(*[length + number for number in range(contexts)])
    texts = [
        {"text": one.text, "questions": [{"question": pair.question, "answer": pair.answer} for pair in one.questions]}
        for one in data.contexts
    ]
    path.write_text(json.dumps({"name": "tiny", "prompt": " {question}", "contexts": texts}))
    return path
