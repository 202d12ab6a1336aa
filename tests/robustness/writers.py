"""Every command that writes, small, as it is typed in a folder that has what it reads; and as another one gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Writer:
    """A command: what it and another one of other settings type, see `typed`.

    Args:
        typed: with {} where the settings stand.
        one: the settings of the one.
        other: those of the other.
        inputs: what is there besides tasks and texts; `NAME=PLACE` under another name.
        again: what is typed besides to go on; None: it does not go on as it is typed, so it is not stopped, only raced.
        replaces: the inputs that it replaces, each in one step; `PLACE/`: a folder that it begins anew. Every other one
            stays as it is.
    """

    typed: str
    one: str
    other: str
    inputs: tuple[str, ...] = ()
    again: str | None = ""
    replaces: tuple[str, ...] = ()

    def words(self, settings: str) -> list[str]:
        """Return the command line with these settings."""
        return self.typed.format(settings).split()


def _calibrate(method: str, one: str, other: str, more: str = "--data texts.json", **about: Any) -> Writer:
    return Writer(f"calibrate tiny --method {method} {more} {{}} -o out", one, other, **about)


TASKS, LONG_TASKS = "--tasks jsonl:tasks.jsonl", "--tasks jsonl:long.jsonl"
SEEDS = "--seed 0", "--seed 1"
WINDOWS = "--set window=4", "--set window=5"
POLICIES = "--policy tova", "--policy keydiff"
METHODS = "tova", "streaming"
SURE = "--confidence 0.9", "--confidence 0.95"
PLANS, YAMLS = ("plan.json", "other.json"), ("plan.yaml", "other.yaml")
BUDGETS = "--budget 12", "--budget 14"
LUKV = "--data texts.json --no-check --answers given --questions 1"
POLYKV = "--data texts.json --patterns tova,streaming --policy tova --signals entropy,cosine"
EVALUATE = f"evaluate tiny --methods {{}} --budgets 12 --samples 2 {TASKS}"
EVOLVE = (
    f"evolve tiny {TASKS} --set window=4 --group-size 1 --generations 1 --population 4 --finalists 2 --samples 2 "
    "{} -o out"
)
RUN = (
    f"run tiny {LONG_TASKS} --policies knorm,tova --rankings query_bank --fit 3 --measure 1 --samples 2 --budget 40 "
    "--evaluations 5 {} -o out"
)
REPRODUCE = f"reproduce lava-table13 tiny --samples 1 --budgets 40 {LONG_TASKS} {{}} -o out"
VALIDATE = f"validate poly {TASKS} --samples 2 --phases prefill --budget 12 --permutations 5 --signals {{}}"
SELECT = f"select poly {TASKS} --samples 2 --budget 12 {{}} -o poly/plan.json"
WRITERS: dict[str, Writer] = {
    "calibrate lukv": _calibrate("lukv", *POLICIES, LUKV),
    "calibrate lukv --force": _calibrate("lukv", *POLICIES, f"{LUKV} --force", inputs=("cal=out",), replaces=("out/",)),
    "calibrate lava": _calibrate("lava", *WINDOWS),
    "calibrate cake": _calibrate("cake", *WINDOWS),
    "calibrate adakv": _calibrate("adakv", *WINDOWS),
    "calibrate polykv": _calibrate("polykv", "--budgets 8", "--budgets 10", POLYKV),
    "calibrate probe": _calibrate("probe", *SEEDS, "--data long.json --form linear --answers given"),
    "calibrate query_bank": _calibrate("query_bank", *SEEDS, "--data long.json --answers given --bank 8"),
    "calibrate query_statistics": _calibrate("query_statistics", "--questions 1", "--questions 2"),
    "headroom": Writer(f"headroom tiny {TASKS} --samples 2 {{}} -o out", "--ratio 0.5", "--ratio 0.6"),
    "validate": Writer(VALIDATE, "cosine", "entropy", ("poly",)),
    "select": Writer(SELECT, *SURE, ("poly",)),
    "evaluate": Writer(f"{EVALUATE} -o out", *METHODS),
    "evaluate --force": Writer(f"{EVALUATE} -o out --force", *METHODS, ("scores=out",), replaces=("out/",)),
    "evaluate --table": Writer(f"{EVALUATE} --table table.csv", *METHODS, again="--force"),
    "evolve": Writer(f"{EVOLVE} --budget 12", *SEEDS),
    "evolve --budgets": Writer(f"{EVOLVE} --budgets 12,14", *SEEDS),
    "run": Writer(RUN, *SEEDS),
    "reproduce": Writer(REPRODUCE, *SEEDS),
    "export": Writer("export cal {} -o new.json", *BUDGETS, ("cal",)),
    "export --force": Writer("export cal {} -o plan.json --force", *BUDGETS, ("cal", *PLANS), replaces=("plan.json",)),
    "export --to": Writer("export {} --to folder -o out", *PLANS, PLANS, again="--force"),
    "report": Writer("report cal {} -o page.html", *PLANS, ("cal", *PLANS)),
    "report --figures": Writer("report {} -o page.html --figures figures", *PLANS, PLANS),
    "plan uniform": Writer("plan uniform tiny --policy knorm {} -o new.json", *BUDGETS),
    "plan pyramid": Writer("plan pyramid tiny --policy knorm {} -o new.json", *BUDGETS),
    "plan scale": Writer("plan scale plan.json {} -o new.json", *BUDGETS, PLANS),
    "plan yaml": Writer("plan yaml {} -o new.yaml", *PLANS, PLANS),
    "plan build": Writer("plan build {} -o new.json", *YAMLS, YAMLS),
    "compress": Writer("compress tiny --plan {} --context @text.txt -o text.kv", *PLANS, PLANS),
}
