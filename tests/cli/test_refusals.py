"""Requests that cannot be met: one line that says what to do, exit code 2, and nothing is written.

IN stands for the folder of `inputs`, CAL for a calibration of the bundled model, NEW for what would be written.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.test_bad_input import USAGE, refused

TASKS = "--tasks jsonl:IN/mine.jsonl"
SEARCH = f"--budget 12 --set window=4 --group-size 2 --generations 2 --finalists 3 {TASKS} --samples 4"
RUN = f"--policies snapkv --form linear --fit 4 --measure 2 --samples 4 --evaluations 40 {TASKS}"
CHOICE = f"--budget 24 {TASKS} --samples 2"
SHORT = "ppl:data/calibration/story.txt --length 4096"
VERDICTS = "--tasks synthetic:single --length 512 --samples 2"
# a command by its beginning, and what is typed after it, with words of the refusal
REFUSED: dict[str, list[tuple[str, str]]] = {
    "calibrate bundled -o NEW": [
        ("--method lukw", "unknown method 'lukw'; did you mean 'lukv'?"),
        ("--policy full", "evicts nothing"),
        ("--set windw=3", "did you mean 'window'?"),
        ("--set window", "not of the form key=value"),
        ("--set window=600", "too short"),
        ("--recipe none.yaml", "none.yaml"),
        ("--policy probe=none", "there is no file none"),
        ("--split train", "--split is for --tasks"),
        ("--tasks synthetic --split report", "nothing may be fitted to them"),
        ("--tasks synthetic --data x", "none of the chosen tasks reads --data"),
    ],
    "evaluate bundled": [
        ("", "nothing to compare"),
        ("--methods lava", "give --budgets"),
        ("--methods lava --budgets 12a", "budget '12a' is not a number such as 128"),
        ("--methods lava --ratios 1.5", "outside (0, 1)"),
        ("--budgets 64", "--budgets are for --methods"),
        ("--set window=4 --phases both", "--phases and --set are for --methods"),
        ("--methods lava --budgets 64 --baselines snapkv", "--baselines go with --plan alone"),
        ("--methods probe --budgets 9", "policy probe is fitted: give probe=DIR"),
        ("--methods lava --budgets 64 --table NEW.html", "name a .md, .csv or .tex file"),
        ("--methods lava --budgets 64 --table NEW/t.md", "its folder does not exist"),
        ("--methods lava --budgets 64 --tasks ppl:", "a file is given as ppl:FILE"),
        ("--methods lava --budgets 64 --tasks ppl:x", "no file x"),
        (f"--methods lava --budgets 64 --tasks {SHORT}", "and a window needs 4184: give more text, or lower --length"),
        ("--methods lava --budgets 64 --tasks ppl:LICENSE --length 4097", "takes 4096: lower --length"),
        ("--methods lava --budgets 64 --replies 4", "--replies and --top-p are of replies that are drawn"),
        (
            "--methods lava --budgets 64 --tasks ppl:data/calibration/story.txt --protocol question-aware",
            "text without questions",
        ),
        ("--methods uniform --ratios 0.99 --tasks synthetic:single --length 512 --samples 1", "ratio 0.99 leaves 5."),
        ("--methods lava --budgets 64 --guarantee", "--guarantee is about plans: give one with --plan"),
        (f"--plan CAL/plan.json --lose-at-most 50% --tasks {SHORT}", "the loss of text is in nats per token, not in"),
        (
            "--plan CAL/plan.json --lose-at-most 2% --tasks synthetic:multikey --length 512 --samples 3",
            "takes 149 contexts at least, and there are 3: ask more with --samples or --tasks, or allow",
        ),
    ],
    f"evolve bundled -o NEW {SEARCH}": [
        ("--budgets 8,16", "budgets: cannot be given with --budget: leave one of them out"),
        ("--hard-most 3", "say which are with --hard-below"),
        ("--parity --space layers", "which searches groups, not layers"),
        ("--phases both --space joint", "space joint is of the prefill phase"),
        ("--phases decode --budget 160", "keep all of the longest prompt and reply ("),
        ("--budget 500", "500 entries per kv head keep all of the longest prompt"),
        ("--budget 3", "a budget of 3 is below the 4 entries that snapkv always keeps"),
    ],
    f"evolve bundled -o NEW {TASKS}": [("--budget 12 --policy full", "--policy full never evicts")],
    "evolve bundled -o NEW --tasks ppl:data/calibration/story.txt": [
        ("--budget 12 --objective metric", "nothing replies to a text"),
    ],
    f"run bundled -o NEW --budget 40 --tasks {SHORT}": [("", "and a window needs 4184: give more text")],
    "run bundled -o NEW --lose-at-most 5% --tasks ppl:data/calibration/story.txt": [
        ("", "the loss of text is in nats per token, not in [0, 1]"),
    ],
    f"run bundled -o NEW {RUN}": [
        ("", "how much may be kept? Give --budget"),
        ("--budget 40 --ratio 0.9", "--ratio: cannot be given with --budget: leave one of them out"),
        ("--smallest --within 2", "takes 149 contexts at least, and there are 4: ask more with --samples or --tasks"),
        ("--lose-at-most 2", "--lose-at-most: must be a share such as 2% or 0.02, not 2"),
        ("--budgets 40,40", "--budgets: has a budget twice"),
        ("--budget 40 --time 1.5h", "--time: must be a time such as 90s, 30m, 2h or 1h30m, not '1.5h'"),
        ("--budget 40 --time 1h30", "--time: must be a time such as 90s, 30m, 2h or 1h30m, not '1h30'"),
        ("--budget 40 --rankings prob", "unknown ranking 'prob'; did you mean 'probe'?"),
        ("--budget 5000", "is all of a"),
        ("--budget 1", "1 entry per kv head: every policy of --policies always keeps more"),
        ("--budget 40 --policies probe=fit", "policies that are fitted are not for --policies"),
        ("--budget 40 --fit 99", "contexts, and 99 are fitted on, but budgets are measured on others"),
    ],
    f"select IN/polykv -o NEW {CHOICE}": [
        ("--sure 1", "--confidence 1 is outside [0.5, 1)"),
        ("-o NEW/plan.json", "its folder does not exist"),
        ("--run IN/mine.jsonl", "mine.jsonl is a file: give a directory"),
    ],
    "validate": [
        (f"NEW {VERDICTS}", "does not exist: give the directory of a finished calibration"),
        (f"IN/mine.jsonl {VERDICTS}", "is a file: give the directory"),
        (f"IN {VERDICTS}", "has no profile.safetensors"),
        (f"CAL {VERDICTS}", "has no signals: give the directory of one by"),
    ],
    f"validate IN/polykv {VERDICTS}": [
        ("--signals cosine,,ppl", "--signals: takes values with commas between them"),
    ],
    "export IN/polykv -o NEW": [
        ("--route cosin", "unknown route 'cosin'; did you mean 'cosine'?"),
        ("--policy tova", "policy 'tova' is for route none"),
        ("--least 9", "--least is for budgets by a signal: name a --budget-signal"),
        ("--least 33 --budget-signal ppl", "least 33 is above the mean of 24 entries per kv head"),
    ],
    "export CAL -o NEW --ratio 0.8": [
        ("--budget-signal uniform --phases both", "--budget-signal, --phases: only for profiles of method polykv"),
        ("--least 0 --route ppl", "--route, --least: only for profiles of method polykv"),
    ],
    "plan uniform bundled -o NEW": [
        ("--policy h20 --budget 9", "unknown policy 'h20'; did you mean 'h2o'?"),
        ("--policy snapkv --budget 9", "below the 32 that snapkv always keeps"),
        ("--policy duo_attention --budget 400", "duo_attention never evicts heads with budgets of 400"),
        ("--policy h2o", "give either a ratio to evict"),
        ("--policy duo_attention --ratio 0.5", "never evicts heads with budgets of 5000 entries on average"),
        ("--policy h2o --budget 200 --length 200", "all of a 200-token prompt"),
        ("--policy h2o --budget 9 --allocation lavva", "unknown allocation 'lavva'; did you mean 'lava'?"),
        ("--policy h2o --budget 9 --allocation lava:layers", "is not of the form NAME or NAME:option="),
        ("--policy d2o --budget 300 --allocation lava", "d2o merges what it evicts"),
    ],
    "bench": [
        ("bundled --shape llama-3.1-8b --budget 9", "give a MODEL or a --shape"),
        ("bundled", "give --plan, --budget or --ratio"),
        ("bundled --layers 2 --budget 9", "--layers is of a --shape"),
        ("--shape llama-3.1-8b --layers 33 --budget 64", "has 32 layers"),
        ("--shape qwen3-8b --plan NEW", "give the MODEL of the plan, or --policy and --budget"),
        ("--shape llama-3-8b --budget 64", "did you mean 'llama-3.1-8b'"),
        ("bundled --budget 9", "is below the 32 entries that snapkv always keeps"),
        ("bundled --budget 40 --ratio 0.5", "either a ratio"),
        ("bundled --plan NEW --skewed", "--skewed and --phases are of --policy"),
        ("bundled --budget 40 --curve NEW.txt", "name a .pdf, .png, .svg or .html file"),
        ("bundled --budget 40 --curve NEW.svg --batch 4", "give two or more, such as --batch 1,4"),
        ("bundled --budget 40 --curve NEW.svg --length 64,65", "such as --length 512,2048"),
        ("bundled --budget 40 --curve NEW.svg --largest-batch", "leave --compile and --largest-batch out"),
    ],
    "reproduce": [
        ("lukv-tabel1 bundled", "did you mean 'lukv-table1'"),
        ("--offline", "which table"),
        ("lava-table2", "lava-table2 of which model"),
        ("lava-table2 bundled -o NEW --squad x.json", "squad: no task of lava-table2 reads it"),
        ("lava-table2 bundled -o NEW --tasks ruler", "ruler:qa_1 needs questions"),
        ("lukv-table1 NEW --dry-run", "there is no model"),
    ],
    "headroom bundled": [
        ("--ray-address auto", "--ray-address is for Ray workers: say how many with --workers"),
    ],
    "show": [("CAL/plan.json --ratio 0.5", "--ratio is for profiles")],
    "policies": [("snapvk", "did you mean")],
    "tasks": [("longbench:trek", "did you mean")],
    "recipes": [("lukv-papr", "did you mean")],
}
ROWS = [(f"{command} {typed}", words) for command, rows in REFUSED.items() for typed, words in rows]


@pytest.fixture(scope="module")
def own_inputs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `inputs` for this process: a refused command locks a folder for a moment, and that is looked at."""
    copy = tmp_path_factory.mktemp("inputs") / "copy"
    # Another process may just have these there.
    ignored = shutil.ignore_patterns(".kvsearch-*", "selection", "validation")
    shutil.copytree(inputs, copy, ignore=ignored)
    return copy


@pytest.mark.parametrize(("typed", "words"), ROWS, ids=[typed.replace(TASKS, "") for typed, _ in ROWS])
def test_one_line_says_what_to_do(
    run: Run, own_inputs: Path, calibrated: Path, tmp_path: Path, typed: str, words: str
) -> None:
    places = {"IN": own_inputs, "CAL": calibrated, "NEW": tmp_path / "new"}
    for name, place in places.items():
        typed = typed.replace(name, str(place))
    complaint = refused(run, USAGE, words, *shlex.split(typed))
    assert complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert {path.name for path in (own_inputs / "polykv").iterdir()} == {"profile.safetensors", "config.json"}
