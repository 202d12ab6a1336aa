"""Options of searches: shipped recipes, files, and what was typed on top."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsearch.commands import searching
from kvsearch.commands.evolve import EvolveOptions
from kvsearch.commands.reporter import NullReporter, StageReporter
from kvsearch.commands.searching import Refinement
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.evaluation.compare import Split
from kvsearch.plan import Size
from kvsearch.policies import create_policy
from kvsearch.runs.run import lock_for_writing
from tests import tiny


def options(recipe: str | Path | None = None, **given: Any) -> EvolveOptions:
    return EvolveOptions.of(recipe, model="bundled", output="run", **given)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_the_cache_term_is_an_option_of_the_papers_procedure(tmp_path: Path) -> None:
    paper = options("paper-8b")
    assert (paper.budget, paper.group_size, paper.parity, paper.lam, paper.gamma) == (128, 8, True, 0.3, 0.2)
    assert options(budget=16, parity=True, lam=0.5, gamma=1).lam == 0.5
    path = write(tmp_path, "budget: 16\nparity: true\nlambda: 0.1")
    assert (options(path).lam, options(path, lam=0.7).lam) == (0.1, 0.7)
    assert options(write(tmp_path, "budget: 16\nlam: 0.3")).lam == 0.3  # as recorded
    for given in ({"lam": 0.5}, {"gamma": 0.5}):
        with pytest.raises(UsageError, match=r"^--(lambda|gamma): is of the paper's cache term: give --parity, too$"):
            options(budget=16, **given)
    with pytest.raises(UsageError, match=r"--gamma: must be at most 1"):
        options(budget=16, parity=True, gamma=1.5)


@pytest.mark.parametrize(
    ("family", "policies", "words"),
    [
        ("llama", ("snapkv",), "nothing is searched on: space joint chooses between policies"),
        ("jamba", ("snapkv", "knorm"), "nothing is searched on: .* has layers of kind .*, for which prompts cannot be"),
    ],
)
def test_what_cannot_be_searched_is_said(family: str, policies: tuple[str, ...], words: str, tmp_path: Any) -> None:
    specs = [create_policy(name).spec for name in policies]
    measured: Any = SimpleNamespace(policies=specs, contexts=None)
    options = EvolveOptions.of(model=family, output=tmp_path / "refine", space="joint")
    refinement = Refinement(tiny.loaded(family), options.settings(), options.output, options.config, Split([]))
    with pytest.warns(KvsearchWarning, match=words):
        found = refinement.run(measured, {Size(40, length=100): {}}, StageReporter(NullReporter(), lambda *_: None))
    assert found is None
    assert not (tmp_path / "refine").exists()


def test_the_progress_of_a_refinement_is_left_to_its_candidates(tmp_path: Path, monkeypatch: Any) -> None:
    """Own replies and prompts come first; they once took all of the stage, which then seemed to stand still."""
    shares: list[float] = []
    log = SimpleNamespace(path=tmp_path / "ledger.jsonl", evaluations=0)

    def search(_: Any, log: Any, allowed: int, watcher: Any, __: str) -> Any:
        for log.evaluations in (0, allowed // 2, allowed):
            watcher.generation("start", 0, [], SimpleNamespace(value=1.0))
            shares.append(stage.done)
        return SimpleNamespace(flat=True)

    @contextmanager
    def open_search(*arguments: Any) -> Iterator[Any]:
        searches, reporter = arguments[2], arguments[4]
        for title in ("own replies", "reading"):
            with reporter.progress(title) as show:
                show(3, 3)
        yield searches, None, SimpleNamespace(finish=lambda: None), log

    monkeypatch.setattr(searching, "open_search", open_search)
    options = EvolveOptions.of(model="bundled", output=tmp_path, space="joint")
    refinement = Refinement(tiny.loaded("llama"), options.settings(), options.output, options.config, Split([]))
    stage = StageReporter(NullReporter(), lambda *_: None)
    prepared: Any = SimpleNamespace(hashes={"fitted": []}, search=search, budget=40)
    with lock_for_writing(tmp_path):
        refinement._search((prepared,), stage)
    assert shares == pytest.approx([0.19, 0.595, 1.0])
