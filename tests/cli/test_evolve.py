"""kvsearch evolve, end to end on the bundled model and short contexts."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.models.loading import load
from kvsearch.plan import load_plan, save_plan
from kvsearch.plan.contexts import merkle_root
from kvsearch.report.integrity import verify_paths
from kvsearch.runs.contexts import read_contexts
from kvsearch.runs.sums import finish
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.workers import cluster
from tests import tiny
from tests.cli.conftest import Run, invoke
from tests.cli.test_bad_input import ENVIRONMENT, INCOMPATIBLE, USAGE, refused
from tests.plan.builders import PROVENANCE

CONTEXTS, SAMPLES = 30, 4
SMALL = ("--budget", 12, "--set", "window=4", "--group-size", 2, "--generations", 2, "--finalists", 3)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task file of short contexts in the bundled model's language."""
    return tiny.task_file(tmp_path_factory.mktemp("task") / "mine.jsonl", CONTEXTS, length=100, facts=3)


def command(questions: Path, output: Path, *more: object, small: tuple[object, ...] = SMALL) -> tuple[object, ...]:
    return ("evolve", "bundled", *small, "--tasks", f"jsonl:{questions}", "--samples", SAMPLES, "-o", output, *more)


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory, questions: Path) -> tuple[Path, str, str]:
    """The directory of a search; what was printed."""
    directory = tmp_path_factory.mktemp("evolved") / "run"
    code, out, talk = invoke(*command(questions, directory))
    assert code == 0, talk
    return directory, out, talk


def with_other_result(lines: list[str]) -> list[str]:
    """The lines of a ledger; the first result, which is line 2, has other values."""
    found = json.loads(lines[1])
    assert found["kind"] == "result"
    better = json.dumps([[0.0] * len(row) for row in found["values"]])
    return [lines[0], lines[1].replace(json.dumps(found["values"]), better), *lines[2:]]


def results(directory: Path) -> tuple[bytes, bytes]:
    return (directory / "plan.json").read_bytes(), (directory / "report.json").read_bytes()


def test_a_search_writes_a_plan_and_a_report(evolved: tuple[Path, str, str]) -> None:
    directory, out, talk = evolved
    plan = load_plan(directory / "plan.json")
    check_plan(plan, "plan.json")
    assert plan.total == 12 * 24
    report = json.loads((directory / "report.json").read_text())
    assert report["ended"] == "all stages are finished"
    assert [list(row) for row in report["budgets"]] == [list(row.budget) for row in plan.prefill.layers]
    assert "second split: what is chosen from" in out
    assert "report split, 12 entries per kv head, question-agnostic" in out
    lines = talk.splitlines()
    assert re.match(rf"the model's own reply is right and teacher-forced after \d of {2 * SAMPLES} questions", lines[0])
    assert lines[1] == f"reading {2 * SAMPLES} questions once for all candidates"
    assert re.match(r"start plans: best .*candidates 2, seconds", lines[2])
    assert sum(line.startswith("layers 0-1 (1 of 3), generation") for line in lines) == 2
    assert any(line.endswith(f"wrote {directory / 'plan.json'} and {directory / 'report.json'}") for line in lines)


def test_two_runs_with_one_seed_give_the_same_bytes(
    evolved: tuple[Path, str, str], questions: Path, run: Run, tmp_path: Path
) -> None:
    code, out, _ = run(*command(questions, tmp_path / "again", "--json"))
    assert code == 0
    assert results(tmp_path / "again") == results(evolved[0])
    assert json.loads(out) == json.loads((evolved[0] / "report.json").read_text())


