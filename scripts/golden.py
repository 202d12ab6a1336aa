"""Show that a change of the code changes no result: run small jobs of every command, compare two such runs.

    python scripts/golden.py make OLD        # before the change: some minutes on two cores, no network
    python scripts/golden.py make NEW        # after it
    python scripts/golden.py check OLD NEW   # one line per file, exit code 1 if any differs

The code is what `python -m kvsearch` finds; PYTHONPATH chooses another checkout. A directory gets `inputs` (texts that
this script writes), `logs` (what every job printed, and its exit code), `plans` and `runs`. Plans, strategies and
profiles are compared byte by byte, JSON and CSV as parsed values, all else as text, line by line.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import random
import re
import shlex
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

# All that is not compared, and what is compared whole, whatever keys and words it has.
IGNORED_FILES = (
    "*/config.json",  # settings of a run: their layout may change
    "logs/doctor.out",  # versions and devices
)
IGNORED_KEYS = {"at", "seconds", "prefill_seconds", "reply_seconds", "versions"}  # of JSON objects, columns of CSV
IGNORED_TEXT = {r"\bseconds \d+": "seconds #", r", \d+ s; wrote": ", # s; wrote"}  # of lines: how long a search took
EXACT = ("plans/*", "runs/*/plan*.json", "*.safetensors")  # whole, byte by byte

SHORT = {
    "few": "--length 512 --samples 2",
    "pair": "--length 512 --samples 2 --tasks synthetic:single,multikey",
    "trio": "--length 512 --samples 2 --tasks synthetic:single,multikey,chain",
    "search": "--generations 1 --finalists 2 --length 512 --samples 2 --tasks synthetic:single,multikey",
    "window": "--set window=8",
}

# Jobs by name. Those of a wave run side by side, so a job needs only files of earlier waves; long ones come first.
MEASURE = """
calibrate-polykv-all
    calibrate bundled --method polykv --patterns all $window --budgets 64 --questions 2 -o runs/polykv-all
calibrate-polykv
    calibrate bundled --method polykv --patterns snapkv,streaming,tova $window --budgets 32,64 --questions 4
    -o runs/polykv
calibrate-polykv-aware
    calibrate bundled --recipe polykv-bundled --patterns h2o,cake --policy h2o --budgets 64 --phases prefill
    --protocol question-aware --signals cosine,entropy --data inputs/calibration.json
    -o runs/polykv-aware
calibrate-polykv-dry
    calibrate bundled --method polykv --budgets 64 --dry-run --json -o runs/polykv-dry
calibrate-lukv
    calibrate bundled --method lukv --policy snapkv $window --questions 6 -o runs/lukv
calibrate-lukv-keydiff
    calibrate bundled --recipe lukv-keydiff --questions 4 -o runs/keydiff
calibrate-lukv-ablation
    calibrate bundled --policy snapkv --normalization layer --no-gap
    --data inputs/calibration.json -o runs/ablation
calibrate-lava
    calibrate bundled --method lava $window --questions 4 -o runs/lava
calibrate-cake
    calibrate bundled --method cake $window --protocol question-aware --questions 3 -o runs/cake
calibrate-cake-given
    calibrate bundled --method cake --tau1 1.6 --tau2 0.4 --questions 4 -o runs/cake-given
calibrate-adakv
    calibrate bundled --recipe adakv --policy snapkv $window --floor-share 0.1 --questions 4 -o runs/adakv
plan-even
    plan uniform bundled --policy snapkv --budget 64 $window -o plans/even.json
plan-even-both
    plan uniform bundled --policy h2o --budget 64 --phases both -o plans/h2o-both.json
plan-even-lava
    plan uniform bundled --policy lava --allocation lava:floor_share=0.1 --budget 48 $window -o plans/lava.json
plan-even-cake
    plan uniform bundled --policy cake --allocation cake:tau1=1.6 --ratio 0.9 --length 700 $window --phases both
    --json -o plans/cake.json
plan-pyramid
    plan pyramid bundled --policy pyramidkv --budget 64 -o plans/falling.json
plan-pyramid-adakv
    plan pyramid bundled --policy snapkv --allocation adakv --ratio 0.9 --length 700 $window
    -o plans/adapyramid.json
evaluate-methods
    evaluate bundled --methods uniform,pyramid,ada-pyramid,adakv,cake,lava,random --budgets 32,64 $window $few
    -o runs/methods --table runs/methods.csv
