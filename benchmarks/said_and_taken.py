"""Print what --dry-run says that each verb takes on some models, and what it takes.

    python benchmarks/said_and_taken.py [--only NAME;...] [--models MODEL,...] [--dtype DTYPE] [--cpu] [--output DIR]

A model that is not bundled is asked small jobs (`REAL`), on contexts of about a thousand tokens.

Every command is asked first and run right after. With --cpu, seconds are those of one processor, for a machine that has
other work: the passes that a dry run measures are timed by it, too, and PyTorch has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

COMMAND = "from kvsearch.cli import main; main()"
# said before a command: what is timed is timed in seconds of this process
CPU = """
import time
time.perf_counter = time.process_time
"""

# name -> the words of a command, in a directory where those before it have written
COMMANDS = {
    "generate": "generate {model}",
    **{
        f"calibrate {method}": f"calibrate {{model}} --method {method} -o {method}"
        for method in ("lukv", "lava", "cake", "adakv", "polykv", "probe", "query_bank", "query_statistics")
    },
    "calibrate, small": "calibrate {model} --questions 8 -o small",
    "evaluate": "evaluate {model} --methods uniform,adakv,pyramid,cake --budgets 51",
    "evaluate, small": "evaluate {model} --methods snapkv --ratios 0.8 --samples 4",
    "headroom": "headroom {model}",
    "headroom, small": "headroom {model} --samples 4",
    "validate": "validate polykv",
    "validate, small": "validate polykv --samples 4 --signals cosine --force",
    "select": "select polykv --samples 10 -o plan.json",
    "compress": "compress {model} --plan plan.json -o context.kv",
    "evolve, small": "evolve {model} --budget 51 --generations 4 --samples 4 -o evolved",
    "evolve": "evolve {model} --budget 51 --generations 20 --samples 10 -o evolved20",
    "bench": "bench {model} --budget 51",
    "run, small": "run {model} --recipe bundled -o demo",
    "run": "run {model} --budget 51 -o best",
}

ASKED = "--tasks ruler:no-qa --length 1024"
REAL = {
    "generate": "generate {model} --prompt why? --max-new-tokens 64",
    "calibrate lukv": f"calibrate {{model}} --method lukv {ASKED} --samples 1 -o lukv",
    "calibrate probe": f"calibrate {{model}} --method probe {ASKED} --samples 1 -o probe",
    "calibrate query_bank": f"calibrate {{model}} --method query_bank {ASKED} --samples 1 -o query_bank",
    "calibrate polykv": f"calibrate {{model}} --method polykv {ASKED} --samples 1 -o polykv",
    "headroom": f"headroom {{model}} {ASKED} --samples 1",
    "evaluate": f"evaluate {{model}} --methods snapkv,adakv --ratios 0.8 {ASKED} --samples 1",
    "evolve": f"evolve {{model}} --budget 205 --generations 4 {ASKED} --samples 2 -o evolved",
    "run": f"run {{model}} --ratio 0.8 --effort quick {ASKED} --samples 2 -o best",
}


def main() -> None:
    """Ask and run every command, and print a line for each."""
    parser = argparse.ArgumentParser(description="Print said and taken seconds of every verb.")
    parser.add_argument("--only", help="names of commands, joined by semicolons")
    parser.add_argument("--models", default="bundled,bundled-redundant")
    parser.add_argument("--dtype", default="auto", help="that models are loaded in")
    parser.add_argument("--cpu", action="store_true", help="count seconds of one processor")
    parser.add_argument("--output", type=Path, help="directory for what the commands write")
    options = parser.parse_args()
    worst = 1.0
    print(f"{'command':<28} {'model':<18} {'said':>8} {'taken':>8} {'said/taken':>10}")
    with tempfile.TemporaryDirectory() as made:
        for model in options.models.split(","):
            place = (options.output or Path(made)) / Path(model).name
            place.mkdir(parents=True, exist_ok=True)
            commands = COMMANDS if model.startswith("bundled") else REAL
            for name in options.only.split(";") if options.only else commands:
                words = commands[name].format(model=model).split()
                words += [] if options.dtype == "auto" else ["--dtype", options.dtype]
                said = json.loads(call([*words, "--dry-run", "--json"], place, options.cpu)[1])["estimate"]["seconds"]
                taken, _ = call(words, place, options.cpu)
                worst = max(worst, said / taken, taken / said)
                print(f"{name:<28} {Path(model).name:<18} {said:>8.1f} {taken:>8.1f} {said / taken:>10.2f}", flush=True)
    print(f"furthest off by a factor of {worst:.2f}")


def call(words: list[str], place: Path, cpu: bool) -> tuple[float, str]:
    """Return the seconds that a command takes, and what it prints."""
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if cpu else {})}
    program = (CPU if cpu else "") + COMMAND
    began = perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr}")
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken if cpu else perf_counter() - began, done.stdout


if __name__ == "__main__":
    main()
