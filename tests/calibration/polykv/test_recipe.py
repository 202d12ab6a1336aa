"""What a user writes and types about a PolyKV calibration, what it costs, and how an interrupted one goes on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save
from typer.testing import CliRunner

from kvsearch.calibration.polykv import measure
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.polykv.patterns import PAPER
from kvsearch.calibration.polykv.samples import PLACES
from kvsearch.calibration.sample_files import SAMPLES, has_samples
from kvsearch.cli import app
from kvsearch.errors import UsageError
from kvsearch.jobs.calibrate import CalibrateOptions, CalibratePolykv
from kvsearch.plan import load_plan, load_profile
from kvsearch.policies import create_policy
from tests import tiny
from tests.signals.profiles import make_signals


def typed(
    *settings: str, options: tuple[str, ...] = (), path: Path | str | None = None, **values: Any
) -> CalibratePolykv:
    """What the command line says, over a recipe file."""
    given = {"params": settings or None, "option": options or None, "model": "bundled", "output": Path("runs/x")}
    recipe = CalibrateOptions.of(path, method="polykv", **given, **values)
    assert isinstance(recipe, CalibratePolykv)
    return recipe


def written(folder: Path, text: str) -> CalibratePolykv:
    path = folder / "recipe.yaml"
    path.write_text(f"method: polykv\n{text}")
    return typed(path=path)


def shipped(name: str) -> CalibratePolykv:
    return typed(path=f"polykv-{name}")


def names_of(recipe: CalibratePolykv) -> list[str]:
    return [policy.name for policy in recipe.policies()]


def test_defaults_are_the_papers() -> None:
    recipe = typed()
    assert names_of(recipe) == list(PAPER)
    assert recipe.make_policy() == create_policy("snapkv")
    assert recipe.remarks() == []
    assert recipe.settings() == PolykvOptions().settings()
    assert (recipe.budgets, recipe.measured_phases, recipe.signals) == (
        (512,), ("prefill", "decode"), ("cosine", "ppl", "entropy"),
    )  # fmt: skip
    assert (recipe.entropy_rows, recipe.answer_tokens, recipe.protocol) == (32, 128, "question-agnostic")
    assert (recipe.batch, recipe.memory_bytes, recipe.for_strategies) == (8, None, {})
    assert not recipe.naive


def test_everything_typed() -> None:
    options = ("entropy_rows=4", "answer_tokens=5", "strategy_phases=decode")
    recipe = typed(
        "window=4", "snapkv.window=6", options=options, patterns="tova, snapkv,pyramidkv", policy="tova",
        budgets="128, 64", phases="decode", signals="entropy,ppl", route="nll", budget_signal="entropy-rows",
        protocol="question-aware", naive=True, batch=3, max_memory=1.5,
    )  # fmt: skip
    assert (recipe.policy, recipe.budgets, recipe.measured_phases) == ("tova", (64, 128), ("decode",))
    assert (recipe.signals, recipe.entropy_rows) == (("ppl", "entropy"), 4)
    assert (recipe.answer_tokens, recipe.protocol, recipe.naive) == (5, "question-aware", True)
    assert (recipe.batch, recipe.memory_bytes) == (3, 1_500_000_000)
    assert recipe.for_strategies == {"route": "nll", "budget_signal": "entropy-rows", "phases": "decode"}
    windows = [(policy.name, policy.recent_count) for policy in recipe.policies()]
    assert windows == [("tova", 0), ("snapkv", 6), ("pyramidkv", 4)]
    assert recipe.make_policy() == create_policy("tova")


@pytest.mark.parametrize("budgets", ["64,128", [64, 128], "128,64", [128, 64]])
def test_lists_are_written_in_several_ways(budgets: Any) -> None:
    assert typed(budgets=budgets).budgets == (64, 128)


def test_one_item_is_a_list(tmp_path: Path) -> None:
    recipe = written(tmp_path, "budgets: 64\npatterns: tova\npolicy: tova\nsignals: ppl")
    assert (recipe.budgets, names_of(recipe), recipe.signals) == ((64,), ["tova"], ("ppl",))
    assert typed(options=("budgets=64",)).budgets == (64,)


def test_patterns_of_a_file(tmp_path: Path) -> None:
    text = "patterns: [paper, {name: h2o, params: {recent: 8}}, {name: keydiff}]\nparams: {window: 16}\n"
    recipe = written(tmp_path, text)
    assert names_of(recipe) == [*PAPER, "keydiff"]
    h2o, *_, keydiff = recipe.policies()
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 8}), create_policy("keydiff", {"window": 16}))
    over = typed("recent=4", "keydiff.window=2", path=tmp_path / "recipe.yaml")
    h2o, *_, keydiff = over.policies()
    assert (h2o, keydiff) == (create_policy("h2o", {"recent": 4}), create_policy("keydiff", {"window": 2}))
    assert over.make_policy() == create_policy("snapkv", {"window": 16})


@pytest.mark.parametrize(
    ("phases", "measured"), [("prefill", ("prefill",)), ("decode", ("decode",)), ("both", ("prefill", "decode"))]
)
def test_phases(phases: str, measured: tuple[str, ...]) -> None:
    """Where one phase is measured, strategies can use no other."""
    options = typed(phases=phases)
    assert options.measured_phases == measured
    assert options.for_strategies == ({} if phases == "both" else {"phases": phases})
    told = typed(options=(f"strategy_phases={phases}",))
    assert (told.measured_phases, told.for_strategies) == (("prefill", "decode"), {"phases": phases})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"patterns": "paper,snapvk"}, r"unknown pattern 'snapvk'; did you mean 'snapkv'\?"),
        ({"patterns": "tova,tova", "policy": "tova"}, "patterns: must have at least one item, and each once"),
        ({"patterns": "full"}, "policy full: it agrees with itself"),
        ({"patterns": "tova,h2o"}, "policy 'snapkv', for .* is none of the patterns: name one of tova, h2o with --pol"),
        ({"policy": "snapk"}, "policy 'snapk', for strategies without a route, is none of the patterns"),
        (
            {"budgets": "16"},
            r"patterns \(snapkv is left out: it always keeps 32 .* a budget of 16: .*\): name one of h2o",
        ),
        ({"budgets": "64,x"}, r"budgets\.1: .*, not 'x'"),
        ({"budgets": "64,64"}, "budgets: must have at least one item, and each once"),
        ({"budgets": "0"}, r"budgets\.0: .*, not 0"),
        ({"budgets": "64,"}, r"budgets\.1: .*, not ''"),
        ({"phases": "prefil"}, r"unknown phases 'prefil'; did you mean 'prefill'\?"),
        ({"signals": "cosine,pl"}, r"signals\.1: .*, not 'pl'"),
        ({"signals": "cosine,cosine"}, "signals: must have at least one item, and each once"),
        ({"route": "cosin"}, r"route: 'cosin' is unknown; did you mean 'cosine'\?"),
        (
            {"route": "ppl", "signals": "cosine,entropy"},
            "route: is ppl, which is not measured: ask for signals with ppl",
        ),
        ({"route": "error", "signals": "ppl"}, "route: is error, which is not measured: ask for signals with cosine"),
        (
            {"budget_signal": "nll-mean", "signals": "entropy"},
            "--budget-signal: is nll-mean, .* signals with ppl",
        ),
        ({"budget_signal": "entropy", "signals": "ppl"}, "which is not measured: ask for signals with entropy"),
        ({"budget_signal": "entropy-literal"}, "is entropy-literal, which only older profiles have: entropy is"),
        ({"protocol": "aware"}, r"unknown protocol 'aware'; did you mean 'question-aware'\?"),
        ({"batch": 0}, "batch: "),
        ({"max_memory": 0.0}, "--max-memory: "),
        ({"max_memory": float("inf")}, "--max-memory: "),
        ({"normalization": "effect"}, "method polykv has no option 'normalization'"),
    ],
)
def test_what_cannot_be_typed(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        typed(**values).make_policy()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("strategy_phases=both", "phases=decode"), "--strategy-phases: is both, but only decode is measured"),
        (("entropy_rows=0",), "--entropy-rows: "),
        (("answer_tokens=x",), "--answer-tokens: "),
        (("bugdets=64",), r"method polykv has no option 'bugdets'; did you mean 'budgets'\?"),
    ],
)
def test_options_that_cannot_be(options: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        typed(options=options)


def test_all_mistakes_of_a_file_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        written(tmp_path, "budgets: [x]\npatterns: [{name: tova, window: 3}]\nphases: none\ncolour: red\n")
    assert all(word in str(caught.value) for word in ("budgets.0: ", "patterns.0", "phases: ", "colour: unknown key"))
    assert "recipe.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"budgets": "64,x"}, "budgets.1: "),
        ({"signals": "cosine"}, "--route: is ppl, which is not measured"),  # the recipe's, which it did measure
        ({"batch": 0}, "--batch: "),
    ],
)
def test_what_is_typed_over_a_recipe_is_blamed_for_itself(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        typed(path="polykv-figure3", **values)
    assert problem in str(caught.value)
    assert "polykv-figure3.yaml is not valid, 1 problem" not in str(caught.value)
    assert str(caught.value).startswith(("--", "what was typed over ", "budgets.1: "))
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: polykv\nphases: none\n")
    with pytest.raises(UsageError) as caught:
        typed(path=mine, **values)
    assert str(caught.value).startswith(f"{mine} is not valid, 1 problem:\n  phases: ")


@pytest.mark.parametrize("name", ["paper", "sweep", "figure3", "bundled"])
def test_what_a_run_resolved_is_a_recipe(name: str, tmp_path: Path) -> None:
    recipe = typed("pyramidkv.kernel=5" if name != "bundled" else "snapkv.kernel=5", path=f"polykv-{name}")
    resolved = recipe.resolved()
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved.keys() == PolykvOptions.model_fields.keys() - {"batch", "max_memory", "seed"}
    assert [item["params"] for item in resolved["patterns"]] == [policy.parameters() for policy in recipe.policies()]
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(resolved))
    again = typed(path=path)
    assert again.policies() == recipe.policies()
    assert again.resolved() == resolved


def test_how_it_is_run_is_not_what_is_measured() -> None:
    assert typed(batch=1, max_memory=3.0).resolved() == typed().resolved()
    assert typed(naive=True).resolved() != typed().resolved()


def test_the_shipped_recipes() -> None:
    assert shipped("paper").resolved() == typed().resolved()
    assert shipped("sweep").settings() == PolykvOptions(budgets=(128, 256, 512, 768, 1024)).settings()
    assert names_of(shipped("sweep")) == list(PAPER)
    figure3 = shipped("figure3")
    assert (figure3.measured_phases, figure3.signals) == (("prefill",), ("ppl", "entropy"))
    assert figure3.for_strategies == {"route": "ppl", "budget_signal": "entropy", "phases": "prefill"}
    bundled = shipped("bundled")
    assert bundled.budgets == (32, 64, 128)
    assert names_of(bundled) == [name for name in PAPER if name != "pyramidkv"]
    assert max(policy.sink_count + policy.recent_count for policy in bundled.policies()) == 8
    assert bundled.remarks() == []


def test_scope() -> None:
    data = tiny.calibration_data(60, 80, questions=3)
    assert typed().scope(data) == "6 questions after 2 contexts"
    assert typed(protocol="question-aware").scope(data) == "6 contexts with a question"


# --- the command --------------------------------------------------------------------------------------------------


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.calibration_data(90, 100, questions=2)
    contexts = [
        {"text": c.text, "questions": [{"question": p.question, "answer": p.answer} for p in c.questions]}
        for c in made.contexts
    ]
    path = tmp_path_factory.mktemp("data") / "short.json"
    path.write_text(json.dumps({"name": "short", "prompt": made.prompt, "contexts": contexts}))
    return path


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Run:
    """A PolyKV calibration of the bundled model into one directory: exit code, output, talk."""

    def command(*arguments: object) -> tuple[int, str, str]:
        words = ("calibrate", "bundled", "-o", tmp_path / "run", "--data", data, "--method", "polykv", *arguments)
        result = CliRunner().invoke(app, [str(word) for word in words])
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return command


class Calibrations:
    """Stands for `calibrate_polykv`: keeps a file for every call, and is interrupted as often as `stops` says."""

    def __init__(self) -> None:
        self.stops, self.empty, self.broken = 0, False, False
        self.calls: list[tuple[PolykvOptions, list[str], int, int]] = []

    def calibrate_polykv(
        self, loaded: Any, data: Any, options: PolykvOptions, policies: Any, progress: Any, directory: Path,
        started: Callable[[], None],
    ) -> Any:  # fmt: skip
        if self.broken:
            raise UsageError("nothing is evicted")
        started()
        folder = directory / SAMPLES
        folder.mkdir(exist_ok=True)
        there = len(list(folder.glob("0*.safetensors")))
        self.calls.append((options, [policy.name for policy in policies], options.seed, there))
        if self.empty:
            raise KeyboardInterrupt
        whole = {name: np.array([there, there]) for name in PLACES}
        (folder / f"{there:06d}-0000.safetensors").write_bytes(save(whole))
        if self.stops:
            self.stops -= 1
            raise KeyboardInterrupt
        return make_signals()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Calibrations:
    stand_in = Calibrations()
    monkeypatch.setattr(measure, "calibrate_polykv", stand_in.calibrate_polykv)
    return stand_in


def test_the_papers_strategy_of_figure_3(run: Run, made: Calibrations, tmp_path: Path) -> None:
    """Named as in the documentation: what is measured, and what strategies should use of it."""
    code, _, talk = run("--route", "cosine", "--budget-signal", "ppl", "--phases", "prefill", "--seed", 3)
    assert code == 0, talk
    ((options, names, seed, _),) = made.calls
    assert (options.measured_phases, seed) == (("prefill",), 3)
    assert options.for_strategies == {"route": "cosine", "budget_signal": "ppl", "phases": "prefill"}
    assert f"calibrating bundled by polykv for {', '.join(names)} on 4 questions after 2 contexts from short" in talk
    assert f"next: kvsearch export {tmp_path / 'run'} --budget 512 -o {tmp_path / 'run' / 'plan.json'}" in talk
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config = config["content"]
    assert (config["model"], config["seed"], config["dtype"], config["revision"]) == ("bundled", 3, "auto", None)
    assert config["recipe"] == typed(route="cosine", budget_signal="ppl", phases="prefill").resolved()
    assert load_profile(tmp_path / "run" / "profile.safetensors").metadata.method == "polykv"


def test_remarks_are_told(run: Run, made: Calibrations) -> None:
    code, _, talk = run("--budgets", 16, "--policy", "tova", "--set", "pyramidkv.window=9")
    assert code == 0, talk
    assert "warning: snapkv is left out: it always keeps 32 entries" in talk
    assert made.calls[0][1] == [name for name in PAPER if name not in ("snapkv", "cake")]


def test_an_interrupted_calibration_goes_on(run: Run, made: Calibrations, tmp_path: Path) -> None:
    made.stops = 2
    assert [run("--budgets", 64)[0] for _ in range(3)] == [130, 130, 0]
    assert [there for *_, there in made.calls] == [0, 1, 2]
    assert (tmp_path / "run" / "profile.safetensors").exists()
    before = contents(tmp_path / "run")
    code, _, talk = run("--budgets", 64)
    assert (code, len(made.calls)) == (0, 3)
    assert talk.startswith("this run was finished: nothing was left to do")
    for other, words in (
        (("--budgets", 32), "recipe.budgets is [64] there, [32] here"),
        (("--budgets", 64, "--dtype", "float32"), "dtype is 'auto' there, 'float32' here"),
    ):
        code, _, talk = run(*other)
        assert (code, len(made.calls)) == (2, 3)
        assert f"holds another calibration: {words}; choose another --output, or --force to start anew" in talk
    assert contents(tmp_path / "run") == before


def test_an_interrupted_calibration_goes_on_in_other_batches(run: Run, made: Calibrations) -> None:
    made.stops = 1
    assert run("--budgets", 64)[0] == 130
    assert run("--budgets", 64, "--batch", 1, "--max-memory", 2)[0] == 0
    assert (made.calls[1][0].batch, made.calls[1][0].memory_bytes, made.calls[1][3]) == (1, 2 * 10**9, 1)


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (("--budgets", "64,128"), "recipe.budgets is [64] there, [64, 128] here"),
        (("--budgets", 64, "--seed", 1), "seed is 0 there, 1 here"),
        (("--budgets", 64, "--set", "snapkv.window=8"), "recipe.patterns.4.params.window is 32 there, 8 here"),
        (("--budgets", 64, "--questions", 2), "questions is 4 there, 2 here"),
        (("--budgets", 64, "--dtype", "bfloat16"), "dtype is 'auto' there, 'bfloat16' here"),
    ],
)
def test_another_calibration_does_not_go_on(
    arguments: tuple[object, ...], difference: str, run: Run, made: Calibrations, tmp_path: Path
) -> None:
    made.stops = 1
    assert run("--budgets", 64)[0] == 130
    before = (tmp_path / "run" / "config.json").read_bytes()
    code, _, talk = run(*arguments)
    assert (code, len(made.calls)) == (2, 1)
    assert f"{tmp_path / 'run'} holds another unfinished calibration: {difference}" in talk
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    code, _, talk = run(*arguments, "--force")
    assert code == 0, talk
    assert made.calls[1][3] == 0  # nothing is taken over


def test_a_forced_calibration_can_be_interrupted(run: Run, made: Calibrations) -> None:
    assert run("--budgets", 64)[0] == 0
    made.stops, made.empty = 1, True
    assert run("--budgets", 32, "--force")[0] == 130
    assert "exists and is not empty" in run("--budgets", 32)[2]  # the old profile is not taken for that of the new one
    made.empty = False
    assert run("--budgets", 32, "--force")[0] == 130
    assert run("--budgets", 32)[0] == 0
    assert [there for *_, there in made.calls] == [0, 0, 0, 1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_force_deletes_nothing_before_all_is_checked(run: Run, made: Calibrations, tmp_path: Path) -> None:
    """A budget that evicts nothing, or a model that does not load: what is there stays, finished or not."""
    assert run("--budgets", 64)[0] == 0
    before = contents(tmp_path / "run")
    made.broken = True
    assert run("--budgets", 32, "--force")[0] == 2
    assert run("--budgets", 32, "--force", "--device", "cuda:99")[0] == 3
    assert contents(tmp_path / "run") == before
    made.broken, made.stops = False, 1
    assert run("--budgets", 32, "--force")[0] == 130
    assert contents(tmp_path / "run")["profile.safetensors"] == before["profile.safetensors"]
    halfway = contents(tmp_path / "run")
    made.broken = True
    assert run("--budgets", 16, "--policy", "tova", "--force")[0] == 2
    assert contents(tmp_path / "run") == halfway


def test_force_deletes_only_what_is_ours(run: Run, made: Calibrations, tmp_path: Path) -> None:
    made.stops = 1
    assert run("--budgets", 64)[0] == 130
    mine = [tmp_path / "run" / "notes.txt", *(tmp_path / "run" / SAMPLES / name for name in ("a.safetensors", "b"))]
    for path in mine:
        path.write_text("mine")
    assert run("--budgets", 32, "--force")[0] == 0
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert made.calls[1][3] == 0
    assert not has_samples(tmp_path / "run")  # a file of somebody else's makes no calibration unfinished


def test_an_interruption_says_what_is_kept(run: Run, made: Calibrations, tmp_path: Path) -> None:
    made.stops = 3
    assert f"kept in {tmp_path / 'run'}: 2 questions; the same command goes on with the others" in run()[2]
    assert f"kept in {tmp_path / 'run'}: 4 questions; the same command goes on with the others" in run()[2]
    assert "2 questions; " in (talk := run("--force")[2])
    assert "the same command, without --force, goes on with the others" in talk
    made.empty = True
    assert "no question is finished: the same command begins anew" in run("--force")[2]


@pytest.mark.parametrize("stops", [0, 1])
@pytest.mark.parametrize("verb", ["export", "show"])
def test_an_unfinished_calibration_is_no_profile(
    stops: int, verb: str, run: Run, made: Calibrations, tmp_path: Path
) -> None:
    """Even where a profile is there that it is going to replace."""
    directory, kept = tmp_path / "run", "what is kept of it: 2 questions" if stops else "nothing of it is kept"
    if stops:
        assert run()[0] == 0
    made.stops, made.empty = stops, not stops
    assert run("--budgets", 64, "--force")[0] == 130
    result = CliRunner().invoke(app, [verb, str(directory), *(("-o", str(tmp_path / "a.json")) * (verb == "export"))])
    assert (result.exit_code, result.stderr) == (
        2,
        f"kvsearch: error: the calibration in {directory} is not finished, {kept}: repeat its command, "
        f"kvsearch calibrate bundled ... -o {directory}, to go on\n",
    )
    if stops:
        assert CliRunner().invoke(app, ["show", str(directory / "profile.safetensors")]).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--budgets", "64,95"),
        ("--budgets", 64, "--option", "answer_tokens=1", "--protocol", "question-aware"),
    ],
)
def test_a_dry_run_fails_as_the_run_would(arguments: tuple[object, ...], run: Run, tmp_path: Path) -> None:
    code, _, dry = run(*arguments, "--dry-run")
    assert code == 2
    assert not (tmp_path / "run").exists()
    code, _, talk = run(*arguments)
    assert code == 2
    assert talk.endswith(dry.partition("kvsearch: error: ")[2])


def test_a_dry_run_checks_the_directory(run: Run, made: Calibrations, tmp_path: Path) -> None:
    made.stops = 1
    assert run("--budgets", 64)[0] == 130
    before = contents(tmp_path / "run")
    code, _, talk = run("--budgets", 32, "--dry-run")
    assert code == 2
    assert "holds another unfinished calibration: recipe.budgets is [64] there, [32] here" in talk
    code, _, talk = run("--budgets", 64, "--dry-run")
    assert code == 2
    assert "was measured with other model weights" in talk  # what stands for samples here says nothing of them
    assert run("--budgets", 64, "--dry-run", "--force")[0] == 0
    assert contents(tmp_path / "run") == before
    assert run("--budgets", 64)[0] == 0
    assert "this run was finished" in run("--budgets", 64, "--dry-run")[2]
    assert "holds another calibration" in run("--budgets", 32, "--dry-run")[2]
    other = CliRunner().invoke(app, ["calibrate", "bundled", "-o", str(tmp_path / "run"), "--dry-run"])
    assert (other.exit_code, other.stdout) == (2, "")


@pytest.mark.parametrize(
    ("signals", "route", "more"),
    [("ppl", "ppl", ""), ("entropy", "none", " --budget-signal entropy"), ("entropy,cosine", "cosine", "")],
)
def test_the_command_that_comes_next_works(signals: str, route: str, more: str, run: Run, tmp_path: Path) -> None:
    patterns = ("--patterns", "tova,streaming", "--policy", "tova", "--budgets", 32, "--questions", 1)
    code, _, talk = run("--signals", signals, *patterns)
    assert code == 0, talk
    _, following = (shlex.split(line)[1:] for line in talk.split("next: ")[1:])
    written = tmp_path / "run" / "plan.json"
    assert following == ["export", str(tmp_path / "run"), "--budget", "32", *more.split(), "-o", str(written)]
    result = CliRunner().invoke(app, following)
    assert result.exit_code == 0, result.stderr
    settings = load_plan(written).provenance.settings
    assert settings["route"] == (None if route == "none" else route)
    assert settings["budget_signal"] == ("entropy" if more else "uniform")


def test_a_directory_of_something_else_is_refused(run: Run, made: Calibrations, tmp_path: Path) -> None:
    (tmp_path / "run" / SAMPLES).mkdir(parents=True)
    mine = tmp_path / "run" / SAMPLES / "mine.safetensors"
    mine.write_text("mine")  # without a configuration it may be anything
    code, _, talk = run()
    assert (code, made.calls) == (2, [])
    assert "holds something else than a calibration" in talk
    assert mine.read_text() == "mine"


def test_a_calibration_that_finished_nothing_may_change(run: Run, made: Calibrations) -> None:
    made.empty = True
    assert run("--budgets", 64)[0] == 130
    made.empty = False
    code, _, talk = run("--budgets", 32)
    assert code == 0, talk
    assert made.calls[1][0].budgets == (32,)


def test_a_dry_run_says_what_it_costs(run: Run, made: Calibrations, tmp_path: Path) -> None:
    code, out, talk = run("--recipe", "polykv-bundled", "--budgets", 64, "--dry-run", "--json", "--tflops", 0.5)
    assert (code, talk) == (0, "")
    found = json.loads(out)
    cost = found["estimate"]
    assert (cost["tflops"], cost["samples"], cost["runs"]) == (0.5, 4, 4 * (1 + 8 * 2 * 6))
    assert cost["sweep"]["seconds"] == pytest.approx(cost["sweep"]["flops"] / 0.5e12)
    assert found["recipe"]["budgets"] == [64]
    code, again, talk = run("--recipe", "polykv-bundled", "--budgets", 64, "--dry-run", "--tflops", 0.5)
    assert (code, again) == (0, out)
    for words in (
        "4 continuations, 388 runs of the model as the paper does it",
        f"(--naive): {cost['naive']['forward_tokens']:,.0f} forward tokens", "at 0.5 TFLOP/s",
        f"{cost['speedup']:.3g} times less arithmetic", "memory besides the weights: ", "96 disturbances at a time",
    ):  # fmt: skip
        assert words in talk
    assert made.calls == []
    assert not (tmp_path / "run").exists()


def test_a_dry_run_refuses_what_does_not_fit(run: Run) -> None:
    code, _, talk = run("--budgets", 64, "--dry-run", "--max-memory", 0.001)
    assert code == 2
    assert "takes" in talk
    assert "--max-memory is 0.001 GB: lower --batch or raise it" in talk


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--tflops", 5), "--tflops is for what --dry-run says of methods polykv, probe and query_bank: leave it out"),
        (("--budgets", 64, "--tflops", 0, "--dry-run"), "a rate of 0 TFLOP/s must be above 0"),
        (("--patterns", "tova,h2o"), "name one of tova, h2o with --policy"),
        (("--normalization", "effect"), "method polykv has no option 'normalization'"),
    ],
)
def test_commands_that_cannot_be(arguments: tuple[object, ...], problem: str, run: Run, made: Calibrations) -> None:
    code, _, talk = run(*arguments)
    assert (code, made.calls) == (2, [])
    assert problem in talk


@pytest.mark.parametrize("option", [("--batch", "4"), ("--patterns", "tova"), ("--naive",), ("--route", "ppl")])
def test_options_of_polykv_are_not_those_of_others(option: tuple[str, ...], tmp_path: Path) -> None:
    words = ["calibrate", "bundled", "-o", str(tmp_path / "run"), "--method", "lukv", *option]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"method lukv has no option {option[0].removeprefix('--')!r}" in result.stderr