evaluate-both
    evaluate bundled --methods uniform,h2o,cam,d2o,cake,lava --phases both --budgets 48 $window $pair -o runs/both
evaluate-decode
    evaluate bundled --methods streaming,h2o,tova,scissorhands,vatp,knorm --phases decode --budgets 48 $pair
    -o runs/decode
evaluate-ablations
    evaluate bundled
    --methods lava:window=8,lava-uniform,lava-pyramid:beta=5,lava-equal-heads,pyramid:keydiff,criticalkv,random
    --ratios 0.9 $pair --seed 1 --losses --table runs/ablations.tex
evaluate-aware
    evaluate bundled --protocol question-aware --methods uniform,cake,adakv:expected_attention --budgets 64 $window
    $few --batch 4 -o runs/aware
evaluate-jsonl
    evaluate bundled --methods uniform,knorm --budgets 40 $window --tasks jsonl:inputs/questions.jsonl --json
    -o runs/jsonl
evaluate-niah
    evaluate bundled --methods uniform,streaming --ratios 0.8 $window --tasks niah --length 300,400 --depths 0,50
    --samples 4 -o runs/niah
evaluate-ruler
    evaluate bundled --methods uniform --budgets 64 $window --tasks ruler:vt,cwe,niah_multikey_1 $few -o runs/ruler
evaluate-ppl
    evaluate bundled --methods uniform,lava,random --ratios 0.8 $window --tasks ppl:inputs/text.txt --length 256
    --samples 3
evolve
    evolve bundled --recipe bundled $search --population 4 --generations 2 -o runs/evolve
evolve-two-budgets
    evolve bundled --budgets 32,64 $window --group-size 6 $search --population 4 -o runs/evolve-two
evolve-parity
    evolve bundled --budget 64 --parity --objective metric $window --group-size 3 $search --population 4
    -o runs/evolve-parity
evolve-layers
    evolve bundled --budget 48 --space layers $window $search --population 4
    --json -o runs/evolve-layers
evolve-golden
    evolve bundled --budget 48 --policy keydiff --group-size 1 $search --max-evals 14
    -o runs/evolve-golden
headroom
    headroom bundled --length 512 --samples 1
headroom-json
    headroom bundled --ratio 0.9 --tasks synthetic:single,vote --length 512 --samples 1 --json
generate
    generate bundled --max-new-tokens 4
doctor
    doctor
policies
    policies
policies-json
    policies --json
policies-one
    policies scissorhands
tasks
    tasks
tasks-json
    tasks synthetic:ruler+niah --json
tasks-one
    tasks ruler:vt
refused-budget
    evaluate bundled --methods uniform --budgets 16 $few
refused-policy
    plan uniform bundled --policy nonesuch --budget 64 -o plans/nonesuch.json
"""

BUILD = """
evaluate-profiles
    evaluate bundled --methods uniform,lukv=runs/lukv,table=runs/lava,given=runs/cake-given --budgets 64 $pair
    -o runs/profiles
evaluate-again
    evaluate bundled --methods uniform,h2o,cam,d2o,cake,lava --phases both --budgets 48 $window $pair -o runs/both
evolve-resume
    evolve bundled --budget 64 --parity --objective metric $window --group-size 3 $search --population 4
    -o runs/evolve-parity
generate-plan
    generate bundled --plan plans/h2o-both.json --context @inputs/context.txt --prompt "? code silver"
    --max-new-tokens 8 --json
export-ratio
    export runs/lukv --ratio 0.8 -o plans/lukv-ratio.json
export-budget
    export runs/lukv --budget 64 --length 512 -o plans/lukv-budget.json
export-keydiff
    export runs/keydiff --ratio 0.5 --json -o plans/keydiff.json
export-ablation
    export runs/ablation --ratio 0.8 -o plans/ablation.json
export-lava
    export runs/lava --budget 64 -o plans/lava-static.json
export-cake
    export runs/cake --ratio 0.9 -o plans/cake-static.json
export-cake-given
    export runs/cake-given --budget 100 -o plans/cake-given.json
export-adakv
    export runs/adakv --ratio 0.8 -o plans/adakv-static.json
export-polykv
    export runs/polykv --budget 64 -o plans/polykv.json
export-polykv-entropy
    export runs/polykv --budget 64 --route ppl --budget-signal entropy --phases both -o plans/polykv-entropy.json
export-polykv-mean
    export runs/polykv --budget 32 --route none --policy streaming --budget-signal nll-mean --phases decode
    -o plans/polykv-mean.json
