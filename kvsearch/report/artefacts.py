"""What a file that kvsearch has written is, and whether it holds what it should, as far as the file itself can say.

Nothing here computes: no model is needed, and torch only for compressed caches.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from kvsearch.calibration.sample_files import SAMPLES as MEASURED
from kvsearch.choose.verdicts import FILE as VALIDATION
from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.evaluation.reply_store import LOSSES, ReplyStore
from kvsearch.papers.catalog import TABLES
from kvsearch.plan import Plan, Profile
from kvsearch.plan.files import read_bytes
from kvsearch.plan.limits import MOST_DOCUMENT
from kvsearch.plan.parsing import parse_json
from kvsearch.plan.saved import FOLDER_PLAN, PROFILE
from kvsearch.plan.schema import PolicySpec
from kvsearch.plan.weights import WEIGHTS, weights_file
from kvsearch.policies.registry import BUILT_IN, FITTED, policy_of
from kvsearch.report.numbers import counted
from kvsearch.report.reader import CACHE, FRONT, REPORT, SELECTION, WHOLE_RUN, open_path
from kvsearch.runs.contexts import CONTEXTS
from kvsearch.runs.directory import LEDGER, NOUNS
from kvsearch.runs.identity import CONFIG, read_config, read_identity
from kvsearch.runs.ledger import Parsed, parsed_lines
from kvsearch.runs.sums import SUMS, read_sums, sha256_of_file
from kvsearch.search.ledger import BEST, SearchLedger

REFINED: Final = "found.json"  # of the searches that refine a run
OURS: Final = {
    CONFIG, LEDGER, SUMS, PROFILE, FOLDER_PLAN, REPORT, FRONT, SELECTION, WHOLE_RUN, VALIDATION, CONTEXTS, BEST,
    REFINED, LOSSES, *(f"{name}.json" for name in TABLES),
}  # fmt: skip
READ: Final = (".json", ".yaml", ".yml", ".safetensors", CACHE)  # what can be told from the file itself
MARKS: Final = (b'"kvsearch.', b"kvsearch.strategy", b'"kvsearch"')  # what our files of other names have in them
WORDS: Final = {
    BEST: "best candidate so far", REFINED: "candidates of a refinement", LOSSES: "output losses",
    "samples.csv": "a row per reply", "tables.md": "tables", "README.md": "a card", "generate.py": "a script",
}  # fmt: skip
_WEIGHTS = re.compile(r"[a-z0-9_]+-([0-9a-f]{12})\.safetensors")


def is_ours(path: Path) -> bool:
    """Tell whether a file is one that kvsearch writes, by its name, what is beside it, or what is in it."""
    if path.name in (LEDGER, SUMS, PROFILE) or path.suffix == CACHE or _WEIGHTS.fullmatch(path.name):
        return True
    beside = (LEDGER,) if path.name == CONFIG else (LEDGER, SUMS)  # many tools have a config.json
    if path.name in OURS and any((path.parent / name).exists() for name in beside):
        return True
    return _is_measured(path) or (path.suffix in READ and _is_marked(path))


def _is_marked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16 if path.suffix == ".safetensors" else MOST_DOCUMENT)
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    return any(mark in head for mark in MARKS)


def describe(path: Path) -> str:
    """Check what is in a file, and say what it is.

    Raises:
        UsageError: it does not hold what it should.
        EnvironmentFault: it cannot be read.
    """
    if path.name in CHECKS:
        return CHECKS[path.name](path)
    if (match := _WEIGHTS.fullmatch(path.name)) is not None:
        return _weights(path, match[1])
    if _is_measured(path):
        _require_safetensors(path)
        return "measured so far"
    if path.suffix in READ:
        return _opened(path)
    return WORDS.get(path.name, "a file")


def _opened(path: Path) -> str:
    """Check what `show` reads."""
    if path.suffix == CACHE:
        from kvsearch.runtime.tensor_file import check_tensors

        check_tensors(path)
    found = open_path(path)
    if isinstance(found.content, Plan):
        _check_policies(found.content.policies, path)
        return f"a plan of {found.content.total:,} entries" if found.content.total else "a plan"
    if isinstance(found.content, Profile):
        _check_policies(found.content.metadata.measured_policies, path)
        return f"a profile ({found.content.metadata.method})"
    return {"replies": "results", "contexts": "hashes of contexts"}.get(found.kind, f"a {found.kind}")


def _check_policies(specs: Iterable[PolicySpec], path: Path) -> None:
    """Check parameters, and the weights beside the file, which may be known to this process from elsewhere."""
    for spec in specs:
        beside = weights_file(spec, path)
        if beside is not None and sha256_of_file(beside) != spec.params[WEIGHTS]:
            raise UsageError(f"{beside} has other weights than {path} names")
        if spec.name in BUILT_IN and spec.name not in FITTED:  # others may be of a package that is not here
            policy_of(spec)


def _weights(path: Path, digest: str) -> str:
    data = read_bytes(path)
    if not hashlib.sha256(data).hexdigest().startswith(digest):
        raise UsageError(f"{path} has other weights than its name says")
    return "weights of a fitted ranking"


def _require_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, deserialize

    try:
        deserialize(read_bytes(path))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise UsageError(f"{path} is no complete safetensors file: {error}") from error


def _config(path: Path) -> str:
    config = read_config(path.parent)
    if config is None:
        raise UsageError(f"{path} is no configuration of a run")
    return NOUNS[config.job]


def ledger_lines(path: Path) -> list[Parsed[Any]]:
    """Return the lines of the ledger of any run; errors as for `read_lines`."""
    config = read_config(path.parent)
    parse: Callable[[Any], Any] = ReplyStore.parse
    if config is not None and config.job == "evolve":
        parse = SearchLedger.parse
    return list(parsed_lines(read_bytes(path), path, parse, read_identity(path.parent)))


def _ledger(path: Path) -> str:
    lines = ledger_lines(path)
    is_cut = sum(one.size for one in lines) < path.stat().st_size
    return f"ledger, {counted(len(lines), 'line')}{'; one more was cut short and is done again' if is_cut else ''}"


def _sums(path: Path) -> str:
    return f"checksums of {counted(len(read_sums(path.parent)), 'file')}"


def _json(path: Path) -> str:
    parse_json(read_bytes(path), str(path))
    return WORDS[path.name]


def _is_measured(path: Path) -> bool:
    return path.parent.name == MEASURED and path.suffix == ".safetensors"


CHECKS: Final[dict[str, Callable[[Path], str]]] = {
    CONFIG: _config, LEDGER: _ledger, SUMS: _sums, BEST: _json, REFINED: _json, LOSSES: _json,
}  # fmt: skip
