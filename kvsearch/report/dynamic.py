"""What `show` says of the profile of a dynamic method: its static table, and what that loses against the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsearch.calibration.analysis import fit_gain, misplaced
from kvsearch.plan import Profile
from kvsearch.report.heatmap import heatmap
from kvsearch.report.lukv import STABILITY_SHOWN, origin, stability_json, stability_parts, without_nan
from kvsearch.report.numbers import percent
from kvsearch.report.screen import facts, screen_table

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType

REMARKED = 0.8  # the ratio that remarks are about


def is_dynamic(profile: Profile) -> bool:
    """Return whether a profile is the mean of what a dynamic rule decided."""
    return "ratio_deviation" in profile.arrays


def remarks(profile: Profile) -> list[str]:
    """Return what there is to say about a profile of a dynamic method, one line each; nothing about another."""
    if not is_dynamic(profile):
        return []
    settings, lines = profile.metadata.provenance.settings, []
    if profile.metadata.method == "cake":
        lines.append(f"exponents tau1 {settings['tau1']:.3g}, tau2 {settings['tau2']:.3g}: {_source(profile)}")
    gain = fit_gain(profile)
    if gain is not None:
        on_others = f"chosen on one half of the questions, {gain.held_out:+.3g} on the other"
        if gain.held_out != gain.held_out:
            on_others = "one question cannot tell what it gains on others"
        lines.append(
            f"fit gains {gain.seen:.3g} nats per answer over (1, 1), which loses {gain.plain:.3g} at ratio "
            f"{settings['fit_ratio']:g}; {on_others}"
        )
    if profile.metadata.questions < 2:
        lines.append(
            "one prompt cannot tell what a static table loses against the dynamic rule: calibrate on more contexts, or "
            "with --protocol question-aware"
        )
    else:
        found = misplaced(profile, REMARKED)
        lines.append(
            f"at ratio {found.ratio:g} a static table moves {percent(found.static, 1)}% of the entries that the "
            f"dynamic rule would place elsewhere ({percent(found.unseen, 1)}% of a prompt that is not in it, even "
            f"budgets {percent(found.even, 1)}%)"
        )
    return lines


def _source(profile: Profile) -> str:
    """Say where CAKE's exponents come from."""
    settings = profile.metadata.provenance.settings
    source = settings.get("exponents", "fixed")
    if source != "auto":
        return "fitted" if source == "fit" else "as given"
    if (settings["tau1"], settings["tau2"]) == (1, 1):
        name = profile.metadata.model.name
        return f"CAKE's authors tuned none for {name} at {settings['tuned_for']} entries per kv head"
    return f"tuned by CAKE's authors for {settings['tuned_for']} entries per kv head"


@dataclass(frozen=True, eq=False)
class DynamicView:
    """The profile of a dynamic method at a global eviction ratio.

    Raises:
        UsageError: the ratio is out of range.
    """

    profile: Profile
    ratio: float

    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return local eviction ratios and their standard deviation over the prompts, both [L, Hkv]."""
        deviations = self.profile.arrays["ratio_deviation"]
        row = min(max(round(100 * self.ratio), 1), len(deviations)) - 1
        return self.profile.local_ratios(self.ratio), deviations[row]

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        ratios, deviation = self._tables()
        return {
            "metadata": self.profile.metadata.model_dump(mode="json"), "ratio": self.ratio,
            "local_ratios": ratios.tolist(), "deviation": deviation.tolist(),
            "misplaced": [without_nan(misplaced(self.profile, at)) for at in STABILITY_SHOWN],
            "stability": stability_json(self.profile), "remarks": remarks(self.profile),
        }  # fmt: skip

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        ratios, deviation = self._tables()
        metadata = self.profile.metadata
        protocol = metadata.provenance.settings.get("protocol")
        yield from facts({**origin(metadata, "prompts"), "protocol": protocol})
        yield heatmap(f"local eviction ratio at {self.ratio:g}", ratios, metadata.layers, "{:.2f}", "mean")
        title = "its standard deviation over the prompts"
        yield heatmap(title, deviation, metadata.layers, "{:.3f}", "mean")
        columns = ["ratio", "static table", "worst prompt", "prompt not in it", "even budgets"]
        table = screen_table("entries placed elsewhere than by the dynamic rule", columns)
        for at in STABILITY_SHOWN:
            found = misplaced(self.profile, at)
            shares = (found.static, found.worst, found.unseen, found.even)
            table.add_row(f"{found.ratio:g}", *("-" if one != one else f"{percent(one, 1)}%" for one in shares))
        yield table
        yield from stability_parts(self.profile, "prompts", unknown="-")
        yield from remarks(self.profile)