export-polykv-full
    export runs/polykv-all --budget 400 --route error --budget-signal ppl-chosen --least 24
    --length 1020 --phases both --json -o plans/polykv-full.json
export-polykv-aware
    export runs/polykv-aware --route cosine --budget-signal entropy -o plans/polykv-aware.json
scale-budget
    plan scale plans/falling.json --budget 40 -o plans/falling-40.json
scale-ratio
    plan scale plans/h2o-both.json --ratio 0.9 --length 600 -o plans/h2o-scaled.json
diff
    plan diff plans/even.json plans/falling.json
diff-json
    plan diff plans/h2o-both.json plans/cake.json --json
yaml-cake
    plan yaml plans/cake.json -o plans/cake.yaml
show-dynamic
    show plans/lava.json
show-lukv
    show runs/lukv
show-keydiff
    show runs/keydiff --ratio 0.9 --json
show-lava
    show runs/lava
show-cake
    show runs/cake-given --json
show-adakv
    show runs/adakv
show-polykv
    show runs/polykv
show-polykv-json
    show runs/polykv-all --json
refused-export
    export runs/lukv -o plans/nonesuch.json
"""

USE = """
validate
    validate runs/polykv --budget 64 $trio --phases prefill,decode --signals route:cosine,budgets:entropy
evaluate-plans
    evaluate bundled --plan plans/lukv-ratio.json --plan plans/adakv-static.json
    --baselines uniform,snapkv,streaming,random $few -o runs/plans
evaluate-plans-both
    evaluate bundled --plan plans/polykv-entropy.json --plan plans/h2o-both.json --baselines streaming $pair --json
evaluate-ppl-plan
    evaluate bundled --plan plans/h2o-both.json --baselines streaming --tasks ppl:inputs/text.txt --length 256
    --samples 2 --json
evolve-heads
    evolve bundled --budget 48 --space heads --start plans/lukv-budget.json --group-size 3 $search -o runs/evolve-heads
yaml
    plan yaml plans/polykv-entropy.json -o plans/polykv-entropy.yaml
build
    plan build plans/cake.yaml -o plans/cake-built.json
show-plan
    show plans/polykv-full.json
show-plan-json
    show plans/lukv-ratio.json --json
refused-lm-eval
    lm-eval bundled --plan plans/nonesuch.json --tasks arc_easy
"""

CHOOSE = """
select
    select runs/polykv --budget 64 $trio -o plans/selected.json
select-both
    select runs/polykv --budget 64 --phases both
    --confidence 0.5 $pair --run runs/select-both --json -o plans/selected-both.json
build-again
    plan build plans/polykv-entropy.yaml --json -o plans/polykv-built.json
show-evolved
    show runs/evolve/plan.json
export-unproven
    export runs/polykv --budget 64 --route cosine --budget-signal entropy --phases decode -o plans/unproven.json
"""

PUBLISH = """
run
    run bundled --budget 51 --length 512 --tasks synthetic:single,multikey --fit 2 --measure 2 --samples 8 --no-refine
    -o runs/run
report
    report runs/both runs/evolve runs/lukv runs/select-both -o runs/page.html
verify
    verify runs/both runs/evolve runs/lukv runs/polykv
verify-json
    verify runs/both --json
compress
    compress bundled --plan plans/lukv-budget.json --context @inputs/context.txt -o runs/context.kv
deploy
    export plans/even.json --to folder --model bundled -o runs/folder
deploy-lukv
    export runs/lukv --to kvpress-lukv --lossy -o runs/curve.npy
deploy-layers
    export plans/falling.json --to kvpress-layers --lossy --length 600 -o runs/kvpress-layers
deploy-duo
    export plans/even.json --to duo --lossy --length 600 -o runs/duo
deploy-trtllm
    export plans/falling.json --to trtllm-windows --lossy --length 600 -o runs/windows.yaml
recipes
    recipes
recipes-one
    recipes run/bundled
reproduce-list
    reproduce --list
show-run
    show runs/run
show-evaluation
    show runs/both
show-evaluation-json
    show runs/both --json
show-search
    show runs/evolve
show-search-json
    show runs/evolve --json
show-selection
    show runs/select-both
show-selection-json
    show runs/select-both --json
finished
    evaluate bundled --methods uniform,h2o,cam,d2o,cake,lava --phases both --budgets 48 $window $pair -o runs/both
