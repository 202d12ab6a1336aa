"""What `show` says of a fitted ranking: how much of what the oracle keeps it keeps, beside other policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from kvsearch.core.arrays import Floats
from kvsearch.core.sign_flips import compute_chances
from kvsearch.evaluation.statistics import estimate_by_student
from kvsearch.plan import Profile
from kvsearch.policies.fitted import is_last
from kvsearch.report.numbers import format_interval, pluralize
from kvsearch.report.table import Cell, Table

CHANCE: Final = 0.05


class TextLosses:
    """How far replies move on every text under uniform budgets, for several rankings; the first is the fitted one.

    A ranking is better than another where that is so at every size, beyond chance: by a sign-flip test over texts,
    whose chance is that of the luckiest of all that it is compared with. Below five texts nothing is beyond chance.

    `is_last` where all that it was compared with is better, though only the best of these are here.

    They are read from a profile that has them: `values` [N, P, B] by text, ranking and size, `at` [B] shares of
    entries.
    """

    def __init__(self, profile: Profile) -> None:
        settings: dict[str, Any] = profile.metadata.provenance.settings
        self.values: Floats = profile.arrays["text_loss"].astype(np.float64)
        self.rankings: Sequence[str] = settings["judged"]
        self.at: Sequence[float] = settings["at"]
        self.is_last = is_last(profile.arrays)

    @property
    def mean(self) -> Floats:
        """The mean over texts, [P, B]."""
        return np.asarray(self.values.mean(0))

    @property
    def best(self) -> int:
        """The number of the best ranking that was not fitted, mean over texts and sizes."""
        return 1 + int(self.mean[1:].mean(1).argmin())

    @property
    def is_better(self) -> bool | None:
        """Whether the first ranking is better than all that were not fitted; None: not known.

        False if the best of these is better.
        """
        leads = self.values[:, 1:] - self.values[:, :1]  # [N, P', B]
        won, lost = (
            [compute_chances(sign * leads[..., size].T / len(leads)) <= CHANCE for size in range(len(self.at))]
            for sign in (1, -1)
        )
        if np.all(won):
            return True
        return False if np.all(lost, axis=0)[self.best - 1] else None

    @property
    def words(self) -> str:
        """How far replies move under the first ranking and under the best that was not fitted, at every size."""
        said = []
        for share, fitted, other in zip(self.at, self.values[:, 0].T, self.values[:, self.best].T, strict=True):
            lead = format_interval(estimate_by_student(other - fitted), "+.3f", unit=1)
            said.append(
                f"{share:.0%}: {fitted.mean():.3f}, under {self.rankings[self.best]} {other.mean():.3f}, {lead}"
            )
        return f"replies move at {'; '.join(said)} (mean and 95% interval over {pluralize(len(self.values), 'text')})"

    @property
    def preferred(self) -> str | None:
        """The built-in ranking to use in place of the fit; None where the fit may be as good."""
        return self.rankings[self.best] if self.is_last or self.is_better is False else None


def list_ranking_remarks(profile: Profile) -> Iterator[str]:
    """Yield what to know before a fitted ranking is used."""
    settings: dict[str, Any] = profile.metadata.provenance.settings
    fit, choose, report = settings["contexts"]
    yield f"fitted on {pluralize(fit, 'context')}, chosen on {choose}, reported on {report}"
    if settings.get("few_contexts"):
        yield f"{pluralize(fit, 'context')} to fit on are few: regressions with strong shrinkage alone were tried"
    if bare := settings.get("without_questions"):
        which = "the" if bare == fit + choose + report else f"{bare} of the {fit + choose + report}"
        yield f"{which} contexts have no questions, and are asked for themselves alone (reconstruction)"
    if unseen := settings.get("unseen_heads"):
        listed = ", ".join(unseen if len(unseen) <= 8 else [*unseen[:8], "..."])
        heads = f"{pluralize(len(unseen), 'kv head')} ({listed} by layer)"
        yield f"nothing that was asked looks at the context in {heads}: even ranking there"
    losses = TextLosses(profile)
    best = losses.rankings[losses.best]
    if losses.is_last:
        yield f"every other ranking is better than the fit, {losses.words}: it is not used"
    elif losses.is_better:
        yield f"the fit ranks better than each of {len(losses.rankings) - 1} others: {losses.words}"
    elif losses.is_better is False:
        yield f"{best} ranks better than the fit: {losses.words}; use {best}, or fit on more"


def list_ranking_parts(profile: Profile) -> Iterator[str | Table]:
    """Yield tables of how replies move and of recall, by budget and by layer, on contexts that were not fitted on."""
    settings: dict[str, Any] = profile.metadata.provenance.settings
    losses = TextLosses(profile)
    at = settings["at"]
    names = settings["rankings"]
    lost = "how far replies move with even budgets (total variation)"
    kept = "importance kept, of what the oracle keeps"
    columns = ["ranking", *(f"{budget:.0%}" for budget in at)]
    yield Table.numbers(lost, columns, zip(losses.rankings, losses.mean, strict=True), ".3f")
    recall = zip(names, profile.arrays["recall"].mean((2, 3)), strict=True)
    yield Table.numbers(f"{kept}; mean over heads and layers", columns, recall, ".3f")
    layers = profile.arrays["recall"].mean(3)[:, 0]  # [P, L]
    rows = []
    for row, layer in enumerate(profile.metadata.layers):
        best = int(layers[1:, row].argmax()) + 1
        other = Cell(f"{layers[best, row]:.3f} ({names[best]})", value=float(layers[best, row]))
        rows.append([layer, Cell.number(float(layers[0, row]), ".3f"), other])
    columns = ["layer", profile.metadata.method, "the best other policy"]
    yield Table.plain(f"by layer at {at[0]:.0%}", columns, rows)
