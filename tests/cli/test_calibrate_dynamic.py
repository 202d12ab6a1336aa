"""Calibrating lava, cake and adakv from the command line, on the bundled model and short contexts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsearch.cli.console import Console
from kvsearch.cli.render import show_view
from kvsearch.errors import UsageError
from kvsearch.plan import Profile, load_plan, load_profile
from kvsearch.report.dynamic import is_dynamic, remarks
from kvsearch.report.profile import profile_view
from tests import tiny
from tests.cli.conftest import Run, invoke
from tests.cli.test_bad_input import INCOMPATIBLE, USAGE, refused

METHODS = ("lava", "cake", "adakv")
CONTEXTS, QUESTIONS = 3, 2
methods = pytest.mark.parametrize("method", METHODS)
Calibrated = Callable[..., Path]


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration file of short contexts in the bundled model's language."""
    data = tiny.calibration_data(200, 220, 240, questions=QUESTIONS)
    contexts = [
        {"text": c.text, "questions": [{"question": p.question, "answer": p.answer} for p in c.questions]}
        for c in data.contexts
    ]
    path = tmp_path_factory.mktemp("short") / "short.json"
    path.write_text(json.dumps({"name": "short", "prompt": data.prompt, "contexts": contexts}))
    return path


@pytest.fixture(scope="session")
def calibrated_by(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """The directory of a calibration by a method with options; each is run once."""
    known: dict[tuple[object, ...], Path] = {}

    def directory(*arguments: object) -> Path:
        if arguments not in known:
            known[arguments] = tmp_path_factory.mktemp("dynamic") / "run"
            code, _, talk = invoke("calibrate", "bundled", "-o", known[arguments], "--data", short, *arguments)
            assert code == 0, talk
        return known[arguments]

    return directory


def profile_in(directory: Path) -> Profile:
    return load_profile(directory / "profile.safetensors")


def shown(directory: Path, capsys: pytest.CaptureFixture[str], ratio: float = 0.8, as_json: bool = False) -> str:
    show_view(profile_view(profile_in(directory), ratio), Console(as_json=as_json))
    return capsys.readouterr().out


@methods
def test_calibrate_export_and_show(
    method: str, run: Run, calibrated_by: Calibrated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = calibrated_by("--method", method)
    config = json.loads((directory / "config.json").read_text())["content"]
    assert (config["recipe"]["method"], config["recipe"]["protocol"]) == (method, "question-agnostic")
    assert config["recipe"]["policy"] == {"adakv": "snapkv"}.get(method, method)
    made = profile_in(directory)
    assert (made.metadata.method, made.metadata.questions, made.metadata.floor) == (method, CONTEXTS, 32)
    for target, total in ((("--ratio", 0.7, "--length", 1000), 300 * 24), (("--budget", 50), 50 * 24)):
        path = tmp_path / f"{total}.json"
        code, out, talk = run("export", directory, *target, "-o", path, "--json")
        assert code == 0, talk
        assert json.loads(out)["total"] == load_plan(path).total == total
    page = shown(directory, capsys)
    for title in (
        "local eviction ratio at 0.8", "its standard deviation over the prompts", "rank correlation",
        "entries placed elsewhere than by the dynamic rule", "a static table moves",
    ):  # fmt: skip
        assert title in page
    assert "\x1b" not in page


@methods
def test_the_plan_runs(method: str, run: Run, calibrated_by: Calibrated, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run("export", calibrated_by("--method", method), "--ratio", 0.6, "-o", plan)[0] == 0
    code, out, talk = run("generate", "bundled", "--plan", plan, "--max-new-tokens", 3, "--json")
    assert code == 0, talk
    assert json.loads(out)["text"]


@methods
def test_calibrating_twice_gives_the_same_bytes(
    method: str, run: Run, calibrated_by: Calibrated, short: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    assert run("calibrate", "bundled", "-o", again, "--data", short, "--method", method)[0] == 0
    for name in ("profile.safetensors", "config.json"):
        assert (again / name).read_bytes() == (calibrated_by("--method", method) / name).read_bytes()


def test_with_the_question_in_the_prompt(calibrated_by: Calibrated) -> None:
    directory = calibrated_by("--method", "lava", "--protocol", "question-aware")
    made = profile_in(directory)
    assert made.metadata.provenance.settings["protocol"] == "question-aware"
    assert made.arrays["question_context"].tolist() == [0, 0, 1, 1, 2, 2]
    assert made.metadata.length > profile_in(calibrated_by("--method", "lava")).metadata.length


def test_fewer_questions(calibrated_by: Calibrated) -> None:
    assert profile_in(calibrated_by("--method", "lava", "--questions", 3)).metadata.questions == 2
    aware = calibrated_by("--method", "lava", "--questions", 3, "--protocol", "question-aware")
    assert profile_in(aware).metadata.questions == 3


def test_options_and_parameters_reach_the_profile(calibrated_by: Calibrated) -> None:
    options = ("--option", "floor_share=0.4", "--option", "layers=planned", "--set", "window=16", "--set", "sinks=2")
    metadata = profile_in(calibrated_by("--method", "lava", *options)).metadata
    settings = metadata.provenance.settings
    assert (settings["floor_share"], settings["layers"], settings["heads"]) == (0.4, "planned", "dynamic")
    assert (metadata.policy.params["window"], metadata.floor) == (16, 18)


def test_what_is_said_while_it_runs(run: Run, short: Path, tmp_path: Path) -> None:
    arguments = ("calibrate", "bundled", "-o", tmp_path / "run", "--data", short, "--method")
    _, _, talk = run(*arguments, "cake")
    said = " ".join(talk.split())
    assert "calibrating bundled by cake for cake on 3 contexts without their questions from short" in said
    assert "tau1 1, tau2 1: CAKE's authors tuned none for bundled at 1024 entries per kv head" in said
    assert "at ratio 0.8 a static table moves " in said
    _, _, talk = run(*arguments, "adakv", "--protocol", "question-aware", "--force")
    assert "on 6 contexts with a question from short" in " ".join(talk.split())
    code, out, talk = run(*arguments, "lava", "--force", "--quiet", "--json")
    assert (code, talk) == (0, "")
    assert json.loads(out)["method"] == "lava"


def test_a_fit_says_what_it_is_worth(
    calibrated_by: Calibrated, run: Run, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--method", "cake", "--option", "exponents=fit", "--fit-ratio", 0.6)
    code, _, talk = run("calibrate", "bundled", "-o", tmp_path / "run", "--data", short, *options)
    assert code == 0, talk
    made = profile_in(tmp_path / "run")
    assert made.arrays["fit_loss"].shape == (25, CONTEXTS * QUESTIONS)
    assert made.metadata.provenance.settings["fit_ratio"] == 0.6
    said, page = " ".join(talk.split()), " ".join(shown(tmp_path / "run", capsys).split())
    for text in (said, page):
        assert "fitted" in text
        assert "nats per answer over (1, 1), which loses " in text
        assert "at ratio 0.6; chosen on one half of the questions, " in text


def test_where_exponents_come_from(calibrated_by: Calibrated) -> None:
    given = calibrated_by(
        "--method", "cake", "--option", "exponents=fixed", "--option", "tau1=1.6", "--option", "tau2=2"
    )
    assert remarks(profile_in(given))[0] == "exponents tau1 1.6, tau2 2: as given"


def test_one_prompt_cannot_tell(calibrated_by: Calibrated, capsys: pytest.CaptureFixture[str]) -> None:
    directory = calibrated_by("--method", "adakv", "--questions", 1)
    page = " ".join(shown(directory, capsys).split())
    assert "unknown: one question cannot tell" in page
    assert "one prompt cannot tell what a static table loses against the dynamic rule: calibrate on more" in page
    assert "nan" not in page
    found = json.loads(shown(directory, capsys, as_json=True))
    assert found["misplaced"][0]["unseen"] is None


def test_show_as_json(calibrated_by: Calibrated, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(calibrated_by("--method", "lava"), capsys, 0.5, as_json=True))
    assert (found["metadata"]["method"], found["ratio"]) == ("lava", 0.5)
    assert [row["ratio"] for row in found["misplaced"]] == [0.5, 0.8, 0.9]
    half, _, most = found["misplaced"]
    assert 0 < half["static"] < half["unseen"] < half["even"]
    assert most["static"] == pytest.approx(0, abs=1e-6), "a tenth of these prompts is less than what is always kept"
    assert len(found["local_ratios"]) == len(found["deviation"]) == 6
    assert found["stability"][1]["verdict"]
    assert found["remarks"]


def test_a_plan_cannot_be_judged_without_importance(calibrated_by: Calibrated, calibrated: Path) -> None:
    made = profile_in(calibrated_by("--method", "lava"))
    with pytest.raises(UsageError, match=r"^--plan needs a LU-KV profile: a lava profile does not say what entries"):
        profile_view(made, 0.8, load_plan(calibrated / "plan.json"))
    assert is_dynamic(made)
    other = profile_in(calibrated)
    assert not is_dynamic(other)
    assert remarks(other) == []


@pytest.mark.parametrize("recipe", ["lava", "lava-planned-layers", "lava-equal-heads", "cake", "cake-fit", "adakv"])
def test_recipes_by_name(recipe: str, run: Run, tmp_path: Path) -> None:
    code, out, talk = run("calibrate", "bundled", "--recipe", recipe, "-o", tmp_path / "run", "--dry-run")
    assert code == 0, talk
    assert json.loads(out)["recipe"]["method"] == recipe.partition("-")[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "lavva"), "unknown method 'lavva'; did you mean 'lava'?"),
        (("--method", "lava", "--option", "floor=0.1"), "method lava has no option 'floor'"),
        (("--method", "lava", "--option", "heads=dynamc"), "unknown heads 'dynamc'; did you mean 'dynamic'?"),
        (("--method", "lava", "--option", "heads"), "--option 'heads' is not of the form key=value"),
        (("--method", "lava", "--normalization", "layer"), "method lava has no option 'normalization'"),
        (("--method", "cake", "--no-gap"), "method cake has no option 'gap'"),
        (("--method", "adakv", "--fit-ratio", 0.5), "method adakv has no option 'fit_ratio'"),
        (("--method", "cake", "--fit-ratio", 0.5), "--fit-ratio: is read with exponents fit only, and they are auto"),
        (("--protocol", "question-aware"), "method lukv has no option 'protocol'"),
        (("--method", "lava", "--protocol", "aware"), "did you mean 'question-aware'?"),
        (("--method", "lava", "--policy", "d2o"), "d2o merges what it evicts"),
        (("--method", "lava", "--policy", "lva"), "did you mean 'lava'?"),
        (("--method", "lava", "--set", "windw=8"), "did you mean 'window'?"),
        (("--method", "lava", "--recipe", "cake"), "is a recipe of method cake, not lava"),
        (("--recipe", "lava-planned"), "unknown recipe 'lava-planned'; did you mean"),
        (("--method", "lava", "--policy", "keydiff"), "method lava: keydiff scores entries below 0"),
        (("--method", "adakv", "--set", "window=150"), "too short for snapkv: 150 entries are always kept"),
        (("--method", "cake", "--option", "exponents=fit", "--fit-ratio", 0.95), "below the 32 that are always kept"),
    ],
)
def test_bad_requests(run: Run, short: Path, tmp_path: Path, arguments: tuple[Any, ...], words: str) -> None:
    refused(run, USAGE, words, "calibrate", "bundled", "-o", tmp_path / "run", "--data", short, *arguments)
    assert not (tmp_path / "run" / "profile.safetensors").exists()


def test_scores_that_are_not_finite(run: Run, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsearch.policies.snapkv import SnapKV

    score = SnapKV.score
    monkeypatch.setattr(SnapKV, "score", lambda self, seen: score(self, seen) * float("nan"))
    arguments = ("calibrate", "bundled", "-o", tmp_path / "run", "--data", short, "--method", "adakv")
    refused(run, INCOMPATIBLE, "layer 0: the scores of snapkv are not finite", *arguments)


def test_a_budget_below_what_is_always_kept(run: Run, calibrated_by: Calibrated, tmp_path: Path) -> None:
    directory = calibrated_by("--method", "lava")
    refused(run, USAGE, "below the 32 that are always kept", "export", directory, "--budget", 31, "-o", tmp_path / "p")
