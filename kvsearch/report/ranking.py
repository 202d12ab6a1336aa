"""What `show` says of a fitted ranking: how much of what the oracle keeps it keeps, beside other policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsearch.core.arrays import Floats
from kvsearch.plan import Profile
from kvsearch.report.numbers import counted
from kvsearch.report.table import Cell, Table

UNSEEN = "without the kind"  # the fit that never saw it


@dataclass(frozen=True, eq=False)
class LeftOutKind:
    """How rankings do on a kind of question that the first of them never saw; the second is the whole fit.

    `recall` and `loss` are by ranking and budget, [P + 1, B]; `questions` of that kind were asked.
    """

    kind: str
    questions: int
    rankings: tuple[str, ...]
    recall: Floats
    loss: Floats

    @property
    def words(self) -> str:
        """Whether the ranking carries over to kinds of questions that it was not fitted on.

        It does where the fit that never saw the kind moves replies no more than the best that was not fitted.
        """
        mean = self.loss.mean(1)
        place = 2 + int(mean[2:].argmin())
        unseen, whole, best = (f"{mean[row]:.3f}" for row in (0, 1, place))
        other = self.rankings[place]
        measured = f"replies move by {unseen}, under {other} by {best}, under the whole fit by {whole}"
        asked = f"fitted without {self.kind} and asked {counted(self.questions, 'question')} of that kind"
        if mean[0] <= mean[place]:
            return f"the ranking carries over to a kind of question that it never saw: {asked}, {measured}"
        return (
            "warning: the ranking does not carry over to kinds of questions that it never saw, and throws away what it "
            f"was not asked for: {asked}, {measured}; fit on every kind that will be asked, or use {other}"
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
    def recall(self) -> Floats:
        """Recall by policy and budget, mean over heads and layers, [P, B]."""
        return np.asarray(self.profile.arrays["recall"].mean((2, 3)), np.float64)

    @property
    def loss(self) -> Floats | None:
        """How far replies move by policy and budget where all heads keep as much, [P, B]; None: not measured."""
        found = self.profile.arrays.get("loss")
        return None if found is None else np.asarray(found, np.float64)

    @property
    def left_out(self) -> LeftOutKind | None:
        """What was measured of a kind of question that was left out; None: nothing."""
        if "kind_loss" not in self.profile.arrays:
            return None
        recall, loss = (np.asarray(self.profile.arrays[name], np.float64) for name in ("kind_recall", "kind_loss"))
        settings = self.settings
        rankings = (UNSEEN, *settings["rankings"])
        return LeftOutKind(settings["left_out"], settings["left_out_questions"], rankings, recall.mean((2, 3)), loss)

    def _about_kinds(self) -> Iterator[str]:
        """Yield whether the ranking carries over to other kinds of questions; of older fits nothing is known."""
        if (found := self.left_out) is not None:
            yield found.words
        elif (kinds := self.settings.get("kinds")) is not None:
            why = {
                0: "no kinds of questions are named", 1: "all questions are of one kind",
            }.get(kinds, f"too few contexts to leave one of {kinds} kinds of questions out")  # fmt: skip
            yield f"{why}: whether the ranking carries over to other kinds is not known"

    def loses_to(self) -> str | None:
        """Return the best policy, if not the fitted one: by how far replies move or, where not measured, recall."""
        best = int(self._goodness.argmax())
        return str(self.settings["rankings"][best]) if best else None

    @property
    def is_last(self) -> bool:
        """Whether every other policy is better, by how far replies move."""
        return self.loss is not None and bool((self._goodness[1:] > self._goodness[0]).all())

    @property
    def _goodness(self) -> Floats:
        """The mean over budgets of each policy, [P], higher is better."""
        mean: Floats = self.recall.mean(1) if self.loss is None else -self.loss.mean(1)
        return mean

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
        if self.is_last:
            yield "every other ranking is better than the fit on contexts that it never saw: it is not used"
        elif (better := self.loses_to()) is not None:
            yield f"{better} ranks better than the fit on contexts that it never saw: use {better}, or fit on more"

    def parts(self) -> Iterator[str | Table]:
        """Yield tables of how replies move and of recall, by budget and by layer."""
        at = self.settings["at"]
        names = self.settings["rankings"]
        lost = "how far replies move with even budgets (total variation)"
        kept = "importance kept, of what the oracle keeps"
        tables = [(lost, names, self.loss), (f"{kept}; mean over heads and layers", names, self.recall)]
        if (apart := self.left_out) is not None:
            on = f"on questions of the kind {apart.kind}"
            tables += [(f"{lost}, {on}", apart.rankings, apart.loss), (f"{kept}, {on}", apart.rankings, apart.recall)]
        columns = ["ranking", *(f"{budget:.0%}" for budget in at)]
        for title, rankings, values in tables:
            if values is not None:
                yield Table.numbers(title, columns, zip(rankings, values, strict=True), ".3f")
        layers = self.profile.arrays["recall"].mean(3)[:, 0]  # [P, L]
        rows = []
        for row, layer in enumerate(self.profile.metadata.layers):
            best = int(layers[1:, row].argmax()) + 1
            other = Cell(f"{layers[best, row]:.3f} ({names[best]})", value=float(layers[best, row]))
            rows.append([layer, Cell.number(float(layers[0, row]), ".3f"), other])
        columns = ["layer", self.profile.metadata.method, "the best other policy"]
        yield Table.plain(f"by layer at {at[0]:.0%}", columns, rows)
