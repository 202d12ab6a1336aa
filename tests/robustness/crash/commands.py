"""The commands that write, on the bundled model and short contexts, and what each of them is given."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import tiny
from tests.robustness.crash.trial import Command, run_in

LENGTH, CONTEXTS = 60, 24
# name, what is typed, and the inputs beside tasks and a text
ASKED = "--tasks jsonl:tasks.jsonl"
TYPED = {
    "calibrate lukv": (f"calibrate bundled --policy knorm {ASKED} --questions 3 -o out", ()),
    "calibrate polykv": (
        f"calibrate bundled --method polykv {ASKED} --questions 2 --patterns knorm,streaming --policy knorm "
        "--budgets 24 -o out",
        (),
    ),
    "calibrate lava": (f"calibrate bundled --method lava {ASKED} --questions 4 --set window=4 -o out", ()),
    "evaluate": (f"evaluate bundled --methods knorm,streaming --budgets 24 --samples 4 {ASKED} -o out", ()),
    "evolve": (
        f"evolve bundled --policy knorm --budget 24 --samples 4 {ASKED} --generations 2 --population 4 -o out",
        (),
    ),
    "select": (f"select poly {ASKED} --budget 24 -o plan.json", ("poly",)),
    "validate": (f"validate poly {ASKED} --budget 24 --signals entropy --permutations 5", ("poly",)),
    "export": ("export cal --budget 24 -o plan.json", ("cal",)),
    "export --force": ("export cal --budget 20 -o plan.json --force", ("cal", "plan.json")),
    "export --to": ("export plan.json --to folder -o out", ("plan.json",)),
    "plan uniform": ("plan uniform bundled --policy knorm --budget 24 -o out.json", ()),
    "compress": ("compress bundled --plan plan.json --context @text.txt -o text.kv", ("plan.json",)),
    "report": ("report cal plan.json -o report.html --figures figures", ("cal", "plan.json")),
}
AGAIN = {"evolve": " --resume", "export --to": " --force"}
REPLACED = {"export --force": ("plan.json",), "validate": ("poly/validation.json",)}


def commands(workshop: Path) -> list[Command]:
    """Make what the commands are given, in a folder, and return them."""
    made = _inputs(workshop / "made")
    found = []
    for name, (typed, inputs) in TYPED.items():
        folder = workshop / "inputs" / name.replace(" ", "-")
        for item in ("tasks.jsonl", "text.txt", *inputs):
            _copy(made / item, folder / item)
        again = tuple((typed + AGAIN[name]).split()) if name in AGAIN else None
        found.append(Command(name, tuple(typed.split()), folder, again, REPLACED.get(name, ())))
    return found


def _inputs(folder: Path) -> Path:
    """Make tasks, a text, two calibrations and a plan."""
    folder.mkdir(parents=True)
    tiny.task_file(folder / "tasks.jsonl", CONTEXTS, LENGTH, facts=2)
    (folder / "text.txt").write_text(" ".join(tiny.document(LENGTH).words[1:]))
    for typed in (
        TYPED["calibrate lukv"][0].replace("-o out", "-o cal"),
        TYPED["calibrate polykv"][0].replace("-o out", "-o poly"),
        "plan uniform bundled --policy knorm --budget 24 -o plan.json",
    ):
        ended = run_in(folder, typed.split())
        if ended.code:
            raise RuntimeError(f"{typed} fails by itself with {ended.code}: {ended.talk}")
    return folder


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
