"""Plan files: torn and foreign files, writes that never lose what was there, and the weights that files name."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.core.files import write_atomically
from kvsearch.plan import load_plan, save_plan
from kvsearch.plan import saved as weights
from tests.combinations import in_turn
from tests.plan.builders import make_plan, plan_dict
from tests.policies.probes import fitted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def test_a_file_that_another_process_makes_meanwhile_is_kept(path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        path.write_text("theirs")
        yield b"mine"

    with pytest.raises(UsageError, match=r"plan\.json exists already"):
        write_atomically(path, pieces(), overwrite=False)
    assert (path.read_text(), list(path.parent.iterdir())) == ("theirs", [path])
    path.unlink()
    write_atomically(path, b"mine", overwrite=False)
    assert (path.read_text(), list(path.parent.iterdir())) == ("mine", [path])


FOREIGN: list[tuple[bytes, str]] = [
    (b"", "not valid JSON at line 1 column 1"),
    (b"\xff{}", "not UTF-8 text: byte 0 is 0xff"),
    (b"[]", "not a kvsearch.plan file: it has no"),
    (b'{"format": "kvsearch.profile", "version": 1}', "its format is 'kvsearch.profile'"),
    (b'{"format": "kvsearch.plan", "version": 1.0}', "has no valid version: found 1.0"),
    (
        b'{"format": "kvsearch.plan", "version": 2}',
        "was written by a newer kvsearch .version 2, this one reads 1.: upgrade",
    ),
    (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    (b'{"a": NaN}', "a number in it is NaN or infinite"),
    (b"[" * 100_000, "not valid JSON: maximum recursion depth"),
    (b'{"a": ["\\ud800"]}', "surrogates not allowed"),
]


@pytest.mark.parametrize(("data", "expected"), FOREIGN)
def test_foreign_files_are_refused(path: Path, data: bytes, expected: str) -> None:
    path.write_bytes(data)
    with pytest.raises(UsageError, match=expected) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)


def test_a_hand_edited_file_lists_all_its_mistakes(path: Path) -> None:
    path.write_text(json.dumps(plan_dict(total=31, extra=1, provenance={})))
    with pytest.raises(UsageError) as caught:
        load_plan(path)
    first, *rest = str(caught.value).split("\n")
    assert first == f"{path} is not valid, 7 problems:"
    assert "  total: says 31, but the prefill budgets add up to 32: correct one of them" in rest
    assert "  extra: unknown key: remove it or correct its spelling" in rest
    assert "  provenance.seed: is missing: add it" in rest


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(UsageError, match="it is a folder"):
        write_atomically(tmp_path, b"")
    with pytest.raises(UsageError, match="its folder does not exist"):
        write_atomically(tmp_path / "none" / "plan.json", b"")
    with pytest.raises(UsageError, match="not a regular file"):
        write_atomically("/dev/null", b"")


@in_turn(
    error=[OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
    existing=[True, False],
    call=["replace", "fsync"],
)
def test_a_failed_write_leaves_everything_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, existing: bool, call: str
) -> None:
    raised = EnvironmentFault if isinstance(error, OSError) else type(error)
    if existing:
        path.write_text("old")
    monkeypatch.setattr(os, call, Mock(side_effect=error))
    with pytest.raises(raised) as caught:
        write_atomically(path, b"new")
    assert [child.name for child in path.parent.iterdir()] == (["plan.json"] if existing else [])
    assert not existing or path.read_text() == "old"
    if raised is EnvironmentFault:
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_links_are_followed_and_the_mode_is_kept(path: Path) -> None:
    path.write_text("old")
    path.chmod(0o640)
    link = path.with_name("link.json")
    link.symlink_to(path)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


WRITER = """
import sys, time
from pathlib import Path
from kvsearch.core.files import open_temporary
with open_temporary(Path(sys.argv[1])) as (_, file):
    file.write(b"half")
    file.flush()
    print("begun", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    with subprocess.Popen([sys.executable, "-c", WRITER, target], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "begun\n"
        (left,) = tmp_path.glob(".kvsearch-*.tmp")
        write_atomically(target, b"mine")
        assert left.exists()  # its writer lives
        writer.kill()
    write_atomically(tmp_path / "other.json", b"another target")
    assert left.exists()
    write_atomically(target, b"mine again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "plan.json"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    plan = make_plan()
    layers = [None if layer is None else layer.model_copy(update={"policy": fitted().spec})
              for layer in plan.prefill.layers]  # fmt: skip
    path = tmp_path / "plan.json"
    save_plan(plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"layers": tuple(layers)})}), path)
    return path


@pytest.fixture
def forgotten(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan as another process finds it."""
    monkeypatch.setattr(weights, "_known", {})
    return saved


def test_a_plan_brings_its_weights(forgotten: Path) -> None:
    plan = load_plan(forgotten)
    (spec,) = plan.policies
    (beside,) = forgotten.parent.glob("probe-*.safetensors")
    assert weights.read_known_weights(str(spec.params["weights"])) == (beside, beside.read_bytes())
    copied = forgotten.parent / "copied"
    copied.mkdir()
    save_plan(plan, copied / "other.json")
    assert (copied / beside.name).read_bytes() == beside.read_bytes()


def test_a_plan_with_other_weights(forgotten: Path) -> None:
    (beside,) = forgotten.parent.glob("probe-*.safetensors")
    beside.write_bytes(beside.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match=rf"{beside.name} has other weights than .*plan.json names"):
        load_plan(forgotten)
