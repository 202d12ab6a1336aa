"""Reading and writing plan files, and the weights beside them."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.files import atomic_write, check_target
from kvsearch.plan.parsing import describe_validation_error, read_json, require_header
from kvsearch.plan.schema import PLAN_FORMAT, PLAN_VERSION, Plan
from kvsearch.plan.weights import find_weights, put_weights

PROFILE = "profile.safetensors"  # of the directory of a calibration
FOLDER_PLAN = "plan.json"  # the plan of a folder that `export --to folder` wrote
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def load_plan(path: str | Path) -> Plan:
    """Read and check a plan: a file, the `plan.json` of a folder, or that of a repository of the Hugging Face hub.

    What is no path here and reads like `user/name` is a repository; its plan and weights are downloaded once.

    Raises:
        UsageError: there is no such file, or it is not a valid plan; the message then lists all that is wrong with it.
        EnvironmentFault: the file cannot be read, or the hub has no such repository or cannot be reached.
    """
    path = _located(path)
    name = str(path)
    data = require_header(read_json(path), PLAN_FORMAT, PLAN_VERSION, name)
    plan = _checked(data, name)
    find_weights(plan.policies, path)
    return plan


def save_plan(plan: Plan, path: str | Path, overwrite: bool = False) -> None:
    """Write a plan file; equal plans give equal bytes.

    Raises:
        UsageError: `path` exists and `overwrite` is off, is no regular file, or `model_copy` made the plan invalid.
        EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
    """
    checked = _checked(plan.model_dump(), f"the plan for {path}")
    check_target(path)
    put_weights(checked.policies, path)
    atomic_write(path, canonical_json(checked), overwrite)


def plan_of_folder(path: Path) -> Path | None:
    """Return the plan of a folder that holds no profile; None: it has none, or is that of a calibration."""
    plan = path / FOLDER_PLAN
    return plan if plan.is_file() and not (path / PROFILE).exists() else None


def _located(path: str | Path) -> Path:
    """Return the plan file that is meant."""
    place = Path(path)
    if place.is_dir():
        return place / FOLDER_PLAN
    if place.exists() or place.suffix == ".json" or not _HUB.fullmatch(str(path)) or place.parent.exists():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=[FOLDER_PLAN, "*.safetensors"])) / FOLDER_PLAN
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentFault(
            f"there is no file or folder {path}, and the hub has no such plan or cannot be reached: {reason}"
        ) from error


def _checked(data: dict[str, object], name: str) -> Plan:
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, name)) from error
