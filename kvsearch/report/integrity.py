"""Whether all that runs have written is whole: checksums, the schema of every artefact, weights, totals of plans."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from kvsearch.calibration.steps import STEPS_FOLDER as MEASURED
from kvsearch.core.errors import KvsearchError, UsageError
from kvsearch.core.files import TEMPORARY, open_file, read_bytes
from kvsearch.core.parsing import read_json
from kvsearch.core.printed import pluralize
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.plan import Plan, Profile
from kvsearch.plan.profile import split_tensors
from kvsearch.plan.saved import (
    MODEL_KEY,
    PROFILE,
    WEIGHTS,
    check_listing,
    find_listed,
    locate_weights,
    read_weights,
)
from kvsearch.plan.schema import PolicySpec
from kvsearch.policies.registry import BUILT_IN, build_policy, is_fitted
from kvsearch.report.artifacts import is_cache, open_path
from kvsearch.report.figures import ReportPart
from kvsearch.report.table import Table
from kvsearch.runs.identity import BEST, CONFIG, LEDGER, LOSSES, SUMS, read_config
from kvsearch.runs.ledger import parse_lines
from kvsearch.runs.run import JOB_NOUNS, hash_file, read_sums
from kvsearch.search.trials import TrialLog

ArtefactState = Literal["whole", "unfinished", "damaged"]
VERIFICATION_SCHEMA: Final = "kvsearch.verification/1"
CHECKSUM_MISMATCH = f"it was changed since it was finished: its SHA-256 is not that of {SUMS}"
RESTORE = "restore it, or write it again with the command that wrote it"
ANEW = "restore it, or start anew with another --output or --force"
MODEL_CONFIG = "configuration of a model with plans"
WITHOUT_SCHEMA = (BEST, LOSSES)
READABLE_SUFFIXES = (".json", ".yaml", ".yml", ".safetensors")  # what can be told from the file itself
MARK = b"kvsearch"  # what our files have
HEAD = 1 << 20  # in so many first bytes
_WEIGHTS = re.compile(r"[a-z0-9_]+-([0-9a-f]{12})\.safetensors")


@dataclass(frozen=True)
class Artefact:
    """A file, what it is, and what is wrong with it; `sealed`: there is a checksum of it as a run has finished it."""

    path: Path
    what: str
    state: ArtefactState = "whole"
    problem: str = ""
    remedy: str = ""
    sealed: bool = False


class Verification:
    """All artefacts at some paths, files and directories with all that is in them, in order.

    Raises:
        UsageError: nothing is there that kvsearch has written.
        EnvironmentFault: a directory cannot be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        checked: dict[Path, Artefact] = {}
        for path in paths:
            checked |= _check_all(path)
        self.artefacts = tuple(checked.values())

    @cached_property
    def damaged(self) -> tuple[Artefact, ...]:
        """Those that do not hold what they should."""
        return tuple(artefact for artefact in self.artefacts if artefact.state == "damaged")

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        rows = [{**asdict(artefact), "path": str(artefact.path)} for artefact in self.artefacts]
        return {"schema": VERIFICATION_SCHEMA, "whole": not self.damaged, "artefacts": rows}

    def parts(self, *, all_artefacts: bool = False) -> Iterator[ReportPart]:
        """Yield what is not whole, with what to do, and the counts; first a table of all if asked for."""
        if all_artefacts:
            columns = ("artefact", "what", "state", "checksum")
            rows = [
                (str(artefact.path), artefact.what, artefact.state, "fits" if artefact.sealed else "")
                for artefact in self.artefacts
            ]
            yield Table.plain("", columns, rows, words=columns)
        for artefact in self.artefacts:
            if artefact.problem:
                remedy = f"; {artefact.remedy}" if artefact.remedy else ""
                yield f"{artefact.path}: {artefact.state}: {artefact.problem}{remedy}"
        states = Counter(artefact.state for artefact in self.artefacts)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        checksums = sum(artefact.sealed for artefact in self.artefacts)
        listed = "" if all_artefacts else "; -v lists them"
        total = pluralize(len(self.artefacts), "artefact")
        yield f"{total}: {counts}; {pluralize(checksums, 'checksum')} compared{listed}"


def _check_all(path: Path) -> dict[Path, Artefact]:
    """Return the artefact at a path, or all that are in a directory, by their own paths."""
    if not path.exists():
        raise UsageError(f"there is no file or directory {path}: check the path")
    sums = _read_sums_over(path)
    if not path.is_dir():
        return {path: _check(path, sums)}
    place = path.absolute()
    ours = {file for file in place.rglob("*") if file.is_file() and (file in sums or _is_ours(file))}
    ours |= {file for file in sums if file.is_relative_to(place)}  # some may be missing
    if not ours:
        raise UsageError(f"{path} has nothing in it that kvsearch can verify: name a run, or a file of one")
    files = [path / file.relative_to(place) for file in sorted(ours)]
    return {file: _check(file, sums) for file in files}


