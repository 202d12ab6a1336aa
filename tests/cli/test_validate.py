"""kvsearch validate, end to end on the bundled model and a made-up profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsearch.choose.verdicts import harmful
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.samples import Place
from kvsearch.models.loading import load
from kvsearch.plan import save_profile
from kvsearch.report.integrity import verify_paths
from kvsearch.runs.sums import read_sums
from kvsearch.strategies.from_signals import Strategy
from tests.cli.conftest import Run
from tests.cli.test_bad_input import ENVIRONMENT, INCOMPATIBLE, INTERRUPTED, USAGE, refused
from tests.plan.builders import make_profile
from tests.signals.profiles import make_signals, signal_metadata

PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}}
ASKED = ("--tasks", "synthetic:single", "--length", 512, "--samples", 2)
ROUTE = ("--signals", "cosine", "--phases", "prefill")


@pytest.fixture(scope="module")
def profile() -> Iterator[bytes]:
    metadata = signal_metadata(load("bundled").fingerprint, PATTERNS, budgets=(32, 64))
    yield make_signals(metadata).to_bytes()


@pytest.fixture
def directory(tmp_path: Path, profile: bytes) -> Path:
    """What a calibration of the bundled model leaves."""
    made = tmp_path / "polykv"
    made.mkdir()
    (made / "profile.safetensors").write_bytes(profile)
    (made / "config.json").write_text(json.dumps({"model": "bundled", "recipe": {"method": "polykv"}, "seed": 0}))
    return made


def replies_in(directory: Path, size: str) -> int:
    lines = (directory / "validation" / f"{size}-question-agnostic" / "ledger.jsonl").read_text().splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    return len({tuple(sample[name] for name in Place._fields) for sample in samples})


def test_all_measured_budgets(run: Run, directory: Path) -> None:
    code, out, talk = run("validate", directory, *ASKED, *ROUTE, "--json")
    assert code == 0, talk
    assert {one.state for one in verify_paths([directory]).artefacts} == {"whole"}
    assert {"validation.json", "validation/64-question-agnostic/ledger.jsonl"} <= read_sums(directory).keys()
    found = json.loads(out)
    assert found == json.loads((directory / "validation.json").read_text())
    assert (found["schema"], found["split"], found["protocol"]) == (
        "kvsearch.validation/3", "select", "question-agnostic",
    )  # fmt: skip
    assert (found["model"]["name"], found["seed"], found["tasks"]["single"]["contexts"]) == ("bundled", 0, 2)
    assert [at["budget"] for at in found["budgets"]] == [32, 64]
    for at in found["budgets"]:
        (judged,) = at["signals"]
        assert (judged["signal"], judged["kind"], judged["phases"]) == ("cosine", "route", "prefill")
        assert judged["verdict"] == "unproven"
        assert judged["reason"].startswith("too few contexts to tell: 2 different ones")
        assert len(judged["random"]) == 5
        assert set(judged["gains"]) == {"inverse", "uniform", "random", "reach"}
    assert "kept in" in talk
    assert harmful(directory, Strategy("ppl"), 64) is None


def test_the_default_is_everything_that_was_measured(run: Run, directory: Path) -> None:
    code, out, talk = run("validate", directory, *ASKED, "--dry-run")
    assert code == 0, talk
    told = json.loads(out)
    assert (told["tasks"], told["split"], told["protocol"]) == (["single"], "select", "question-agnostic")
    assert len(told["signals"]) == 4 * 3
    for size, budget in zip(told["budgets"], (32, 64), strict=True):
        assert (size["budget"], size["ratio"]) == (budget, None)
        assert 24 < size["strategies"] <= 72
        assert size["replies"] % (size["strategies"] + 1) == 0
    assert not (directory / "validation.json").exists()
    assert not (directory / "validation").exists()


def test_decode_phases_and_tables(run: Run, directory: Path) -> None:
    signals = ("--signals", "entropy", "--phases", "decode,both", "--budget", 32)
    code, out, talk = run("validate", directory, *ASKED, *signals)
    assert code == 0, talk
    assert "bundled, 32 entries per kv head, question-agnostic: score in percent, full cache" in out
    for words in ("entropy", "decode", "both", "forward minus", "random controls score lower"):
        assert words in out
    assert "\x1b" not in out


def test_what_is_finished_is_not_asked_again(run: Run, directory: Path) -> None:
    """More signals, more permutations and another budget join what is there."""
    one = ("validate", directory, *ASKED, "--budget", 32, "--json")
    code, first, talk = run(*one, *ROUTE)
    assert code == 0, talk
    there = replies_in(directory, "32")
    ledger = directory / "validation" / "32-question-agnostic" / "ledger.jsonl"
    before = ledger.read_bytes()
    code, again, talk = run(*one, *ROUTE)
    assert (code, again) == (0, first)
    assert f"{there} replies are there, {there} are needed" in talk
    assert ledger.read_bytes() == before
    code, more, talk = run(*one, "--phases", "prefill", "--signals", "entropy", "--permutations", 6)
    assert code == 0, talk
    signals = json.loads(more)["budgets"][0]["signals"]
    assert [judged["signal"] for judged in signals] == ["cosine", "entropy"]
    assert signals[0] == json.loads(first)["budgets"][0]["signals"][0]
    assert len(signals[1]["random"]) == 6
    assert ledger.read_bytes().startswith(before)
    code, out, talk = run("validate", directory, *ASKED, *ROUTE, "--ratio", 0.8, "--json")
    assert code == 0, talk
    assert "beside what was found before at 32 entries per kv head" in talk
    assert [(at["budget"], at["ratio"]) for at in json.loads(out)["budgets"]] == [(32, None), (40, 0.8)]
    assert replies_in(directory, "ratio-0.8")


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_an_interrupted_validation_goes_on(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    command = ("validate", directory, *ASKED, *ROUTE, "--batch", 1, "--json", "--budget", 64)
    added = ReplyStore.add
    calls = []

    def interrupted(ledger: Any, *arguments: Any, **named: Any) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        added(ledger, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ReplyStore, "add", interrupted)
        code, _, talk = run(*command, *more)
    assert code == INTERRUPTED
    kept = replies_in(directory, "64")
    assert kept > 0
    assert f"{kept} replies are kept in" in talk
    assert not (directory / "validation.json").exists()
    code, out, talk = run(*command, *more)
    assert code == 0, talk
    assert f"{kept} replies are there" in talk
    again = replies_in(directory, "64")
    code, same, talk = run(*command, "--force", "--batch", 2)
    assert (code, same) == (0, out)
    assert f"{again} replies are there, {again} are needed" in talk


def test_other_conditions_are_not_mixed(run: Run, directory: Path) -> None:
    command = ("validate", directory, *ROUTE, "--tasks", "synthetic:single", "--length", 512, "--budget", 32)
    code, _, talk = run(*command, "--samples", 2)
    assert code == 0, talk
    told = refused(run, USAGE, "validation.json is about other questions or another profile", *command, "--samples", 3)
    assert "tasks.single.contexts is 2 there, 3 here; --force replaces it" in told
    refused(run, USAGE, "protocol is", *command, "--samples", 2, "--protocol", "question-aware")
    (directory / "validation.json").unlink()
    told = refused(run, USAGE, "has replies to other questions", *command, "--samples", 3)
    assert "--force" in told
    assert told.count("\n") == 1
    code, out, talk = run(*command, "--samples", 3, "--force", "--json")
    assert code == 0, talk
    assert json.loads(out)["tasks"]["single"]["contexts"] == 3


def test_a_damaged_file_is_replaced_only_by_force(run: Run, directory: Path) -> None:
    command = ("validate", directory, *ASKED, *ROUTE, "--budget", 32)
    (directory / "validation.json").write_text("{}")
    refused(run, USAGE, "is no kvsearch.validation/3 file: delete it and validate again", *command)
    code, _, talk = run(*command, "--force", "--quiet")
    assert (code, talk) == (0, "")
    assert json.loads((directory / "validation.json").read_text())["budgets"]


def test_damaged_replies_have_to_be_deleted(run: Run, directory: Path) -> None:
    place = directory / "validation" / "32-question-agnostic"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{")
    command = ("validate", directory, *ASKED, *ROUTE, "--budget", 32)
    for more in ((), ("--force",)):
        told = refused(
            run, USAGE, "is where replies are kept, but has something else in it: delete it", *command, *more
        )
        assert told.count("\n") <= 2  # what is to be done is said before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--signals", "cosin"), "unknown signal 'cosin'; did you mean 'cosine'"),
        (("--signals", "cosine,,ppl"), "--signals takes names with commas between them"),
        (("--signals", "entropy-literal"), "this profile has no 'entropy-literal' signal"),
        (("--phases", "decoding"), "unknown phases 'decoding'; did you mean 'decode'"),
        (("--permutations", 2), "at least 5"),
        (("--split", "report"), "split 'report' has the examples that results are reported on"),
        (("--split", "selct"), "unknown split 'selct'"),
        (("--protocol", "aware"), "unknown protocol 'aware'"),
        (("--budget", 64, "--ratio", 0.5), "give either a ratio"),
        (("--ratio", 1.5), "outside (0, 1)"),
        (("--budget", 4), "4 entries per kv head are below the 8 that snapkv always keeps"),
        (("--budget", 300), "nothing would be evicted"),
        (("--samples", 1), "task single has one context"),
        (("--max-memory", -1), "must be above 0 GB"),
        (("--depths", "10"), "none of the chosen tasks reads --depths"),
    ],
)
def test_bad_options(run: Run, directory: Path, options: tuple[object, ...], problem: str) -> None:
    told = refused(run, USAGE, problem, "validate", directory, *ASKED, *options)
    assert told.count("\n") == 1
    assert not (directory / "validation.json").exists()


def test_a_budget_above_all_prompts(run: Run, directory: Path) -> None:
    """The calibration's prompts were longer than these."""
    metadata = signal_metadata(load("bundled").fingerprint, PATTERNS, length=2000)
    save_profile(make_signals(metadata), directory / "profile.safetensors", overwrite=True)
    command = ("validate", directory, *ASKED, *ROUTE, "--budget", 1000)
    told = refused(run, USAGE, "1000 entries per kv head: nothing would be evicted from any prompt", *command)
    assert told.count("\n") == 1
    code, _, talk = run(*command[:-1], 505, "--dry-run", "--samples", 12)
    assert (code, "strategies evict nothing from them" in talk) == (0, True), talk


