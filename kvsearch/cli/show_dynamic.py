"""What `show` prints of the profile of a dynamic method: its static table, and what that loses against the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsearch.cli.common import Common
from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from kvsearch.calibration.analysis import FitGain, Misplaced
    from kvsearch.plan import Profile

SHOWN = (0.5, 0.8, 0.9)
REMARKED = 0.8


def is_dynamic(profile: Profile) -> bool:
    """Whether a profile is the mean of what a dynamic rule decided."""
    return "ratio_deviation" in profile.arrays


def remarks(profile: Profile) -> list[str]:
    """What there is to say about a profile of a dynamic method, one line each; nothing about another."""
    if not is_dynamic(profile):
        return []
    from kvsearch.calibration.analysis import fit_gain, misplaced

    lines = [_exponents(profile)] if profile.metadata.method == "cake" else []
    gain = fit_gain(profile)
    if gain is not None:
        lines.append(_gain(gain, profile))
    return [*lines, _moved(misplaced(profile, REMARKED), profile.metadata.questions)]


def _exponents(profile: Profile) -> str:
    """Where CAKE's exponents come from."""
    settings = profile.metadata.provenance.settings
    found = f"exponents tau1 {settings['tau1']:.3g}, tau2 {settings['tau2']:.3g}"
    source = settings.get("exponents", "fixed")
    if source != "auto":
        return f"{found}: {'fitted' if source == 'fit' else 'as given'}"
    if (settings["tau1"], settings["tau2"]) == (1, 1):
        name = profile.metadata.model.name
        return f"{found}: CAKE's authors tuned none for {name} at {settings['tuned_for']} entries per kv head"
    return f"{found}: tuned by CAKE's authors for {settings['tuned_for']} entries per kv head"


def _gain(gain: FitGain, profile: Profile) -> str:
    ratio = profile.metadata.provenance.settings["fit_ratio"]
    seen = f"fit gains {gain.seen:.3g} nats per answer over (1, 1), which loses {gain.plain:.3g} at ratio {ratio:g}"
    if gain.held_out != gain.held_out:
        return f"{seen}; one question cannot tell what it gains on others"
    return f"{seen}; chosen on one half of the questions, {gain.held_out:+.3g} on the other"


def _moved(found: Misplaced, prompts: int) -> str:
    """How far a static table is from the rule, in words."""
    if prompts < 2:
        return (
            "one prompt cannot tell what a static table loses against the dynamic rule: calibrate on more contexts, or "
            "with --protocol question-aware"
        )
    return (
        f"at ratio {found.ratio:g} a static table moves {_percent(found.static)} of the entries that the dynamic rule "
        f"would place elsewhere ({_percent(found.unseen)} of a prompt that is not in it, even budgets "
        f"{_percent(found.even)})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def show_dynamic(profile: Profile, ratio: float, common: Common, with_plan: bool = False) -> None:
    """Print the static table at a global `ratio`, its spread over the prompts, stability and misplaced entries.

    Raises:
        UsageError: a plan was to be judged, which takes the importance of entries.
    """
    from kvsearch.calibration.analysis import misplaced, stability

    metadata = profile.metadata
    if with_plan:
        raise UsageError(
            f"--plan needs a LU-KV profile: a {metadata.method} profile does not say what entries are worth"
        )
    ratios = profile.local_ratios(ratio)
    row = min(max(round(100 * ratio), 1), len(profile.arrays["ratio_deviation"])) - 1
    deviation = profile.arrays["ratio_deviation"][row]
    stable = [stability(profile, at) for at in SHOWN]
    moved = [misplaced(profile, at) for at in SHOWN]
    if common.as_json:
        common.print_json(
            {
                "metadata": metadata.model_dump(mode="json"), "ratio": ratio, "local_ratios": ratios.tolist(),
                "deviation": deviation.tolist(), "misplaced": [_without_nan(found) for found in moved],
                "stability": [{**_without_nan(found), "verdict": found.verdict} for found in stable],
                "remarks": remarks(profile),
            }
        )  # fmt: skip
        return
    _print(profile, ratio, ratios, deviation, common)
    common.out.print(_misplaced_table(moved))
    common.out.print(_stability_table(stable))
    common.out.print(f"at {stable[1].ratio:g}: {stable[1].verdict}", markup=False)
    for line in remarks(profile):
        common.out.print(line, markup=False, soft_wrap=True)


def _print(profile: Profile, ratio: float, ratios: Any, deviation: Any, common: Common) -> None:
    from kvsearch.cli.heatmap import heatmap
    from kvsearch.cli.show import show_facts

    metadata = profile.metadata
    settings = metadata.provenance.settings
    show_facts(
        {
            "model": metadata.model.short(), "method": metadata.method, "prompts": metadata.questions,
            "policy": f"{metadata.policy.name} {metadata.policy.params}", "length": f"{metadata.length} tokens",
            "data": settings.get("data"), "protocol": settings.get("protocol"),
        },
        common,
    )  # fmt: skip
    common.out.print(heatmap(f"local eviction ratio at {ratio:g}", ratios, metadata.layers, "{:.2f}", "mean"))
    title = "its standard deviation over the prompts"
    common.out.print(heatmap(title, deviation, metadata.layers, "{:.3f}", "mean"))


def _misplaced_table(found: list[Misplaced]) -> Table:
    from kvsearch.cli.show import plain_table

    columns = ["ratio", "static table", "worst prompt", "prompt not in it", "even budgets"]
    table = plain_table("entries placed elsewhere than by the dynamic rule", columns)
    for at in found:
        shares = (at.static, at.worst, at.unseen, at.even)
        table.add_row(f"{at.ratio:g}", *("-" if share != share else _percent(share) for share in shares))
    return table


def _stability_table(stable: list[Any]) -> Table:
    from kvsearch.cli.show import plain_table

    columns = ["ratio", "prompts of one text", "texts", "odd/even prompts"]
    table = plain_table("rank correlation of local ratios", columns)
    for at in stable:
        shown = (at.questions, at.texts, at.halves)
        table.add_row(f"{at.ratio:g}", *("-" if value != value else f"{value:.2f}" for value in shown))
    return table


def _without_nan(found: Any) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in found.__dict__.items()}