refused-finished
    evaluate bundled --methods uniform,h2o --phases both --budgets 48 $window $pair -o runs/both
"""

VERBS = (
    "run calibrate validate select evolve export evaluate reproduce generate compress bench show verify report "
    "headroom lm-eval policies tasks recipes doctor plan"
)

# What is refused, a command each: the message and the exit code are compared.
REFUSALS = """
nonesuch
run bundled
run bundled --budget 0 -o runs/x
run bundled --budget 51 --ratio 0.5 -o runs/x
run no/such --budget 51 -o runs/x --offline
run bundled --budget 51 --policies nonesuch -o runs/x
run bundled --budget 51 --recipe nonesuch -o runs/x
calibrate bundled --method nonesuch -o runs/x
calibrate bundled --method lukv
calibrate bundled --method lukv --policy nonesuch -o runs/x
calibrate bundled --method lukv --data inputs/nonesuch.json -o runs/x
calibrate bundled --method lukv --data inputs/text.txt -o runs/x
calibrate bundled --method lukv --questions 0 -o runs/x
calibrate bundled --method lukv --patterns snapkv -o runs/x
calibrate bundled --method polykv --patterns nonesuch --budgets 64 -o runs/x
calibrate bundled --method polykv --patterns snapkv --signals nonesuch -o runs/x
calibrate bundled --method lukv --set snapkv.nonesuch=1 -o runs/x
calibrate bundled --method lukv --set window=many -o runs/x
calibrate bundled --method lukv --questions 4 -o plans
validate runs/lukv --budget 64
validate runs/nonesuch --budget 64
validate runs/polykv --budget 64 --signals nonesuch
select runs/lukv --budget 64
evolve bundled --budget 48
evolve bundled -o runs/x
evolve bundled --budget 48 --space nonesuch -o runs/x
evolve bundled --budget 48 --generations 0 -o runs/x
evolve bundled --budget 48 --start plans/nonesuch.json -o runs/x
evolve bundled --budget 48 --population 1 -o runs/x
export runs/nonesuch --ratio 0.5
export runs/lukv --ratio 1.5 -o plans/x.json
export runs/lukv --ratio 0.5 --budget 4 -o plans/x.json
export runs/lukv --to nonesuch -o runs/x
export plans/even.json --to trtllm-windows -o runs/x.yaml
export plans/cake.json --to duo -o runs/x
export runs/polykv --budget 64 --route nonesuch -o plans/x.json
evaluate bundled
evaluate bundled --methods nonesuch --budgets 64
evaluate bundled --methods uniform
evaluate bundled --methods uniform --budgets 64 --tasks nonesuch
evaluate bundled --methods uniform --budgets 64 --tasks jsonl:inputs/nonesuch.jsonl
evaluate bundled --methods uniform --budgets 64 --tasks jsonl:inputs/text.txt
evaluate bundled --plan plans/nonesuch.json
evaluate bundled --plan inputs/calibration.json
evaluate bundled --methods lukv=runs/nonesuch --budgets 64
evaluate bundled --methods uniform --budgets 64 --length 100000
evaluate bundled --methods uniform --budgets 64 --protocol nonesuch
evaluate bundled --methods uniform --budgets 64 --seed -1
evaluate bundled --methods uniform --budgets 64 --table runs/x.docx
reproduce nonesuch --model bundled
generate bundled --plan inputs/calibration.json --context abc --prompt b
generate bundled --context @inputs/nonesuch.txt --prompt a
generate bundled --plan runs/both/report.json --prompt a
compress bundled --plan plans/nonesuch.json -o runs/x.kv
bench bundled --ratio 2
show runs/nonesuch
show inputs/text.txt
verify runs/nonesuch
report runs/nonesuch -o runs/x.html
report runs/both -o inputs/text.txt
headroom bundled --ratio 2
lm-eval bundled --tasks nonesuch
policies nonesuch
tasks nonesuch
recipes nonesuch
plan uniform bundled --policy snapkv -o plans/x.json
plan scale plans/even.json -o plans/x.json
plan diff plans/even.json plans/nonesuch.json
plan build inputs/calibration.json -o plans/x.json
plan uniform bundled --policy snapkv:windw=8 --budget 64 -o plans/x.json
plan uniform bundled --policy snapkv=inputs --budget 64 -o plans/x.json
run ./nomodel --budget 51 -o runs/x
run bundle --budget 51 -o runs/x
run bundled --ratio 90 -o runs/x
run bundled --budget 51 -o runs/x --dtype float61
headroom bundled --ratio 90
generate bundled --context inputs/context.txt --prompt a
evaluate bundled --methods uniform --budgets 64 --tasks jsonl:inputs/calibration.json
"""

WAVES = (MEASURE, BUILD, USE, CHOOSE, PUBLISH)
REFUSED = (2, 3, 4)  # exit codes of jobs called refused-...; all others: 0
FOREIGN = {"evaluate-niah", "evaluate-ruler"}  # the bundled model knows no English: exit code 4, with the table

INPUTS, LOGS, PLANS, RUNS = "inputs", "logs", "plans", "runs"
PROMPT = " {question}"
KEYS = "silver red pearl linen olive blond".split()
VALUES = "helmet trumpet whistle barrel anchor saddle staple lever drum pocket flute hinge".split()
FILLER = (
    "the jolly fox chases the guard in chapel .|the gentle king thanks the bear in valley .|"
    "the cruel pilot carries the falcon in cabin .|the bright cow helps the king in cabin ."
)


class Job(NamedTuple):
    """A name and what follows `kvsearch` on the command line."""

    name: str
    arguments: list[str]


class Missing:
    """What stands for a value that only one of two files has."""

    def __repr__(self) -> str:
        """Return how it is shown."""
        return "nothing"


MISSING = Missing()


def main() -> int:
    """Return the exit code of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="run all jobs")
    making.add_argument("directory", type=Path)
    making.add_argument("--only", default="*", metavar="PATTERN", help="jobs by name, in a directory that has the rest")
    making.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    checking = commands.add_parser("check", help="compare two directories")
    checking.add_argument("old", type=Path)
    checking.add_argument("new", type=Path)
    args = parser.parse_args()
    return make(args.directory, args.jobs, args.only) if args.command == "make" else check(args.old, args.new)