def test_an_unmeasured_phase(run: Run, directory: Path) -> None:
    metadata = signal_metadata(patterns=PATTERNS, phases=("prefill",))
    save_profile(make_signals(metadata), directory / "profile.safetensors", overwrite=True)
    words = "signals of the decode phase were not measured (only prefill): calibrate with it"
    refused(run, USAGE, words, "validate", directory, *ASKED, "--phases", "both")


def test_directories_without_signals(run: Run, directory: Path, tmp_path: Path) -> None:
    refused(run, USAGE, "does not exist: give the directory of a calibration", "validate", tmp_path / "no", *ASKED)
    refused(run, USAGE, "is a file: give the directory", "validate", directory / "config.json", *ASKED)
    (tmp_path / "empty").mkdir()
    refused(run, USAGE, "has no profile.safetensors", "validate", tmp_path / "empty", *ASKED)
    save_profile(make_profile(), directory / "profile.safetensors", overwrite=True)
    refused(run, USAGE, "no signals to route by: calibrate --method polykv", "validate", directory, *ASKED)


def test_the_model_is_found_or_named(run: Run, directory: Path) -> None:
    command = ("validate", directory, *ASKED, "--dry-run")
    for content in (None, "{}", "[]", '{"model": 3}'):
        (directory / "config.json").unlink(missing_ok=True)
        if content is not None:
            (directory / "config.json").write_text(content)
        refused(run, USAGE, "does not say which model was calibrated: give --model", *command)
    code, _, talk = run(*command, "--model", "bundled")
    assert code == 0, talk
    refused(run, ENVIRONMENT, "no/such", *command, "--model", "no/such", "--offline")
    save_profile(make_signals(signal_metadata(patterns=PATTERNS)), directory / "profile.safetensors", overwrite=True)
    refused(run, INCOMPATIBLE, "was made for another model", *command, "--model", "bundled")


def test_help_is_like_that_of_other_commands(run: Run) -> None:
    code, out, _ = run("validate", "--help")
    assert code == 0
    for option in ("--signals", "--phases", "--permutations", "--split", "--protocol", "--force", "--seed", "--json"):
        assert option in out
