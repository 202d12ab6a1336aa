"""kvsearch run on the bundled model: from nothing to a plan, in one command that goes on where it was killed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvsearch.cli.console import Console
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.run import RunOptions, prepare_form, resolve_plan_length
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.plan import Size, load_plan
from kvsearch.report.integrity import Verification
from kvsearch.runs.identity import RunConfig
from kvsearch.runs.run import Run, read_contexts
from kvsearch.runtime.speed import Speed
from tests.cli.conftest import done, invoke
from tests.shared import finished_once

EVALUATIONS = 24
FEW = (
    *("--policies", "snapkv", "--form", "linear", "--fit", 4, "--measure", 2, "--samples", 4),
    *("--evaluations", EVALUATIONS),
)


@pytest.fixture(scope="module")
def questions(inputs: Path) -> Path:
    """A task file of forty short contexts: a fifth each to fit and to choose on."""
    return inputs / "mine.jsonl"


def command(questions: Path, directory: Path, *more: object) -> tuple[object, ...]:
    return ("run", "bundled", "--tasks", f"jsonl:{questions}", *FEW, "-o", directory, *more)


@pytest.fixture(scope="module")
def finished(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a finished run, and what it said."""

    def make(folder: Path) -> tuple[int, str, str]:
        return invoke(*command(questions, folder / "best", "--budgets", "40,60"))

    finished = finished_once(tmp_path_factory, "run", make)
    return finished.folder / "best", finished.talk