def make(directory: Path, jobs: int, only: str) -> int:
    """Run the jobs that `only` matches, all in an empty directory; return 1 if one did not end as it should."""
    if only == "*" and directory.exists() and any(directory.iterdir()):
        sys.exit(f"{directory} is not empty")
    waves = [*(parse_jobs(wave) for wave in WAVES), word_jobs()]
    for name in (INPUTS, LOGS, PLANS, RUNS):
        (directory / name).mkdir(parents=True, exist_ok=True)
    write_inputs(directory / INPUTS)
    well: list[bool] = []
    started = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for wave in waves:
            some = [job for job in wave if fnmatch(job.name, only)]
            well += pool.map(lambda job: run(job, directory), some)
    print(f"{sum(well)} of {len(well)} jobs ended as they should, {time.monotonic() - started:.0f} s")
    return 0 if all(well) else 1


def parse_jobs(table: str) -> list[Job]:
    """Return the jobs of a table: names at the beginning of a line, commands indented below."""
    found = []
    for entry in re.split(r"\n(?=\S)", table.strip()):
        name, command = entry.split(maxsplit=1)
        found.append(Job(name, shlex.split(string.Template(command).substitute(SHORT))))
    return found


def word_jobs() -> list[Job]:
    """Return the help of every verb, and what is refused."""
    helps = [Job(f"help-{verb}", [verb, "--help-all"]) for verb in VERBS.split()]
    commands = REFUSALS.strip().splitlines()
    return helps + [Job(f"refused-{number:02}", shlex.split(line)) for number, line in enumerate(commands, 1)]


def run(job: Job, directory: Path) -> bool:
    """Run a job and keep what it prints; return whether it ended as it should."""
    started = time.monotonic()
    command = [sys.executable, "-m", "kvsearch", *job.arguments]
    done = subprocess.run(command, cwd=directory, env=environment(), check=False, capture_output=True)
    output = ".out.json" if "--json" in job.arguments else ".out"
    (directory / LOGS / f"{job.name}{output}").write_bytes(done.stdout)
    (directory / LOGS / f"{job.name}.err").write_bytes(done.stderr)
    (directory / LOGS / f"{job.name}.code").write_text(f"{done.returncode}\n")
    wanted: tuple[int, ...] = (0,)
    if job.name.startswith("refused-"):
        wanted = REFUSED
    elif job.name in FOREIGN:
        wanted = (4,)
    note = "" if done.returncode in wanted else f": exit code {done.returncode}, not one of {wanted}"
    print(f"{time.monotonic() - started:5.1f} s  {job.name}{note}", flush=True)
    return not note


