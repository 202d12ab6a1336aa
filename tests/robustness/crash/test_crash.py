"""Commands stopped at a few of their writes and in a forward pass; `make crash` stops them at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.robustness.crash.commands import commands
from tests.robustness.crash.faults import KINDS
from tests.robustness.crash.trial import Command, problem_of, undisturbed

TRIED = ("calibrate lava", "evaluate", "export --to", "compress")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Command]:
    return {command.name: command for command in commands(tmp_path_factory.mktemp("crash"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_a_command_that_is_stopped(name: str, made: dict[str, Command], tmp_path: Path) -> None:
    command = made[name]
    ended, wanted = undisturbed(command, tmp_path / "reference")
    for kind in KINDS:
        most = ended.passes if kind == "memory" else len(ended.operations)
        at = random.Random(f"{name} {kind}").randint(1, max(most, 1))
        if most:
            assert problem_of(command, wanted, tmp_path / f"{kind[0]}{at:08}", kind, at) is None, (kind, at)