def ledger(directory: Path) -> list[dict[str, Any]]:
    """The lines of a ledger."""
    return [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_size_gets_a_plan_that_holds_its_entries(finished: tuple[Path, str], tmp_path: Path) -> None:
    directory, talk = finished
    verified = Verification([directory]).artefacts
    assert {one.state for one in verified} == {"whole"}
    sizes = json.loads((directory / "run.json").read_bytes())["sizes"]
    for budget in (40, 60):
        plan, found = load_plan(directory / f"plan-{budget}.json"), sizes[str(budget)]
        assert plan.total == budget * 24 == found["total"]
        assert plan.provenance.method == "run"
        outcome = found["chosen"]
        dropped = outcome["screening"]["dropped"]
        kinds = {one["name"]: one["kind"] for one in [*outcome["methods"], *dropped]}
        assert len(kinds) == len(outcome["methods"]) + len(dropped)
        written = outcome["winner"] or outcome["best"]
        assert outcome["level"] in (0.025, 0.05)  # two sizes share 5%
        assert {kinds[name] for name in ("probe", "lukv:probe", "adakv:probe", "query_bank")} == {"candidate"}
        assert {kinds[name] for name in ("snapkv", "lukv:snapkv", "cake", "lava", "streaming")} == {"baseline"}
        assert written in kinds
        assert {"full", outcome["best"], written} <= found["report"]["scores"].keys()
        assert (found["loss"]["low"], found["loss"]["high"]) == (None, None) or found["loss"]["contexts"] >= 5
        assert f"{budget} entries per kv head: {found['decision']}" in talk
        assert "full cache minus plan" in found["reported"]
        assert found["reported"] in talk
        scores = {name: score["mean"] for name, score in found["report"]["scores"].items()}
        parts = found["report"].get("parts", {})
        assert sum(part["mean"] for part in parts.values()) == pytest.approx(scores[written] - scores[found["uniform"]])
    assert invoke("export", directory / "plan-40.json", "--to", "folder", "-o", tmp_path / "deploy")[0] == 0
    assert sizes["40"]["reported"].partition(":")[0] in (tmp_path / "deploy" / "README.md").read_text()
    following = [shlex.split(line)[2:] for line in talk.splitlines() if line.startswith("next: kvsearch")]
    assert [words[0] for words in following] == ["show", "evaluate"]
    assert following[1][following[1].index("--split") :][:2] == ["--split", "report"]  # not what it was chosen by
    assert following[1][following[1].index("--samples") :][:2] == ["--samples", "4"]
    done(*following[0])
    done(*following[1], "--samples", 1)
    again = RunOptions.of(directory / "config.json", output=Path("elsewhere"))
    assert again.to_recipe() == json.loads((directory / "config.json").read_bytes())["options"]
    assert "stage 1 of 7: fit rankings" in talk  # fits, a measurement, a search, two choices, two reports


@pytest.mark.slow
def test_plans_are_searched_on_from_what_was_solved(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    sizes = json.loads((directory / "run.json").read_bytes())["sizes"]
    refined = []
    for budget in ("40", "60"):
        starts = json.loads((directory / "refine" / "config.json").read_bytes())["content"]["starts"]
        assert {"probe", "lukv:probe", "half:probe", "lukv:snapkv", "joint"} & set().union(*starts)
        plans = [load_plan(path) for path in sorted((directory / "refine").glob(f"plan-{budget}-*.json"))]
        assert all(plan.total == int(budget) * 24 for plan in plans)
        outcome = sizes[budget]["chosen"]
        methods = [*outcome["methods"], *outcome["screening"]["dropped"]]
        kinds = {found["name"]: found["kind"] for found in methods}
        assert kinds.get("refined", "candidate") == kinds["half:probe"] == kinds["lukv:snapkv+match"] == "candidate"
        assert ("refined" in kinds) == bool(plans)  # a search may find nothing that is better than where it starts
        assert kinds["half:snapkv"] == "baseline"
        refined += plans
    assert refined
    evaluated = {key for line in ledger(directory / "refine") for key in line.get("keys", ())}
    assert len(evaluated) <= 2 * EVALUATIONS


@pytest.mark.slow
def test_what_is_fitted_chosen_and_reported_on_is_never_the_same(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    asked = read_contexts(directory)
    chosen, reported = set(asked.chosen), set(asked.reported)
    fitted = {one for place in directory.rglob("*/contexts.json") for one in read_contexts(place.parent).fitted}
    assert len(chosen) == len(reported) == 4
    assert not chosen & reported
    assert not fitted & (chosen | reported)
    rankings = {one for name in ("probe", "query_bank") for one in read_contexts(directory / "fit" / name).fitted}
    measured, searched = (set(read_contexts(directory / name).fitted) for name in ("curves", "refine"))
    assert not rankings & measured
    assert searched
    assert not searched & (rankings | measured)
    record = load_plan(directory / "plan-40.json").provenance.contexts
    assert all(map(record.chosen.has, chosen))
    assert all(map(record.reported.has, reported))
    if "probe" in {policy.name for policy in load_plan(directory / "plan-40.json").policies}:
        assert all(map(record.fitted.has, fitted))


def test_a_quick_run_is_the_quick_recipe(questions: Path, tmp_path: Path) -> None:
    """Twenty contexts in all, of four tasks at most; what is typed wins over the recipe."""
    model = {"model": "some/model", "output": tmp_path}
    quick = RunOptions.of(**model, effort="quick")
    assert quick == RunOptions.of(recipe="quick", **model)
    assert (quick.ratio, quick.rankings, quick.refine, quick.measure, quick.samples) == (0.8, (), False, 1, 2)
    assert len(quick.find_tasks("some/model")) == 4
    assert RunOptions.of(**quick.to_recipe() | model) == quick
    mine = RunOptions.of(**model, tasks=f"jsonl:{questions}", effort="quick", budget=40, refine=True)
    assert (mine.budget, mine.ratio, mine.measure, mine.samples, mine.refine) == (40, None, 4, 8, True)
    assert RunOptions.of(**model, budget=40, effort="full") == RunOptions.of(**model, budget=40)


@pytest.mark.nightly
def test_what_can_be_had_in_a_time(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer contexts, then a quick run; a run that was begun is gone on with in its form."""
    monkeypatch.setattr(Speed, "seconds", lambda _, work: work.tokens / 100)
    options = {"model": "bundled", "tasks": f"jsonl:{questions}", "output": tmp_path / "run", "budget": 40}
    console = Console()
    whole, stages = prepare_form(RunOptions.of(**options), console, ModelLoader())
    full = sum(cost.work.tokens for cost in stages.costs) / 100

    def form_in(seconds: float) -> tuple[RunOptions, str]:
        options_of_form, _ = prepare_form(RunOptions.of(**options, time=f"{round(seconds)}s"), console, ModelLoader())
        return options_of_form, capsys.readouterr().err

    taken, talk = form_in(full + 1)
    assert (taken.to_recipe(), "nothing is left out" in talk) == (whole.to_recipe(), True)
    taken, talk = form_in(full * 0.7)
    assert f"{taken.samples} of {max(task.distinct for task in stages.encoded['select'])} for --samples" in talk
    assert taken.rankings == whole.rankings
    quick = RunOptions.of(**options, effort="quick")
    _, stages = prepare_form(quick, console, ModelLoader())
    needed = sum(cost.work.tokens for cost in stages.costs) / 100
    taken, talk = form_in(needed + 1)
    assert (taken.to_recipe(), "--effort quick: left out are rankings" in talk) == (quick.to_recipe(), True)
    with pytest.raises(UsageError, match="--time 1s: the shortest run there is takes about "):
        form_in(1)
    config = RunConfig(job="run", options=quick.to_recipe(), content={})
    with Run.open(tmp_path / "run", config):
        pass
    assert form_in(full + 1)[0].to_recipe() == quick.to_recipe()


@pytest.mark.nightly
def test_the_smallest_budget_that_is_shown_to_lose_little(questions: Path, tmp_path: Path) -> None:
    directory = tmp_path / "least"
    few = ("--rankings", "query_bank", "--no-refine", "--lose-at-most", "60%")
    needs = "a mean loss of at most 60 points with 95% confidence takes 4 contexts at least: the 4 at hand show it"
    out, talk = done(*command(questions, directory, *few, "--json"))
    assert needs in talk
    found = json.loads(out)
    last = [step for step in found["tried"] if step["confirmed"]][-1]
    plan = load_plan(directory / "plan.json")
    assert plan.total == last["budget"] * 24
    shown = plan.guarantee
    assert shown is not None
    assert (shown.loss, shown.confidence, shown.contexts, shown.tasks) == (0.6, 0.95, 4, {"mine": 4})
    assert shown.mean_loss == pytest.approx(last["loss"])
    assert found["sizes"].keys() == {str(last["budget"])}
    statement = "at most 60 points to the full cache on the mean, with 95% confidence, as shown on 4 contexts of"
    assert statement in talk
    assert all((directory / "choice" / str(step["budget"])).is_dir() for step in found["tried"])
    assert statement in done("show", directory / "plan.json")[0].replace("\n", " ")
    done("plan", "scale", directory / "plan.json", "--budget", 30, "-o", tmp_path / "scaled.json")
    assert load_plan(tmp_path / "scaled.json").provenance.guarantee is None


def test_options_of_earlier_versions_are_those_of_today(tmp_path: Path) -> None:
    """As typed, which is said once, and in recipes, where nothing is said."""
    given = {"model": "bundled", "output": Path("x")}
    with pytest.warns(KvsearchWarning, match="--smallest and --within: give --lose-at-most, which has taken its place"):
        options = RunOptions.of(**given, smallest=True, within="2")
    assert (options.lose_at_most, options.loss_confidence, options.rule.sure) == (0.02, 0.95, 0.9)
    with pytest.warns(KvsearchWarning, match="--sure: give --confidence"):
        options = RunOptions.of(**given, budget=40, sure=0.95)
    assert (options.confidence, options.rule.sure) == (0.95, 0.95)
    assert RunOptions.of(**given, lose_at_most="2%", confidence=0.99).rule.sure == 0.9
    recipe = tmp_path / "old.yaml"
    recipe.write_text("smallest: true\nsure: 0.8\n")
    options = RunOptions.of(recipe, **given)
    assert (options.lose_at_most, options.confidence) == (0.01, 0.8)
    recipe.write_text("smallest: false\nbudget: 40\n")
    assert RunOptions.of(recipe, **given, lose_at_most="5%").budget is None


def test_a_budget_above_the_contexts_of_the_measurement_is_for_longer_ones() -> None:
    assert resolve_plan_length(Size(150), 110, 226) == Size(150, length=226)
    assert resolve_plan_length(Size(110), 110, 226) == Size(110, length=226)
    assert resolve_plan_length(Size(109), 110, 226) == Size(109, length=110)
    assert resolve_plan_length(Size(None, 0.9), 110, 226) == Size(None, 0.9, length=110)
    assert resolve_plan_length(Size(150), 110, 90) == Size(150, length=110)  # refused, as nothing would be evicted
