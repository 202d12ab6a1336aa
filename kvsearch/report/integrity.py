"""Whether all that a run has written is whole: every artefact, what it is, and what to do where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvsearch.errors import KvsearchError, UsageError
from kvsearch.plan.temporary import TEMPORARY
from kvsearch.report.agreement import disagreements
from kvsearch.report.artefacts import describe, is_ours
from kvsearch.runs.directory import LEDGER
from kvsearch.runs.identity import CONFIG
from kvsearch.runs.sums import SUMS, read_sums, sha256_of_file

if TYPE_CHECKING:
    from rich.console import RenderableType

State = Literal["whole", "unfinished", "damaged"]
SCHEMA: Final = "kvsearch.verification/1"
CHANGED = f"it was changed since it was finished: its SHA-256 is not that of {SUMS}"
RESTORE = "restore it, or write it again with the command that wrote it"
ANEW = "restore it, or start anew with another --output or --force"


@dataclass(frozen=True)
class Artefact:
    """A file, what it is, and what is wrong with it; `sealed`: there is a checksum of it as a run has finished it."""

    path: Path
    what: str
    state: State = "whole"
    problem: str = ""
    remedy: str = ""
    sealed: bool = False


@dataclass(frozen=True)
class Verification:
    """All artefacts at some paths, in order."""

    artefacts: tuple[Artefact, ...]

    @cached_property
    def damaged(self) -> tuple[Artefact, ...]:
        """Those that do not hold what they should."""
        return tuple(one for one in self.artefacts if one.state == "damaged")

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        rows = [{**asdict(one), "path": str(one.path)} for one in self.artefacts]
        return {"schema": SCHEMA, "whole": not self.damaged, "artefacts": rows}

    def parts(self) -> Iterator[RenderableType]:
        """Yield a table with a row for every artefact, what is to be done, and how many are whole."""
        from rich.text import Text

        from kvsearch.report.screen import listing

        table = listing("", ("artefact", "what", "state", "checksum"))
        for one in self.artefacts:
            table.add_row(*map(Text, (str(one.path), one.what, one.state, "fits" if one.sealed else "")))
        yield table
        for one in self.artefacts:
            if one.problem:
                yield f"{one.path}: {one.state}: {one.problem}{f'; {one.remedy}' if one.remedy else ''}"
        states: Mapping[State, int] = {
            state: sum(one.state == state for one in self.artefacts) for state in ("whole", "unfinished", "damaged")
        }
        yield ", ".join(f"{count} {state}" for state, count in states.items() if count)


def verify_paths(paths: Iterable[Path]) -> Verification:
    """Check every artefact at `paths`, files and directories with all that is in them.

    Raises:
        UsageError: nothing is there that kvsearch has written.
        EnvironmentFault: a directory cannot be read.
    """
    found: dict[Path, Artefact] = {}
    for path in paths:
        artefacts = list(_at(path))
        if not artefacts:
            raise UsageError(f"{path} has nothing in it that kvsearch can verify: name a run, or a file of one")
        found |= {one.path: one for one in artefacts}
    return Verification(tuple(found.values()))


def _at(path: Path) -> Iterator[Artefact]:
    if not path.exists():
        raise UsageError(f"there is nothing at {path}: check the path")
    files = sorted(_files(path)) if path.is_dir() else [path]
    sums = _sums_over(path, files)
    listed = {name for name in sums if path.is_dir() and name.is_relative_to(path.absolute())}
    for file in sorted({file.absolute(): file for file in files} | {name: path / name.relative_to(path.absolute())
                                                                    for name in listed}, key=str):  # fmt: skip
        shown = path / file.relative_to(path.absolute()) if path.is_dir() else path
        if path == shown or file in sums or (shown.exists() and is_ours(shown)):
            yield _checked(shown, sums)


def _files(directory: Path) -> Iterator[Path]:
    return (file for file in directory.rglob("*") if file.is_file() and not file.name.startswith(TEMPORARY))


def _sums_over(path: Path, files: Sequence[Path]) -> dict[Path, str]:
    """Return the checksums of finished files, by absolute path; those of folders inside win over those above."""
    place = path.absolute()
    folders = [*reversed(place.parents), *(file.absolute().parent for file in files if file.name == SUMS)]
    found: dict[Path, str] = {}
    for folder in folders:
        try:
            found |= {folder / name: digest for name, digest in read_sums(folder).items()}
        except KvsearchError:  # told of the file itself, where it is asked about
            continue
    return found


def _checked(path: Path, sums: Mapping[Path, str]) -> Artefact:
    """Check one file against what is in it, what is beside it, and its checksum."""
    digest = sums.get(path.absolute())
    if not path.is_file():
        return Artefact(path, "a file", "damaged", "it is missing", RESTORE)
    try:
        what = describe(path)
        problem = "" if _is_changed(path.absolute().parent / LEDGER, sums) else next(disagreements(path), "")
    except KvsearchError as error:
        what, problem = "a file", " ".join(str(error).split())
    sealed = digest is not None and sha256_of_file(path) == digest
    if problem or (digest is not None and not sealed):
        return _damaged(path, what, problem or CHANGED)
    if path.name == CONFIG and digest is None:
        return Artefact(path, what, "unfinished", "its command has not ended", "repeat it to go on: config.json has it")
    return Artefact(path, what, sealed=sealed)


def _is_changed(path: Path, sums: Mapping[Path, str]) -> bool:
    """Tell whether a file is there that is not as it was finished."""
    return path in sums and path.exists() and sha256_of_file(path) != sums[path]


def _damaged(path: Path, what: str, problem: str) -> Artefact:
    remedy = ANEW if path.name == CONFIG else RESTORE
    if path.name == LEDGER and problem != CHANGED:
        what, (problem, _, remedy) = "ledger", problem.removeprefix(f"{path}, ").partition("): ")
        return Artefact(path, what, "damaged", f"{problem})", remedy)
    return Artefact(path, what, "damaged", problem.removeprefix(f"{path} "), remedy)