def _read_sums_over(path: Path) -> dict[Path, str]:
    """Read the checksums of finished files, by absolute path; inner folders' checksums take precedence."""
    place = path.absolute()
    sums: dict[Path, str] = {}
    for folder in [*reversed(place.parents), *(file.parent for file in sorted(place.rglob(SUMS)))]:
        try:
            sums |= {folder / name: digest for name, digest in read_sums(folder).items()}
        except KvsearchError:  # told of the file itself, where it is asked about
            continue
    return sums


def _is_ours(path: Path) -> bool:
    """Return True for a file that kvsearch writes, by its name or by what is in it."""
    if path.name.startswith(TEMPORARY):
        return False
    if path.name in (LEDGER, SUMS, PROFILE) or _WEIGHTS.fullmatch(path.name):
        return True
    if path.suffix not in READABLE_SUFFIXES:
        return is_cache(path)
    with open_file(path) as file:
        return path.parent.name == MEASURED or MARK in file.read(HEAD)


def _check(path: Path, sums: Mapping[Path, str]) -> Artefact:
    """Check one file against what should be in it and its checksum."""
    digest = sums.get(path.absolute())
    if not path.is_file():
        return Artefact(path, "a file", "damaged", "it is missing", RESTORE)
    what = "a file"
    problem = ""
    try:
        if digest is None or _is_ours(path):  # else it was exported, in the form of another tool
            what = _describe(path)
    except KvsearchError as error:
        problem = " ".join(str(error).split()).removeprefix(f"{path}, ").removeprefix(f"{path} ")
    sealed = digest is not None and hash_file(path) == digest
    if digest is not None and not sealed and not problem:
        problem = CHECKSUM_MISMATCH
    if problem:
        return Artefact(path, what, "damaged", problem, ANEW if path.name in (CONFIG, LEDGER) else RESTORE)
    if path.name == CONFIG and what in JOB_NOUNS.values() and digest is None:
        return Artefact(path, what, "unfinished", "its command has not ended", "repeat it to go on: config.json has it")
    return Artefact(path, what, sealed=sealed)


def _describe(path: Path) -> str:
    """Return what a file is; UsageError if it does not hold what it should."""
    if path.name == CONFIG:
        config = read_config(path.parent)
        if config is not None:
            return JOB_NOUNS[config.job]
        content = read_json(path)
        if not isinstance(content, dict) or MODEL_KEY not in content:
            raise UsageError(f"{path} is no configuration of a run")
        for entry in check_listing(content[MODEL_KEY], path.parent).values():
            find_listed(path.parent, entry)
        return MODEL_CONFIG
    if path.name == LEDGER:
        config = read_config(path.parent)
        parse = TrialLog.parse if config is not None and config.job == "evolve" else ReplyStore.parse
        lines: list[tuple[Any, int]] = list(parse_lines(read_bytes(path), path, parse))
        is_cut = sum(size for _, size in lines) < path.stat().st_size
        return (
            f"ledger, {pluralize(len(lines), 'line')}{'; one more was cut short and is done again' if is_cut else ''}"
        )
    if path.name == SUMS:
        return f"checksums of {pluralize(len(read_sums(path.parent)), 'file')}"
    if path.name in WITHOUT_SCHEMA:
        read_json(path)
        return "results"
    if (match := _WEIGHTS.fullmatch(path.name)) is not None:
        if not hash_file(path).startswith(match[1]):
            raise UsageError(f"{path} has other weights than its name says")
        return "weights of a fitted ranking"
    if path.parent.name == MEASURED and path.suffix == ".safetensors":
        split_tensors(read_bytes(path), str(path))
        return "measured so far"
    return _describe_artefact(path) if path.suffix in READABLE_SUFFIXES or is_cache(path) else "a file"


def _describe_artefact(path: Path) -> str:
    """Return the kind of what `show` reads; a plan or a profile names weights, which are checked, too."""
    if is_cache(path):
        from kvsearch.runtime.store.tensor_file import read_tensors

        read_tensors(path)
    artefact = open_path(path)
    if isinstance(artefact.content, Plan):
        _check_policies(artefact.content.policies, path)
        return f"a plan of {artefact.content.total:,} entries" if artefact.content.total else "a plan"
    if isinstance(artefact.content, Profile):
        _check_policies(artefact.content.metadata.measured_policies, path)
    return f"{'an' if artefact.kind[0] in 'aeiou' else 'a'} {artefact.kind}"


def _check_policies(specs: Iterable[PolicySpec], path: Path) -> None:
    """Check parameters, and the weights beside the file, which may be known to this process from elsewhere."""
    for spec in specs:
        beside = locate_weights(spec, path)
        if beside is not None:
            read_weights(beside, path, str(spec.params[WEIGHTS]))
        if spec.name in BUILT_IN and not is_fitted(spec.name):  # others may be of a package that is not here
            build_policy(spec)
