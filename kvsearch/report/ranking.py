"""What `show` says of a fitted ranking: how much of what the oracle keeps it keeps, beside other policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.plan import Profile
from kvsearch.report.lukv import origin
from kvsearch.report.numbers import counted
from kvsearch.report.screen import facts, screen_table

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        if silent := self.settings.get("silent_layers"):
            yield f"nothing that was asked looks at the context in layers {', '.join(map(str, silent))}: even ranking"
        if self.is_last:
            yield "every other ranking is better than the fit on contexts that it never saw: it is not used"
        elif (better := self.loses_to()) is not None:
            yield f"{better} ranks better than the fit on contexts that it never saw: use {better}, or fit on more"

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        names, at = self.settings["rankings"], self.settings["at"]
        return {
            "metadata": self.profile.metadata.model_dump(mode="json"),
            "recall": _by_budget(names, at, self.recall),
            **({} if self.loss is None else {"loss": _by_budget(names, at, self.loss)}),
            "recall_by_layer": self.profile.arrays["recall"].mean(3).tolist(), "remarks": list(self.remarks()),
        }  # fmt: skip

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        metadata, at = self.profile.metadata, self.settings["at"]
        told = {**origin(metadata, "contexts"), "asked for": ", ".join(self.settings["targets"])}
        if "features" in self.settings:
            told["features"] = ", ".join(self.settings["features"])
        if "bank" in self.settings:
            told["bank"] = f"{self.settings['bank']} queries for every head, chosen by {self.settings['chosen_by']}"
        yield from facts(told)
        columns = ["ranking", *(f"{budget:.0%}" for budget in at)]
        named = ("importance kept, of what the oracle keeps; mean over heads and layers", self.recall, 3)
        lost = ("how far replies move with even budgets (total variation)", self.loss, 3)
        for title, found, digits in (lost, named):
            if found is not None:
                table = screen_table(title, columns)
                for name, row in zip(self.settings["rankings"], found, strict=True):
                    table.add_row(name, *(f"{value:.{digits}f}" for value in row))
                yield table
        layers = self.profile.arrays["recall"].mean(3)  # [P, B, L]
        table = screen_table(f"by layer at {at[0]:.0%}", ["layer", metadata.method, "the best other policy"])
        for row, layer in enumerate(metadata.layers):
            best = int(layers[1:, 0, row].argmax()) + 1
            other = f"{layers[best, 0, row]:.3f} ({self.settings['rankings'][best]})"
            table.add_row(str(layer), f"{layers[0, 0, row]:.3f}", other)
        yield table
        yield from self.remarks()


def _by_budget(names: Sequence[str], at: Sequence[float], found: Floats) -> dict[str, dict[str, float]]:
    return {name: dict(zip(map(str, at), row.tolist(), strict=True)) for name, row in zip(names, found, strict=True)}
