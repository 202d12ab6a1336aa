"""kvsearch calibrate: measure a model and write a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.cli.common import Common, command
from kvsearch.errors import UsageError
from kvsearch.jobs.calibrated import CONFIG, PROFILE

if TYPE_CHECKING:
    from kvsearch.calibration.polykv.recipe import PolykvRecipe

__all__ = ["CONFIG", "PROFILE", "calibrate"]

TFLOPS = 100.0
POLYKV = "PolyKV"  # the panel of its options in the help

Names = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Patterns that are tried; paper: its nine, all: every policy.",
        show_default="paper",
        rich_help_panel=POLYKV,
    ),
]
Budgets = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Entries per kv head that patterns are tried at.",
        show_default="512",
        rich_help_panel=POLYKV,
    ),
]
Phases = Annotated[
    str | None,
    typer.Option(help="When patterns are tried: prefill, decode or both.", show_default="both", rich_help_panel=POLYKV),
]
Signals = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="What is measured: cosine (and relative error) of attention outputs, ppl of the answers, entropy.",
        show_default="cosine,ppl,entropy",
        rich_help_panel=POLYKV,
    ),
]
Route = Annotated[
    str | None,
    typer.Option(
        help="Recorded for strategies: what chooses patterns, cosine, error, ppl, nll or none.",
        show_default=False,
        rich_help_panel=POLYKV,
    ),
]
BudgetSignal = Annotated[
    str | None,
    typer.Option(
        help="Recorded for strategies: what shares out the budget, such as entropy, ppl or uniform.",
        show_default=False,
        rich_help_panel=POLYKV,
    ),
]
Naive = Annotated[
    bool,
    typer.Option(
        "--naive",
        help="Run the model anew for everything that is tried, as the paper does: slow, to check the results by.",
        rich_help_panel=POLYKV,
    ),
]
Batch = Annotated[int | None, typer.Option(help="Prompts at a time.", min=1, show_default="8", rich_help_panel=POLYKV)]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GB",
        help="Most memory besides the weights.",
        show_default="4.3, of a GPU most of what is free",
        rich_help_panel=POLYKV,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="TFLOPS",
        help="--dry-run: 10^12 operations a second that times are estimated for.",
        show_default=f"{TFLOPS:g}",
        rich_help_panel=POLYKV,
    ),
]


@command
def calibrate(
    model: Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the profile.", show_default=False)],
    common: Common,
    recipe: Annotated[
        str | None,
        typer.Option(help="A YAML file, or a shipped recipe by name; other options override it.", show_default=False),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Calibration method: lukv, lava, cake, adakv or polykv.", show_default="lukv")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Eviction policy the budgets are for; polykv: of strategies without a route.",
            show_default="lukv, adakv, polykv: snapkv; lava, cake: their own",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A policy parameter, as in --set window=16; polykv: of all patterns that have it, or of one, as in "
            "--set snapkv.window=16; repeatable.",
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of the method, as in --option floor_share=0; repeatable."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Calibration file (default: the shipped one for this model).", show_default=False),
    ] = None,
    questions: Annotated[
        int | None, typer.Option(help="Use only so many questions, and their contexts.", min=1, show_default=False)
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="All but lukv: a prompt is a context (question-agnostic), or a context with a question "
            "(question-aware).",
            show_default="question-agnostic",
        ),
    ] = None,
    fit_ratio: Annotated[
        float | None,
        typer.Option(
            help="cake: share evicted while exponents are fitted (--option exponents=fit).", show_default="0.8"
        ),
    ] = None,
    normalization: Annotated[
        str | None,
        typer.Option(
            help="lukv: what makes layers comparable: effect, layer, layer_max, output, residual or none.",
            show_default="effect",
        ),
    ] = None,
    aggregate: Annotated[
        str | None, typer.Option(help="lukv: average over questions: ratios or importance.", show_default="ratios")
    ] = None,
    no_gap: Annotated[
        bool, typer.Option("--no-gap", help="lukv: the ablation that trusts the policy's ranking.")
    ] = False,
    patterns: Names = None,
    budgets: Budgets = None,
    phases: Phases = None,
    signals: Signals = None,
    route: Route = None,
    budget_signal: BudgetSignal = None,
    naive: Naive = False,
    batch: Batch = None,
    max_memory: MaxMemory = None,
    tflops: Rate = None,
    force: Annotated[bool, typer.Option("--force", help="Replace results already in the directory.")] = False,
) -> None:
    """Measure which cache entries a model can live without, and write a profile.

    lukv: from the true importance of entries for later answers. lava, cake, adakv: what these rules decide prompt by
    prompt, averaged to static budgets. polykv: what every layer loses under each of several patterns; a run that was
    interrupted goes on when it is repeated, and --dry-run says what it costs.

    Example: kvsearch calibrate bundled --method lukv --policy snapkv -o runs/snapkv
    """
    from kvsearch.calibration.data import default_data, load_calibration_data
    from kvsearch.calibration.polykv.recipe import PolykvRecipe
    from kvsearch.calibration.recipe import recipe_path, resolve_recipe
    from kvsearch.cli.calibrate_run import check_new, goes_on_in, resumable, say_cost
    from kvsearch.plan import canonical_json
    from kvsearch.plan.files import atomic_write

    typed = {
        "method": method, "policy": policy, "normalization": normalization, "aggregate": aggregate,
        "gap": False if no_gap else None, "protocol": protocol, "fit_ratio": fit_ratio, "patterns": patterns,
        "budgets": budgets, "phases": phases, "signals": signals, "route": route, "budget_signal": budget_signal,
        "naive": naive or None, "batch": batch, "max_memory": max_memory,
    }  # fmt: skip
    chosen = resolve_recipe(recipe_path(recipe) if recipe else None, typed, settings or [], options or [])
    policy_object = chosen.make_policy()
    source = data or default_data(model)
    texts = load_calibration_data(source).limited(questions)
    config: dict[str, Any] = {
        "model": model, "data": texts.name, "data_sha256": texts.sha256, "questions": texts.questions,
        "recipe": chosen.resolved(), "seed": common.seed,
    }  # fmt: skip
    sweeps = chosen if isinstance(chosen, PolykvRecipe) else None
    if tflops is not None and not (sweeps and common.dry_run):
        raise UsageError("--tflops is for what --dry-run says of method polykv: leave it out")
    if sweeps:
        config |= {"dtype": common.dtype, "revision": common.revision}  # a run that goes on must find them the same
        for remark in sweeps.remarks():
            common.warn(remark)
    goes_on = sweeps is not None and not force and goes_on_in(output, config)
    if not goes_on:
        check_new(output, force, common.dry_run)
    if common.dry_run:
        if sweeps:
            rate = TFLOPS if tflops is None else tflops
            say_cost(common, model, texts, sweeps, rate, config, output if goes_on else None)
        else:
            common.print_json(config)
        return
    loaded = common.load(model)

    from kvsearch.calibration.polykv.samples import forget_samples
    from kvsearch.plan.profile import save_profile
    from kvsearch.report.dynamic import remarks
    from kvsearch.runtime.plan_checks import warn_unfit

    policies = chosen.policies()
    warn_unfit(loaded.model, policies)
    what, named = chosen.scope(texts), ", ".join(policy.name for policy in policies)
    common.say(f"calibrating {model} by {chosen.method} for {named} on {what} from {texts.name}")
    if sweeps:
        with resumable(output, config, goes_on, force, common) as start, common.progress(chosen.unit) as progress:
            profile = sweeps.calibrate(loaded, texts, policy_object, common.seed, progress, output, start)
    else:
        atomic_write(output / CONFIG, canonical_json(config))
        with common.progress(chosen.unit) as progress:
            profile = chosen.calibrate(loaded, texts, policy_object, common.seed, progress)
    save_profile(profile, output / PROFILE, overwrite=True)
    if sweeps:
        forget_samples(output)
    if common.as_json:
        common.print_json({"profile": str(output / PROFILE), **profile.metadata.model_dump(mode="json")})
        return
    for line in remarks(profile):
        common.say(line)
    target = _target(sweeps) if sweeps else "--ratio 0.8"
    common.say(f"wrote {output / PROFILE}; next: kvsearch export {output} {target} -o plan.json")


def _target(recipe: PolykvRecipe) -> str:
    """Options of an export that uses what was measured; where that is entropy alone, it can share out budgets only."""
    alone = recipe.signals == ("entropy",) and recipe.budget_signal is None
    return f"--budget {recipe.budgets[0]}" + " --budget-signal entropy" * alone
