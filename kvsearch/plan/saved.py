"""Reading and writing plan files, and the weights beside them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsearch.core.canonical import canonical_json
from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.core.files import check_target, read_bytes, write_atomically
from kvsearch.core.naming import require_known
from kvsearch.core.parsing import describe_fault, read_json, require_header, validate_content
from kvsearch.plan.schema import PLAN_FORMAT, PLAN_VERSION, Plan, PolicySpec

PROFILE = "profile.safetensors"  # of the directory of a calibration
FOLDER_PLAN = "plan.json"  # the plan of a folder that `export --to folder` wrote
AUTO = "auto"  # in place of a path: the plan beside a model
BESIDE = "kvsearch"  # the folder of plans beside a model
MODEL_KEY = "kv_cache_plan"  # in the config.json of a model: file and SHA-256 of each plan beside it, by size
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def load_plan(path: str | Path, model: Any = None, size: str | float | None = None) -> Plan:
    """Read and check a plan: a file, the `plan.json` of a folder, or that of a repository of the Hugging Face hub.

    What is no path here and reads like `user/name` is a repository; its plan and weights are downloaded once. "auto"
    is the plan beside a `model` of transformers, which `export --to model` wrote; of several, that of a `size`.

    Raises:
        UsageError: there is no such file, or it is not a valid plan; the message then lists all that is wrong with it.
        EnvironmentFault: the file cannot be read, or the hub has no such repository or cannot be reached.
    """
    path = plan_beside(model, size) if path == AUTO else _locate_plan(path)
    name = str(path)
    data = require_header(read_json(path), PLAN_FORMAT, PLAN_VERSION, name)
    plan = validate_content(Plan.model_validate, data, name)
    find_weights(plan.policies, path)
    return plan


def save_plan(plan: Plan, path: str | Path, overwrite: bool = False) -> None:
    """Write a plan file; equal plans give equal bytes.

    Raises:
        UsageError: `path` exists and `overwrite` is off, is no regular file, or `model_copy` made the plan invalid.
        EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
    """
    checked = validate_content(Plan.model_validate, plan.model_dump(), f"the plan for {path}")
    check_target(path)
    write_weights(checked.policies, path)
    write_atomically(path, canonical_json(checked), overwrite)


def find_size(plan: Plan) -> str:
    """Return the size of a plan as `--ratio` or `--budget` states it: the share evicted, or entries per kv head."""
    mean = plan.total / plan.heads
    return f"{mean if plan.length is None or plan.scaling == 'fixed' else 1 - mean / plan.length:.4g}"


def check_listing(listed: Any, owner: Any) -> dict[str, dict[str, str]]:
    """Return what a model's configuration says of the plans beside it, by size; UsageError if that is damaged."""
    try:
        return {size: {"file": str(entry["file"]), "sha256": str(entry["sha256"])} for size, entry in listed.items()}
    except (AttributeError, KeyError, TypeError):
        if not listed:
            return {}
        raise UsageError(f"{MODEL_KEY} in the configuration of {owner} is damaged: export the plan again") from None


def plan_beside(model: Any, size: str | float | None = None) -> Path:
    """Return the file of the plan beside a model.

    Raises:
        UsageError: there is none, several and no size that says which, or another one than its configuration names.
        EnvironmentFault: the model is of the hub, which cannot be reached.
    """
    if model is None:
        raise UsageError('"auto" is the plan beside a model: give that model, too')
    config = getattr(model, "config", None)
    name: Any = getattr(config, "name_or_path", None)
    listed = check_listing(getattr(config, MODEL_KEY, None), name)
    if not listed:
        raise UsageError(f"there is no plan beside the model {name}: give one, or `kvsearch export PLAN --to model` it")
    if size is None and len(listed) > 1:
        raise UsageError(f"several plans lie beside the model {name}: say which size, {' or '.join(listed)}")
    wanted = next(iter(listed)) if size is None else str(size)
    require_known("size", wanted, list(listed))
    entry = listed[wanted]
    revision = getattr(config, "_commit_hash", None)
    folder = Path(name) if Path(name).is_dir() else _download(name, [f"{BESIDE}/*"], revision=revision)
    return find_listed(folder, entry)


