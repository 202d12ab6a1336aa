"""kvsearch calibrate: measure a model and write a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsearch.cli.common import Common, command, new_directory

PROFILE, CONFIG = "profile.safetensors", "config.json"


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
        str | None, typer.Option(help="Calibration method: lukv, lava, cake or adakv.", show_default="lukv")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Eviction policy the budgets are for.", show_default="lukv, adakv: snapkv; lava, cake: their own"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A policy parameter, as in --set window=16; repeatable.")
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
            help="lava, cake, adakv: budgets are decided for every context (question-agnostic), or for every context "
            "with a question (question-aware).",
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
    force: Annotated[bool, typer.Option("--force", help="Replace results already in the directory.")] = False,
) -> None:
    """Measure which cache entries a model can live without, and write a profile.

    lukv: from the true importance of entries for later answers. lava, cake, adakv: what these rules decide prompt by
    prompt, averaged to static budgets.

    Example: kvsearch calibrate bundled --method lukv --policy snapkv -o runs/snapkv
    """
    from kvsearch.calibrate.data import default_data, load_calibration_data
    from kvsearch.calibrate.recipe import recipe_path, resolve_recipe
    from kvsearch.plan import canonical_json
    from kvsearch.plan.files import atomic_write

    typed = {
        "method": method, "policy": policy, "normalization": normalization, "aggregate": aggregate,
        "gap": False if no_gap else None, "protocol": protocol, "fit_ratio": fit_ratio,
    }  # fmt: skip
    chosen = resolve_recipe(recipe_path(recipe) if recipe else None, typed, settings or [], options or [])
    policy_object = chosen.make_policy()
    source = data or default_data(model)
    texts = load_calibration_data(source).limited(questions)
    config: dict[str, Any] = {
        "model": model, "data": texts.name, "data_sha256": texts.sha256, "questions": texts.questions,
        "recipe": {**chosen.model_dump(), "params": policy_object.parameters()}, "seed": common.seed,
    }  # fmt: skip
    if common.dry_run:
        common.print_json(config)
        return
    directory = new_directory(output, force, CONFIG)
    atomic_write(directory / CONFIG, canonical_json(config))
    loaded = common.load(model)

    from kvsearch.cli.show_dynamic import remarks
    from kvsearch.plan.profile import save_profile
    from kvsearch.policies.checks import warn_unfit

    warn_unfit(loaded.model, [policy_object])
    what = chosen.scope(texts)
    common.say(f"calibrating {model} by {chosen.method} for {chosen.policy} on {what} from {texts.name}")
    with common.progress(chosen.unit) as progress:
        profile = chosen.calibrate(loaded, texts, policy_object, common.seed, progress)
    save_profile(profile, directory / PROFILE, overwrite=True)
    if common.as_json:
        common.print_json({"profile": str(directory / PROFILE), **profile.metadata.model_dump(mode="json")})
        return
    for line in remarks(profile):
        common.say(line)
    common.say(f"wrote {directory / PROFILE}; next: kvsearch export {directory} --ratio 0.8 -o plan.json")
