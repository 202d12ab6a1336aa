"""The directory of a calibration: its configuration, what is finished of it, and the profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvsearch.calibration.sample_files import SAMPLES, has_samples, sample_files
from kvsearch.errors import UsageError
from kvsearch.plan.parsing import read_json
from kvsearch.plan.saved import PROFILE
from kvsearch.plan.temporary import TEMPORARY
from kvsearch.plan.weights import is_weights
from kvsearch.runs.contexts import CONTEXTS
from kvsearch.runs.directory import other_kind
from kvsearch.runs.identity import CONFIG, RunConfig, read_config

State = Literal["new", "unfinished", "finished"]
HOW = "run `kvsearch calibrate MODEL --method polykv -o DIR` first"


class CalibratedModel(NamedTuple):
    """The model that a calibration was told to measure, and how it was loaded; None where that is not known."""

    name: str | None
    dtype: str | None
    revision: str | None


def calibrated_model(directory: Path) -> CalibratedModel:
    """Return which model was calibrated in `directory`, as far as its configuration says.

    Raises:
        UsageError: the configuration is damaged.
    """
    content = _content(directory)
    told = (content.get(name) for name in ("model", "dtype", "revision"))
    return CalibratedModel(*(value if isinstance(value, str) else None for value in told))


def _content(directory: Path) -> dict[str, Any]:
    """Return what the configuration in `directory` says, by this or an older version; nothing if there is none."""
    path = directory / CONFIG
    if not path.is_file():
        return {}
    config = read_config(directory)
    found: Any = config.content if config is not None else read_json(path)
    return found if isinstance(found, dict) else {}


def profile_file(path: Path) -> Path:
    """Return the profile in a directory, or the file itself; UsageError if the calibration is unfinished."""
    if not path.is_dir():
        return path
    unfinished = has_samples(path)
    recipe = _content(path).get("recipe") if unfinished or not (path / PROFILE).exists() else None
    if isinstance(recipe, dict) and "method" in recipe:  # a config.json may be of anything
        kept = f"what is kept of it: {kept_words(path)}" if unfinished else "nothing of it is kept"
        raise UsageError(
            f"the calibration in {path} is not finished, {kept}: repeat its command, kvsearch calibrate "
            f"{calibrated_model(path).name or 'MODEL'} ... -o {path}, to go on"
        )
    return path / PROFILE


def kept_words(directory: Path) -> str:
    """Say what is kept of an unfinished calibration; nothing where nothing is.

    Raises:
        UsageError: a file of it is damaged.
    """
    files = sample_files(directory / SAMPLES)
    if not files:
        return ""
    recipe = _content(directory).get("recipe")
    if isinstance(recipe, dict) and recipe.get("method") == "polykv":
        from kvsearch.calibration.polykv.samples import kept_samples

        count = kept_samples(directory)
        return "1 question" if count == 1 else f"{count} questions"
    return "1 step" if len(files) == 1 else f"{len(files)} steps"


def state_of(directory: Path, config: RunConfig, resumes: bool, force: bool) -> State:
    """Return how far the calibration of this configuration is in `directory`: "new" where it begins anew.

    `resumes`: it can go on where it was stopped. `force`: it is to begin in place of what is there.

    Raises:
        UsageError: another calibration is there and `force` is off, or something else is.
    """
    if not force:
        there = read_config(directory)
        if resumes and has_samples(directory) and (directory / CONFIG).exists():
            found = "it was begun by another version of kvsearch" if there is None else config.difference(there)
            if found is None:
                return "unfinished"
            raise UsageError(
                f"{directory} holds another unfinished calibration: {found}; repeat its command to go on with it, "
                "choose another --output, or --force to start anew"
            )
        if there is not None and is_finished(directory):
            found = config.difference(there)
            if found is None:
                return "finished"
            raise UsageError(
                f"{directory} holds another calibration: {found}; choose another --output, or --force to start anew"
            )
    check_new(directory, force)
    return "new"


def is_finished(directory: Path) -> bool:
    """Tell whether a finished calibration is in `directory`: what it writes last is there.

    An old profile of PolyKV stays until it is replaced; those of other methods go when another calibration begins.
    """
    there = read_config(directory)
    if there is None or there.job != "calibrate" or has_samples(directory) or not (directory / PROFILE).exists():
        return False
    recipe = there.content.get("recipe")
    replaces = isinstance(recipe, dict) and recipe.get("method") == "polykv"
    return (directory / CONTEXTS).exists() or not replaces


def _is_temporary(path: Path) -> bool:
    """Tell whether a file is what a process left that was killed while it wrote."""
    return path.name.startswith(TEMPORARY)


def check_new(directory: Path, force: bool) -> None:
    """Find out whether a calibration can begin in `directory`, with `force` in place of another one.

    Raises:
        UsageError: results are there and `force` is off, or something else than a calibration is.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: give a directory to write to")
    if not directory.is_dir():
        return
    there, samples = read_config(directory), directory / SAMPLES
    # stopped before a sample was finished
    empty = [samples] if samples.is_dir() and all(_is_temporary(item) for item in samples.iterdir()) else []
    names = {item.name for item in directory.iterdir() if item not in empty and not _is_temporary(item)}
    nameless = not names or has_samples(directory) or (PROFILE in names and CONFIG not in names)  # ours all the same
    if not nameless if there is None else there.job != "calibrate":
        raise other_kind(directory, "calibrate")
    weights = {name for name in names if is_weights(name)}  # they are written before the profile that names them
    if not force and names - {CONFIG, CONTEXTS} - weights:
        raise UsageError(
            f"{directory} exists and is not empty: choose another directory, or --force to replace its results"
        )