def find_listed(folder: Path, entry: dict[str, str]) -> Path:
    """Return the file of a plan in the folder of its model; UsageError if it is not the one that is listed."""
    path = folder / BESIDE / Path(entry["file"]).name
    if not path.is_file() or hashlib.sha256(read_bytes(path)).hexdigest() != entry["sha256"]:
        raise UsageError(f"{path} is not the plan that the config.json beside it names: copy both, or export it again")
    return path


def _locate_plan(path: str | Path) -> Path:
    """Return the plan file that is meant."""
    place = Path(path)
    if place.is_dir():
        return place / FOLDER_PLAN
    if place.exists() or place.suffix == ".json" or not _HUB.fullmatch(str(path)) or place.parent.exists():
        return place
    return _download(str(path), [FOLDER_PLAN, "*.safetensors"]) / FOLDER_PLAN


def _download(name: str, patterns: list[str], **revision: Any) -> Path:
    """Return the folder of those files of a repository of the hub that match."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, **revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EnvironmentFault(
            f"there is no file or folder {name}, and the hub has no such plan or cannot be reached: "
            f"{describe_fault(error)}"
        ) from error


WEIGHTS = "weights"  # the parameter
_known: dict[str, tuple[Path, bytes]] = {}  # by SHA-256: where they were read, and what they are


def register_weights(data: bytes, path: Path) -> str:
    """Make weights known to this process, and return their SHA-256."""
    digest = hashlib.sha256(data).hexdigest()
    _known.setdefault(digest, (path, data))
    return digest


def read_known_weights(digest: str) -> tuple[Path, bytes]:
    """Return where weights were read and their bytes; UsageError if no file with them was."""
    if digest not in _known:
        raise UsageError(
            f"the weights {digest[:12]}... are not here: they lie in a file beside the plan or profile that names them"
        )
    return _known[digest]


def locate_weights(spec: PolicySpec, beside: str | Path) -> Path | None:
    """Return where the weights of a policy lie beside a file; None if it has none."""
    digest = spec.params.get(WEIGHTS)
    return Path(beside).parent / f"{spec.name}-{digest[:12]}.safetensors" if isinstance(digest, str) else None


def read_weights(path: Path, owner: str | Path, digest: str) -> bytes:
    """Read the weights that a file names; UsageError if their SHA-256 differs from the one in the file."""
    data = read_bytes(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise UsageError(f"{path} has other weights than {owner} names: copy both from where they were written")
    return data


def find_weights(specs: Iterable[PolicySpec], beside: str | Path) -> None:
    """Make the weights known that a file's policies name.

    Raises:
        UsageError: they are not beside it, and unknown to this process, or they are others than it names.
        EnvironmentFault: they cannot be read.
    """
    for spec, path in list_weights(specs, beside):
        wanted = str(spec.params[WEIGHTS])
        if wanted in _known:
            continue
        if not path.exists():
            raise UsageError(f"{beside} needs the weights {path.name} beside it: copy them from where it was written")
        register_weights(read_weights(path, beside, wanted), path)


def write_weights(specs: Iterable[PolicySpec], beside: str | Path) -> None:
    """Write the weights of a file's policies beside it; raises as `read_known_weights` and `write_atomically`."""
    for spec, path in list_weights(specs, beside):
        _, data = read_known_weights(str(spec.params[WEIGHTS]))
        if not path.exists() or path.read_bytes() != data:
            write_atomically(path, data)


def list_weights(specs: Iterable[PolicySpec], beside: str | Path) -> list[tuple[PolicySpec, Path]]:
    """List the policies that have weights, and where these lie beside a file."""
    places = [(spec, locate_weights(spec, beside)) for spec in specs]
    return [(spec, path) for spec, path in places if path is not None]
