"""kvsearch calibrate: measure a model and write a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.calibrate import CalibrateOptions
from kvsearch.policies.registry import FITTED

if TYPE_CHECKING:
    from kvsearch.calibration.polykv.cost import CostEstimate, PassCost
    from kvsearch.calibration.probe.cost import RankingCost


@command(CalibrateOptions, dry_run=True)
def calibrate(options: CalibrateOptions, console: Console) -> None:
    """Measure which cache entries a model can live without, and write a profile.

    lukv: from the true importance of entries for later answers. lava, cake, adakv: what these rules decide prompt by
    prompt, averaged to static budgets. polykv: what every layer loses under each of several patterns; a run that was
    interrupted goes on when it is repeated, and --dry-run says what it costs. probe: a ranking of entries, fitted to
    what they are worth, which other methods and `evaluate` then take as the policy probe=DIR. query_bank: likewise, by
    stored queries of questions, as query_bank=DIR.

    Example: kvsearch calibrate bundled --method lukv --policy snapkv -o runs/snapkv
    """
    from kvsearch.jobs import calibrate as jobs
    from kvsearch.plan.saved import PROFILE

    if console.dry_run:
        told, cost = jobs.dry_run(options, talk=console)
        console.print_json(told)
        if cost is not None and not console.as_json:
            _say_cost(cost, ", the rate of this machine" if options.tflops is None else "", console)
        return
    profile = jobs.calibrate(options, talk=console)
    written = options.output / PROFILE
    if console.as_json:
        console.print_json({"profile": str(written), **profile.metadata.model_dump(mode="json")})
        return
    from kvsearch.report.dynamic import remarks
    from kvsearch.report.lukv import choice_lines

    for line in (*remarks(profile), *choice_lines(profile)):
        console.say(line)
    if options.method in FITTED:
        from kvsearch.report.ranking import RankingView

        for line in RankingView(profile).remarks():
            console.say(line)
    console.say(f"wrote {written}")
    for words in jobs.following_commands(options, profile):
        console.next(*words)


def _say_cost(found: CostEstimate | RankingCost, whose: str, console: Console) -> None:
    from kvsearch.calibration.polykv.cost import CostEstimate

    if not isinstance(found, CostEstimate):
        for line in found.lines(f"{_cost_words(found.reading)} at {found.tflops:.3g} TFLOP/s"):
            console.say(line)
        return
    memory = found.memory
    for line in (
        f"{found.samples} continuations, {found.runs:,} runs of the model as the paper does it",
        f"as the paper does it (--naive): {_cost_words(found.naive)} at {found.tflops:.3g} TFLOP/s{whose}",
        f"in one sweep over the layers: {_cost_words(found.sweep)}, {found.speedup:.3g} times less arithmetic",
        f"memory besides the weights: {memory.peak / 1e9:.3g} GB for {memory.groups} disturbances at a time, "
        f"{memory.minimum / 1e9:.3g} GB at least",
    ):
        console.say(line)


def _cost_words(cost: PassCost) -> str:
    from kvsearch.models.speed import time_words

    return f"{cost.forward_tokens:,.0f} forward tokens, {cost.flops / 1e12:.3g} TFLOP, {time_words(cost.seconds)}"