def test_resuming_a_finished_run_gives_the_same_bytes(
    evolved: tuple[Path, str, str], questions: Path, run: Run
) -> None:
    before = results(evolved[0]), (evolved[0] / "ledger.jsonl").read_bytes()
    code, _, talk = run(*command(questions, evolved[0], "--resume"))
    assert code == 0, talk
    assert (results(evolved[0]), (evolved[0] / "ledger.jsonl").read_bytes()) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_other_result, "line 2 is damaged (its checksum does not fit: it was changed)"),
        (lambda lines: lines[:2] + lines[3:], "line 3 is damaged (it does not say that it is line 3: one was removed"),
        (lambda lines: [lines[0], *lines], "line 2 is damaged (it does not say that it is line 2"),
    ],
    ids=["changed", "dropped", "copied"],
)
def test_a_ledger_that_was_changed_is_refused(
    evolved: tuple[Path, str, str],
    questions: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[str]], list[str]],
    words: str,
) -> None:
    """Before a model is loaded, and whoever only looks is told the same."""
    directory = tmp_path / "run"
    shutil.copytree(evolved[0], directory)
    lines = (directory / "ledger.jsonl").read_text().splitlines(keepends=True)
    (directory / "ledger.jsonl").write_text("".join(change(lines)))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    monkeypatch.setattr("kvsearch.models.loading.load", pytest.fail)
    for arguments in (command(questions, directory, "--resume"), ("show", directory)):
        refused(run, USAGE, words, *arguments)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_every_file_of_a_search_is_verified(evolved: tuple[Path, str, str], run: Run, tmp_path: Path) -> None:
    code, out, talk = run("verify", evolved[0], "--json")
    assert (code, talk) == (0, "")
    found = json.loads(out)["artefacts"]
    assert {one["state"] for one in found} == {"whole"}
    assert {Path(one["path"]) for one in found} == {path for path in evolved[0].rglob("*") if path.is_file()}
    assert [Path(one["path"]).name for one in found if not one["sealed"]] == ["SHA256SUMS"]
    directory = tmp_path / "run"
    shutil.copytree(evolved[0], directory)
    for path in (path for path in directory.rglob("*") if path.is_file() and path.name != "SHA256SUMS"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        damaged = {one.path for one in verify_paths([directory]).damaged}
        assert path in damaged
        assert damaged <= {path, path.with_name("ledger.jsonl")}  # which begins with its configuration
        path.write_bytes(whole)
    report = directory / "report.json"
    report.write_text(re.sub(r'"evaluations": \d+', '"evaluations": 3', report.read_text()))
    for _ in range(2):
        code, out, talk = run("verify", directory)
        assert (code, out.splitlines()[-1]) == (USAGE, "9 whole, 1 damaged")
        assert f"1 of 10 artefacts is damaged, the first is {report}: it has 3 evaluations, the ledger " in talk
        finish(directory, ("*",))  # by somebody who computes the checksums anew


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_goes_on_to_the_same_bytes(
    seed: int, evolved: tuple[Path, str, str], questions: Path, run: Run, tmp_path: Path
) -> None:
    lines = len((evolved[0] / "ledger.jsonl").read_text().splitlines())
    kept = random.Random(seed).randrange(1, lines + 1)
    directory = tmp_path / "run"
    arguments = [sys.executable, "-m", "kvsearch", *map(str, command(questions, directory))]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while count_lines(directory / "ledger.jsonl") < kept and process.poll() is None:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    code, _, talk = run(*command(questions, directory, "--resume"))
    assert code == 0, talk
    assert results(directory) == results(evolved[0])


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def interrupt_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the job of that number."""
    calls = iter(range(10**6))
    whole = CandidateBank.evaluate

    def evaluate(self: CandidateBank, job: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return whole(self, job)

    monkeypatch.setattr(CandidateBank, "evaluate", evaluate)


def test_ctrl_c_prints_the_best_so_far(
    evolved: tuple[Path, str, str],
    questions: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_at(4, monkeypatch)
    code, out, talk = run(*command(questions, tmp_path / "run"))
    assert (code, out) == (130, "")
    assert re.search(r"^best so far: [\d.]+ \(.*\), in .*best\.json$", talk, re.MULTILINE)
    assert f"go on with --resume: what was measured is in {tmp_path / 'run'}" in talk
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    assert sum(map(sum, best["budgets"])) == 12 * 24
    assert not (tmp_path / "run" / "plan.json").exists()
    code, _, _ = run(*command(questions, tmp_path / "run", "--resume"))
    assert code == 0
    assert results(tmp_path / "run") == results(evolved[0])


def test_limits_end_a_search_with_a_result_and_may_be_raised(
    evolved: tuple[Path, str, str], questions: Path, run: Run, tmp_path: Path
) -> None:
    code, out, talk = run(*command(questions, tmp_path / "run", "--max-evals", 5, "--json"))
    assert code == 0
    assert json.loads(out)["evaluations"] == 5
    assert "search ended: 5 candidates were evaluated, as many as allowed" in talk
    code, _, _ = run(*command(questions, tmp_path / "run", "--resume"))
    assert code == 0
    assert results(tmp_path / "run") == results(evolved[0])


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
def test_workers_find_the_same(evolved: tuple[Path, str, str], questions: Path, run: Run, tmp_path: Path) -> None:
    code, _, talk = run(*command(questions, tmp_path / "run", "--workers", 1))
    assert code == 0, talk
    assert results(tmp_path / "run") == results(evolved[0])


def test_workers_without_ray(questions: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cluster, "import_module", missing)
    refused(
        run,
        ENVIRONMENT,
        "Ray cannot be imported (No module named 'ray'): run `pip install kvsearch[ray]`",
        *command(questions, tmp_path / "run", "--workers", 2),
    )


def test_several_budgets(questions: Path, run: Run, tmp_path: Path) -> None:
    small = ("--budgets", "8,16", *SMALL[2:], "--generations", 1)
    code, out, talk = run(*command(questions, tmp_path / "run", small=small))
    assert code == 0, talk
    for budget in (8, 16):
        assert load_plan(tmp_path / "run" / f"plan-{budget}.json").total == budget * 24
    front = json.loads((tmp_path / "run" / "front.json").read_text())
    assert list(front["budgets"]) == ["16", "8"] or list(front["budgets"]) == ["8", "16"]
    assert "scaled from the smallest" in out
    assert "budget 16: layers 4-5 (3 of 3), generation 0" in talk


def test_budgets_of_the_decode_phase(questions: Path, run: Run, tmp_path: Path) -> None:
    small = (*SMALL, "--phases", "decode", "--generations", 1, "--group-size", 6, "--max-evals", 4)
    code, out, _ = run(*command(questions, tmp_path / "run", "--dry-run", small=small))
    assert code == 0
    assert json.loads(out)["measured_by"] == "whole runs"
    code, out, talk = run(*command(questions, tmp_path / "run", small=small))
    assert code == 0, talk
    plan = load_plan(tmp_path / "run" / "plan.json")
    assert plan.prefill is None
    assert plan.phase("decode").total == plan.total == 12 * 24
    assert f"every candidate is run whole on {2 * SAMPLES} questions: budgets of the decode phase" in talk
    assert "report split, 12 entries per kv head, question-agnostic, decode" in out


def test_hard_questions_alone(questions: Path, run: Run, tmp_path: Path) -> None:
    hard = (*SMALL, "--hard-below", 100, "--hard-most", 2, "--generations", 1, "--max-evals", 3)
    code, _, talk = run(*command(questions, tmp_path / "run", small=hard))
    assert code == 0, talk
    said = re.search(
        rf"searching on 2 of {2 * SAMPLES} questions: the full cache answers (\d) right, (\d) of these score below 100 "
        "under even budgets of 12 entries",
        talk,
    )
    assert said
    assert "reading 2 questions once for all candidates" in talk
    assert json.loads((tmp_path / "run" / "report.json").read_text())["questions"]["search"] == 2
    content = json.loads((tmp_path / "run" / "config.json").read_text())["content"]
    assert content["settings"]["hard_below"] == 100
    assert len(content["searched_sha256"]) == 64
    before = results(tmp_path / "run")
    code, _, _ = run(*command(questions, tmp_path / "run", "--resume", small=hard))
    assert (code, results(tmp_path / "run")) == (0, before)
    code, out, _ = run(*command(questions, tmp_path / "other", "--dry-run", small=hard))
    assert json.loads(out)["replies_before_the_search"] == 4 * SAMPLES


def test_a_dry_run_writes_nothing(questions: Path, run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*command(questions, tmp_path / "run", "--dry-run"))
    assert code == 0
    told = json.loads(out)
    assert told["questions"] == dict.fromkeys(("search", "choice", "report"), 2 * SAMPLES)
    assert told["settings"]["group_size"] == 2
    assert not (tmp_path / "run").exists()


def test_a_recipe_under_what_is_typed(questions: Path, run: Run, tmp_path: Path) -> None:
    recipe = ("--recipe", "bundled", "--budget", 12, "--set", "window=4")
    code, out, _ = run(*command(questions, tmp_path / "run", "--dry-run", small=recipe))
    assert code == 0
    told = json.loads(out)
    assert (told["settings"]["budget"], told["settings"]["group_size"]) == (12, 2)
    assert told["policies"][0]["params"]["window"] == 4


def test_start_plans_bring_their_policies_and_what_they_have_seen(
    evolved: tuple[Path, str, str], questions: Path, run: Run, tmp_path: Path
) -> None:
    plan, start = load_plan(evolved[0] / "plan.json"), tmp_path / "plan.json"
    record, asked = plan.provenance.contexts, read_contexts(evolved[0])
    assert record is not None
    assert [record.chosen.jobs[0].root, record.reported.jobs[0].root] == [
        merkle_root(asked.chosen), merkle_root(asked.reported)
    ]  # fmt: skip
    save_plan(tiny.plan_for(load("bundled"), [[20] * 4] * 3 + [[8] * 4] * 3, provenance=plan.provenance), start)
    small = ("--budget", 16, "--start", start, "--group-size", 2)
    code, out, talk = run(*command(questions, tmp_path / "run", "--dry-run", small=small))
    assert code == 0, talk
    told = json.loads(out)
    before = json.loads((evolved[0] / "config.json").read_text())["content"]["splits"]["choice"]
    assert told["splits"]["choice"] != before
    assert "does not say what it was fitted" not in talk
    assert list(told["starts"][0]) == ["plan", "pyramid", "uniform"]
    assert {one["params"]["window"] for one in told["policies"]} == {4}
    save_plan(tiny.plan_for(load("bundled"), [[20] * 4] * 6, provenance=PROVENANCE), start, overwrite=True)
    _, _, talk = run(*command(questions, tmp_path / "run", "--dry-run", small=small))
    assert "start plan plan does not say what it was fitted and chosen on, or not all of it" in " ".join(talk.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--generations", 3), "another search: settings.generations is 2 there, 3 here"),
        (("--seed", 1), "another search: settings.seed is 0 there, 1 here"),
        (("--set", "window=5"), "another search: policies.0.params.window is 4 there, 5 here"),
        (("--samples", 3), "another search: asked.samples is"),
    ],
)
def test_another_configuration_is_refused(
    more: tuple[object, ...], message: str, evolved: tuple[Path, str, str], questions: Path, run: Run
) -> None:
    refused(run, USAGE, message, *command(questions, evolved[0], "--resume", *more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--resume", "--force"), "--resume goes on with a search and --force starts it anew"),
        (("--budgets", "8,x"), "--budgets: takes whole numbers with commas between them, got '8,x'"),
        (("--budgets", "8,16"), "budgets: is in place of budget: give one of them"),
        (("--space", "group"), "'groups', 'layers', 'heads', 'basis' or 'joint'"),
        (("--optimiser", "cmaes"), "'cmaes' is unknown"),
        (("--population", 2), "cma needs 4 or more, got 2"),
        (("--protocol", "agnostic"), "question-agnostic"),
        (("--parity", "--space", "layers"), "which searches groups, not layers"),
        (("--lambda", 0.5), "--lambda: is of the paper's cache term: give --parity, too"),
        (("--hard-most", 5), "--hard-most: is how many of the hard questions: say which are with --hard-below"),
        (("--hard-below", 101), "--hard-below: Input should be less than or equal to 100"),
        (("--max-time", 0), "--max-time: Input should be greater than 0"),
        (("--max-memory", 0), "--max-memory: must be above 0 GB"),
        (("--job-timeout", 5), "--job-timeout is for Ray workers: say how many with --workers"),
        (("--ray-address", "auto"), "--ray-address is for Ray workers"),
        (("--recipe", "bundle"), "unknown recipe 'bundle'; did you mean 'bundled'"),
        (("--policy", "snapkb"), "unknown policy 'snapkb'; did you mean 'snapkv'"),
        (("--set", "windw=4"), "windw"),
        (("--group-size", 7), "a group of 7 layers: the model has 6"),
        (("--phases", "all"), "--phases: Input should be 'prefill', 'decode' or 'both'"),
        (("--phases", "decode", "--budget", 160), "keep all of the longest prompt and reply ("),
        (("--budget", 3), "a budget of 3 is below the 4 entries that snapkv always keeps"),
        (("--budget", 400), "keep all of the longest prompt"),
        (("--space", "basis"), "space basis is made of start plans"),
    ],
)
def test_bad_input(more: tuple[object, ...], message: str, questions: Path, run: Run, tmp_path: Path) -> None:
    refused(run, USAGE, message, *command(questions, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()


def test_no_budget(questions: Path, run: Run, tmp_path: Path) -> None:
    refused(run, USAGE, "Give --budget, or several with --budgets", *command(questions, tmp_path, small=SMALL[2:]))


def test_a_finished_search_says_so(evolved: tuple[Path, str, str], questions: Path, run: Run) -> None:
    directory, out, _ = evolved
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    for more in ((), ("--resume",)):
        code, again, talk = run(*command(questions, directory, *more))
        assert (code, again) == (0, out)
        assert "this run was finished: nothing was left to do" in talk
        assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    code, _, talk = run(*command(questions, directory, "--dry-run"))
    assert code == 0, talk


def test_a_directory_that_is_in_use(evolved: tuple[Path, str, str], questions: Path, run: Run, tmp_path: Path) -> None:
    for other in (("--seed", 1), ("--max-evals", 1)):
        again = command(questions, evolved[0], *other)
        refused(run, USAGE, "holds a search already: --resume to go on with it", *again)
    (tmp_path / "notes.txt").write_text("mine")
    refused(run, USAGE, "holds something else than a search", *command(questions, tmp_path))


def test_a_start_plan_of_another_model(questions: Path, run: Run, tmp_path: Path) -> None:
    save_plan(tiny.plan_for(tiny.loaded(), [[8, 12]] * 4), tmp_path / "other.json")
    refused(
        run,
        INCOMPATIBLE,
        "start plan other was made for another model",
        *command(questions, tmp_path / "run", "--start", tmp_path / "other.json", "--policy", "snapkv"),
    )


def test_two_start_plans_of_one_name(questions: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    plan = tiny.plan_for(load("bundled"), [[8, 12, 8, 8]] * 6)
    places = [tmp_path / "mine.json", tmp_path / "b" / "mine.json"]
    for place in places:
        save_plan(plan, place)
    starts = [item for place in places for item in ("--start", place)]
    refused(
        run,
        USAGE,
        "two start plans are called mine: rename one of the files",
        *command(questions, tmp_path / "run", *starts, "--policy", "snapkv"),
    )
    small = ("--budget", 12, "--set", "window=4", "--start", places[0])
    refused(run, USAGE, "--set is for a --policy", *command(questions, tmp_path / "run", small=small))


def test_one_question_is_not_enough(run: Run, questions: Path, tmp_path: Path) -> None:
    single = tmp_path / "single.jsonl"
    rows = questions.read_text().splitlines()[::2]
    single.write_text("\n".join(rows))
    arguments = ("evolve", "bundled", *SMALL, "--tasks", f"jsonl:{single}", "--samples", 1, "-o", tmp_path / "run")
    refused(run, USAGE, "one question to search on: the result would fit that one alone", *arguments)


@pytest.mark.parametrize("more", [("--max-memory", 0.00001), ("--workers", 500)])
def test_what_cannot_begin_leaves_the_old_run(
    more: tuple[object, ...], evolved: tuple[Path, str, str], questions: Path, run: Run
) -> None:
    before = results(evolved[0]), (evolved[0] / "ledger.jsonl").read_bytes()
    code, _, _ = run(*command(questions, evolved[0], "--force", *more))
    assert code in (USAGE, ENVIRONMENT)
    assert (results(evolved[0]), (evolved[0] / "ledger.jsonl").read_bytes()) == before


@pytest.mark.parametrize("name", ["uniform", "full", "evolved", "streaming", "#1"])
def test_a_start_plan_has_a_name_of_its_own(
    name: str, evolved: tuple[Path, str, str], questions: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / f"{name}.json"
    path.write_bytes((evolved[0] / "plan.json").read_bytes())
    message = f"a start plan cannot be called '{name}': that names something else in the report, rename the file"
    refused(run, USAGE, message, *command(questions, tmp_path / "run", "--start", path))


def test_a_new_search_leaves_nothing_of_the_old_one(
    evolved: tuple[Path, str, str], questions: Path, tmp_path: Path, run: Run
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(evolved[0], directory)
    (directory / "front.json").write_text("{}")
    (directory / "plan-8.json").write_text("{}")
    (directory / "choice-8").mkdir()
    (directory / "choice-8" / "ledger.jsonl").write_text("")
    code, _, talk = run(*command(questions, directory, "--force"))
    assert code == 0, talk
    assert results(directory) == results(evolved[0])
    assert {path.name for path in directory.iterdir()} == {path.name for path in evolved[0].iterdir()}
