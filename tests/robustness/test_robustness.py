"""Whatever is in a file, it is taken or refused: a few seconds of the campaign that `make fuzz` runs for hours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.case import Case, limited_memory, run, wrong_with
from tests.robustness.kinds import KINDS, Kind

pytestmark = pytest.mark.slow
CASES = 4  # of every kind
REGRESSIONS = sorted(path for path in (Path(__file__).parent / "regressions").glob("*/*") if path.is_file())
LONG = 60.0  # seconds, for imports
ENOUGH = 10.0  # seconds of the processor for one file, on a slow machine too


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A folder for every kind, in which a valid file of it was read."""
    folders = {}
    for name, kind in KINDS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        kind.furnish(folders[name])
        run(kind, kind.bases()[0], folders[name], LONG)
    yield folders


kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
def test_valid_files_are_accepted(kind: Kind, ready: dict[str, Path]) -> None:
    for data in kind.bases()[:2]:
        found = run(kind, data, ready[kind.name], ENOUGH)
        assert (found.verdict, found.problem) == ("accepted", "")


@kinds
def test_mutated_files_are_taken_or_refused(kind: Kind, ready: dict[str, Path]) -> None:
    with limited_memory():
        for seed in range(CASES):
            found = run(kind, Case(kind, seed).data, ready[kind.name], ENOUGH)
            again = f"python -m tests.robustness --kind {kind.name} --from {seed} --cases 1"
            assert found.verdict != "failed", f"{found.problem}; again: {again}"


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_failed_does_not_fail_again(path: Path, ready: dict[str, Path]) -> None:
    found = run(KINDS[path.parent.name], path.read_bytes(), ready[path.parent.name], ENOUGH)
    assert found.verdict != "failed", found.problem


def test_a_case_follows_from_its_kind_and_number() -> None:
    for kind in list(KINDS.values())[::5]:
        assert Case(kind, 3).data == Case(kind, 3).data
        assert len({Case(kind, seed).data for seed in range(20)}) > 10


def kind_that(does: object) -> Kind:
    """A kind of file whose reader does something."""

    def check(path: Path) -> None:
        if isinstance(does, BaseException):
            raise does
        if does == "slow":
            while True:
                pass
        if does == "large":
            bytearray(1 << 30)
        if does == "warn":
            warnings.warn("overflow", RuntimeWarning, stacklevel=1)

    plan = KINDS["plan"]
    return Kind("plan", plan.file, plan.bases, plan.form, check)


def test_what_the_campaign_takes_for_a_failure(tmp_path: Path) -> None:
    from kvsearch.core.errors import InternalError, UsageError

    verdicts = {
        "refused": [UsageError("plan.json is not valid:\n  a: is missing")],
        "failed": [
            "large", "warn", KeyError("a"), SystemExit(1), RecursionError(), InternalError("plan.json: a bug"),
            UsageError("it is not valid"), UsageError("plan.json " + "\n  x" * 30_000),
        ],
        "accepted": ["nothing"],
    }  # fmt: skip
    for verdict, all_that in verdicts.items():
        for does in all_that:
            with limited_memory():
                assert run(kind_that(does), b"", tmp_path).verdict == verdict, does
    slow = run(kind_that("slow"), b"", tmp_path, 0.05)
    assert "TooSlow" in slow.problem
    assert wrong_with("plan.json is bad\nand more", tmp_path / "plan.json")