def environment() -> dict[str, str]:
    """Return the environment of a job: one thread, tables of one width, no network."""
    fixed = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    places = [str(Path(place).resolve()) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return {**os.environ, **fixed, "PYTHONPATH": os.pathsep.join(places)}


def write_inputs(folder: Path) -> None:
    """Write texts in the bundled model's language: a context, a longer text, questions, a calibration file."""
    draw = random.Random(0)
    (folder / "context.txt").write_text(write_context(draw, {"silver": "helmet trumpet"}, 60))
    (folder / "text.txt").write_text(write_context(draw, {key: write_value(draw) for key in KEYS}, 250))
    rows = [write_row(draw, key) for key in KEYS]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    contexts = []
    for row in rows[:3]:
        question = {"question": row["question"], "answer": row["answers"][0]}
        contexts.append({"text": row["context"], "questions": [question]})
    data = {"name": "golden", "prompt": PROMPT, "contexts": contexts}
    (folder / "calibration.json").write_text(json.dumps(data))


def write_row(draw: random.Random, key: str) -> dict[str, Any]:
    """Return a row of a task file: a context with several facts, a question about one of them."""
    facts = {key: write_value(draw) for key in KEYS}
    question, context = f"? code {key}", write_context(draw, facts, 40)
    answers = [f"{facts[key]} ."]
    return {"context": context, "question": question, "answers": answers, "prompt": PROMPT, "max_new_tokens": 4}


def write_value(draw: random.Random) -> str:
    """Return two words."""
    return " ".join(draw.sample(VALUES, 2))


def write_context(draw: random.Random, facts: Mapping[str, str], sentences: int) -> str:
    """Return sentences with facts anywhere between them."""
    lines = [draw.choice(FILLER.split("|")) for _ in range(sentences)]
    for key, value in facts.items():
        lines.insert(draw.randrange(len(lines)), f"code {key} {value} .")
    return " ".join(lines)


def check(old: Path, new: Path) -> int:
    """Print a line per file of two directories; return 1 if any file differs."""
    verdicts = {name: compare(name, old / name, new / name) for name in sorted(list_files(old) | list_files(new))}
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict}")
    same, ignored = (sum(verdict == one for verdict in verdicts.values()) for one in ("same", "ignored"))
    different = len(verdicts) - same - ignored
    print(f"{len(verdicts)} files: {same} same, {ignored} ignored, {different} different or missing")
    return 1 if different or not same else 0


def list_files(directory: Path) -> set[str]:
    """Return the names of all files below a directory."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def compare(name: str, old: Path, new: Path) -> str:
    """Return what is to be said about a file: same, ignored, missing or how it differs."""
    if any(fnmatch(name, pattern) for pattern in IGNORED_FILES):
        return "ignored"
    if not old.exists() or not new.exists():
        return f"missing in {'NEW' if old.exists() else 'OLD'}"
    exact = any(fnmatch(name, pattern) for pattern in EXACT)
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (old, new)]
    if hashes[0] == hashes[1]:
        return "same"
    found = list(differences(read(old), read(new)))
    if not found and not exact:
        return "same"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    prefix = f"sha256 {hashes[0][:12]} became {hashes[1][:12]}; " if exact else ""
    return f"differs: {prefix}{found[0] if found else 'the same values in another layout'}{more}"


def read(path: Path) -> Any:
    """Return the content of a file as values that `differences` can walk through."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return data.hex(" ", 8).split()
    text = data.decode()
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return text.splitlines()  # of a job that failed, say
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    return [mask(line) for line in text.splitlines()]


def mask(line: str) -> str:
    """Return a line without what is ignored in it."""
    for pattern, replacement in IGNORED_TEXT.items():
        line = re.sub(pattern, replacement, line)
    return line


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Yield the places at which two values differ, depth first."""
    before, after = children(old), children(new)
    if before is None or after is None:
        if repr(old) != repr(new):
            yield f"{place} {shorten(old)} became {shorten(new)}".strip()
        return
    for key in [*before, *(key for key in after if key not in before)]:
        yield from differences(before.get(key, MISSING), after.get(key, MISSING), f"{place}[{key}]")


def children(value: Any) -> dict[Any, Any] | None:
    """Return the parts of an object or list by key, or None for all else."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key not in IGNORED_KEYS}
    return dict(enumerate(value)) if isinstance(value, list) else None


def shorten(value: Any, most: int = 80) -> str:
    """Return a value as a text of limited length."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


if __name__ == "__main__":
    sys.exit(main())
