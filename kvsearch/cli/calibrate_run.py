"""The directory of a PolyKV calibration, which may be unfinished, and what `calibrate --dry-run` says of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.cli.common import Common, new_directory
from kvsearch.errors import UsageError
from kvsearch.jobs.calibrated import CONFIG

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.calibration.polykv.cost import CostEstimate, PassCost
    from kvsearch.calibration.polykv.recipe import PolykvRecipe


def goes_on_in(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether an unfinished calibration is in `path`, with the same configuration.

    Raises:
        UsageError: it has another configuration.
    """
    from kvsearch.calibration.polykv.samples import has_samples
    from kvsearch.plan import canonical_json
    from kvsearch.plan.files import read_bytes
    from kvsearch.plan.parsing import parse_json
    from kvsearch.runs.identity import difference

    if not has_samples(path) or not (path / CONFIG).exists():
        return False
    there = parse_json(read_bytes(path / CONFIG), str(path / CONFIG))
    found = difference(there, parse_json(canonical_json(config), "the configuration"))
    if found is not None:
        raise UsageError(
            f"{path} holds another unfinished calibration: {found}; repeat its command to go on with it, choose "
            "another --output, or --force to start anew"
        )
    return True


def check_new(path: Path, force: bool, dry_run: bool) -> None:
    """Make a directory for results, or only check that of a dry run; UsageError if other results are there."""
    from kvsearch.calibration.options import SAMPLES

    folder = path / SAMPLES
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()  # of a calibration that was stopped before it had finished anything
    if path.exists() or not dry_run:
        new_directory(path, force, CONFIG)


@contextmanager
def resumable(
    directory: Path, config: Mapping[str, Any], goes_on: bool, force: bool, common: Common
) -> Iterator[Callable[[], None]]:
    """Gives what to call once all is checked: samples of another calibration go, and the configuration is written.

    After Ctrl-C it says what is kept, and how to go on.
    """
    from kvsearch.calibration.polykv.samples import forget_samples, kept_samples
    from kvsearch.plan import canonical_json
    from kvsearch.plan.files import atomic_write

    begun = goes_on

    def start() -> None:
        nonlocal begun
        if not goes_on:
            forget_samples(directory)
        atomic_write(directory / CONFIG, canonical_json(config))
        begun = True

    try:
        yield start
    except KeyboardInterrupt:
        if begun and (kept := kept_samples(directory)):
            how = "the same command, without --force," if force else "the same command"
            common.say(f"kept in {directory}: {_questions(kept)}; {how} goes on with the others")
        else:
            common.say("no question is finished: the same command begins anew")
        raise


def say_cost(common: Common, model: str, texts: CalibrationData, recipe: PolykvRecipe, tflops: float,
             config: Mapping[str, Any], going_on: Path | None) -> None:  # fmt: skip
    """Print what a calibration costs with its configuration as JSON, and tell it in words.

    Whatever would stop the calibration at its start is found out; `going_on` is the directory that it goes on in.

    Raises:
        UsageError, IncompatibleError: as `calibrate_polykv` at its start.
    """
    found = _estimate(common, model, texts, recipe, tflops, going_on)
    common.print_json({**config, "estimate": found.as_json()})
    if common.as_json:
        return
    memory = found.memory
    for line in (
        f"{found.samples} continuations, {found.runs:,} runs of the model as the paper does it",
        f"as the paper does it (--naive): {_cost_words(found.naive)} at {found.tflops:g} TFLOP/s",
        f"in one sweep over the layers: {_cost_words(found.sweep)}, {found.speedup:.3g} times less arithmetic",
        f"memory besides the weights: {memory.peak / 1e9:.3g} GB for {memory.groups} disturbances at a time, "
        f"{memory.minimum / 1e9:.3g} GB at least",
    ):
        common.say(line)


def _estimate(
    common: Common, model: str, texts: CalibrationData, recipe: PolykvRecipe, tflops: float, going_on: Path | None
) -> CostEstimate:
    """What a calibration costs; the model is loaded to count tokens and parameters, and to check all that it checks."""
    from kvsearch.calibration.options import SAMPLES
    from kvsearch.calibration.polykv.checks import checked_prompts
    from kvsearch.calibration.polykv.cost import ModelSize, SweepWork, estimate
    from kvsearch.calibration.polykv.measurement import Measurement
    from kvsearch.calibration.polykv.samples import SampleFiles
    from kvsearch.runtime.plan_checks import warn_unfit

    loaded, options, policies = common.load(model), recipe.options(), recipe.policies()
    warn_unfit(loaded.model, policies)
    prompts = checked_prompts(loaded, texts, options, policies)
    found = estimate(ModelSize.of(loaded.model), SweepWork.of(prompts, policies, options), tflops, options.max_memory)
    if going_on is not None:
        SampleFiles(going_on / SAMPLES, Measurement.of(loaded, texts, prompts, options, policies))
    return found


def _questions(count: int) -> str:
    return "1 question" if count == 1 else f"{count} questions"


def _cost_words(cost: PassCost) -> str:
    return f"{cost.forward_tokens:,.0f} forward tokens, {cost.flops / 1e12:.3g} TFLOP, {_time(cost.seconds)}"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
