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
    method: Annotated[str | None, typer.Option(help="Calibration method: lukv.", show_default="lukv")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Eviction policy the budgets are for.", show_default="snapkv")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A policy parameter, as in --set window=16; repeatable.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Calibration file (default: the shipped one for this model).", show_default=False),
    ] = None,
    questions: Annotated[
        int | None, typer.Option(help="Use only so many questions.", min=1, show_default=False)
    ] = None,
    normalization: Annotated[
        str | None,
        typer.Option(
            help="What makes layers comparable: effect, layer, layer_max, output, residual or none.",
            show_default="effect",
        ),
    ] = None,
    aggregate: Annotated[
        str | None, typer.Option(help="Average over questions: ratios or importance.", show_default="ratios")
    ] = None,
    no_gap: Annotated[bool, typer.Option("--no-gap", help="Ablation: trust the policy's ranking.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace results already in the directory.")] = False,
) -> None:
    """Measure which cache entries a model can live without, and write a profile.

    Example: kvsearch calibrate bundled --method lukv --policy snapkv -o runs/snapkv
    """
    from kvsearch.calibrate.data import default_data, load_calibration_data
    from kvsearch.calibrate.recipe import recipe_path, resolve_recipe
    from kvsearch.plan import canonical_json
    from kvsearch.plan.files import atomic_write

    typed = {"method": method, "policy": policy, "normalization": normalization, "aggregate": aggregate}
    chosen = resolve_recipe(recipe_path(recipe) if recipe else None, typed, settings or [], no_gap)
    policy_object, options = chosen.make_policy(), chosen.options(common.seed)
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

    from kvsearch.calibrate.lukv import calibrate_lukv
    from kvsearch.plan.profile import save_profile
    from kvsearch.policies.checks import warn_unfit

    warn_unfit(loaded.model, [policy_object])
    common.say(f"calibrating {model} for {chosen.policy} on {texts.questions} questions from {texts.name}")
    with common.progress("questions") as progress:
        profile = calibrate_lukv(loaded, texts, policy_object, options, progress)
    save_profile(profile, directory / PROFILE, overwrite=True)
    if common.as_json:
        common.print_json({"profile": str(directory / PROFILE), **profile.metadata.model_dump(mode="json")})
    else:
        common.say(f"wrote {directory / PROFILE}; next: kvsearch export {directory} --ratio 0.8 -o plan.json")
