"""What `show` says of a fitted ranking: how much of what the oracle keeps it keeps, beside other policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsearch.core.arrays import Floats
from kvsearch.core.sign_flips import compute_chances
from kvsearch.evaluation.statistics import student_estimate
from kvsearch.plan import Profile
from kvsearch.policies.fitted import is_last
from kvsearch.report.numbers import counted, interval
from kvsearch.report.table import Cell, Table

UNSEEN = "without the kind"  # the fit that never saw it
CHANCE: Final = 0.05


@dataclass(frozen=True, eq=False)
class TextLosses:
    """How far replies move on every text where all heads keep as much, under rankings of which the first are `fits`.

    A ranking is better than another where that is so at every size, beyond chance: by a sign-flip test over texts,
    whose chance is that of the luckiest of all that it is compared with. Below five texts nothing is beyond chance.
    """

    values: Floats  # [N, P, B]
    rankings: tuple[str, ...]
    at: tuple[float, ...]  # shares of the entries, [B]
    fits: int = 1

    @property
    def mean(self) -> Floats:
        """The mean over texts, [P, B]."""
        return np.asarray(self.values.mean(0))

    @property
    def best(self) -> int:
        """The number of the best ranking that was not fitted, mean over texts and sizes."""
        return self.fits + int(self.mean[self.fits :].mean(1).argmin())

    @property
    def is_better(self) -> bool | None:
        """Whether the first ranking is better than all that were not fitted; None: not known.

        False if the best of these is better.
        """
        leads = self.values[:, self.fits :] - self.values[:, :1]  # [N, P', B]
        won, lost = (
            [compute_chances(sign * leads[..., size].T / len(leads)) <= CHANCE for size in range(len(self.at))]
            for sign in (1, -1)
        )
        if np.all(won):
            return True
        return False if np.all(lost, axis=0)[self.best - self.fits] else None

    @property
    def words(self) -> str:
        """How far replies move under the first ranking and under the best that was not fitted, at every size."""
        said = []
        for share, mine, other in zip(self.at, self.values[:, 0].T, self.values[:, self.best].T, strict=True):
            lead = interval(student_estimate(other - mine), "+.3f", unit=1)
            said.append(f"{share:.0%}: {mine.mean():.3f}, under {self.rankings[self.best]} {other.mean():.3f}, {lead}")
        return f"replies move at {'; '.join(said)} (mean and 95% interval over {counted(len(self.values), 'text')})"


@dataclass(frozen=True, eq=False)
class LeftOutKind:
    """How rankings do on a kind of question that the first of them never saw; the second is the whole fit.

    `recall` is by ranking and budget, [P + 1, B]; `questions` of that kind were asked.
    """

    kind: str
    questions: int
    recall: NDArray[Any]
    losses: TextLosses

    @property
    def words(self) -> str:
        """Whether the ranking carries over to kinds of questions that it was not fitted on."""
        asked = f"fitted without {self.kind} and asked {counted(self.questions, 'question')} of that kind"
        measured = f"{asked}, {self.losses.words}"
        if self.losses.is_better is None:
            return f"{measured}: whether the ranking carries over to other kinds is not known"
        if self.losses.is_better:
            return f"the ranking carries over to a kind of question that it never saw: {measured}"
        return (
            "warning: the ranking does not carry over to kinds of questions that it never saw, and throws away what it "
            f"was not asked for: {measured}; fit on every kind that will be asked, or use "
            f"{self.losses.rankings[self.losses.best]}"
        )


@dataclass(frozen=True, eq=False)
class RankingView:
    """The recall of a fitted ranking and of the policies that it was compared with, on contexts it never saw."""

    profile: Profile

    @property
    def settings(self) -> dict[str, Any]:
        """What the fit was told, and what it was compared with."""
        return self.profile.metadata.provenance.settings

    @property
    def losses(self) -> TextLosses | None:
        """How far replies move by policy and budget; None: not measured, as by older fits."""
        return self._losses_of("text_loss", self.settings["rankings"], fits=1)

    @property
    def left_out(self) -> LeftOutKind | None:
        """What was measured of a kind of question that was left out; None: nothing, or by an older fit."""
        losses = self._losses_of("kind_text_loss", (UNSEEN, *self.settings["rankings"]), fits=2)
        if losses is None:
            return None
        recall = self.profile.arrays["kind_recall"].mean((2, 3))
        return LeftOutKind(self.settings["left_out"], self.settings["left_out_questions"], recall, losses)

    def _losses_of(self, array: str, rankings: tuple[str, ...], fits: int) -> TextLosses | None:
        found = self.profile.arrays.get(array)
        return found if found is None else TextLosses(found.astype(np.float64), rankings, self.settings["at"], fits)

    def _about_kinds(self) -> Iterator[str]:
        """Yield whether the ranking carries over to other kinds of questions; of older fits nothing is known."""
        if (found := self.left_out) is not None:
            yield found.words
        elif (kinds := self.settings.get("kinds")) is not None:
            why = {
                0: "no kinds of questions are named", 1: "all questions are of one kind",
            }.get(kinds, f"too few contexts to leave one of {kinds} kinds of questions out")  # fmt: skip
            yield f"{why}: whether the ranking carries over to other kinds is not known"

    @property
    def is_last(self) -> bool:
        """Whether replies move less under every other policy, mean over budgets."""
        return self.losses is not None and is_last(self.losses.values)

    @property
    def preferred(self) -> str | None:
        """The built-in ranking to use in place of the fit; None where the fit may be as good."""
        losses = self.losses
        is_behind = losses is not None and (self.is_last or losses.is_better is False)
        return losses.rankings[losses.best] if losses is not None and is_behind else None

    def remarks(self) -> Iterator[str]:
        """Yield what to know before the ranking is used."""
        fit, choose, report = self.settings["contexts"]
        yield f"fitted on {counted(fit, 'context')}, chosen on {choose}, reported on {report}"
        if self.settings.get("few_contexts"):
            yield f"{counted(fit, 'context')} to fit on are few: regressions with strong shrinkage alone were tried"
        if bare := self.settings.get("without_questions"):
            which = "the" if bare == fit + choose + report else f"{bare} of the {fit + choose + report}"
            yield f"{which} contexts have no questions, and are asked for themselves alone (reconstruction)"
        if unseen := self.settings.get("unseen_heads"):
            listed = ", ".join(unseen if len(unseen) <= 8 else [*unseen[:8], "..."])
            heads = f"{counted(len(unseen), 'kv head')} ({listed} by layer)"
            yield f"nothing that was asked looks at the context in {heads}: even ranking there"
        yield from self._about_kinds()
        if (losses := self.losses) is None:
            return
        best = losses.rankings[losses.best]
        if self.is_last:
            yield f"on average over sizes every other ranking is better than the fit, {losses.words}: it is not used"
        elif losses.is_better:
            yield f"the fit ranks better than each of {len(losses.rankings) - 1} others: {losses.words}"
        elif losses.is_better is False:
            yield f"{best} ranks better than the fit: {losses.words}; use {best}, or fit on more"

    def parts(self) -> Iterator[str | Table]:
        """Yield tables of how replies move and of recall, by budget and by layer."""
        at = self.settings["at"]
        names = self.settings["rankings"]
        lost = "how far replies move with even budgets (total variation)"
        kept = "importance kept, of what the oracle keeps"
        tables = [(f"{kept}; mean over heads and layers", names, self.profile.arrays["recall"].mean((2, 3)))]
        if self.losses is not None:
            tables.insert(0, (lost, names, self.losses.mean))
        if (apart := self.left_out) is not None:
            on = f"on questions of the kind {apart.kind}"
            rankings = apart.losses.rankings
            tables += [(f"{lost}, {on}", rankings, apart.losses.mean), (f"{kept}, {on}", rankings, apart.recall)]
        columns = ["ranking", *(f"{budget:.0%}" for budget in at)]
        for title, rankings, values in tables:
            yield Table.numbers(title, columns, zip(rankings, values, strict=True), ".3f")
        layers = self.profile.arrays["recall"].mean(3)[:, 0]  # [P, L]
        rows = []
        for row, layer in enumerate(self.profile.metadata.layers):
            best = int(layers[1:, row].argmax()) + 1
            other = Cell(f"{layers[best, row]:.3f} ({names[best]})", value=float(layers[best, row]))
            rows.append([layer, Cell.number(float(layers[0, row]), ".3f"), other])
        columns = ["layer", self.profile.metadata.method, "the best other policy"]
        yield Table.plain(f"by layer at {at[0]:.0%}", columns, rows)
