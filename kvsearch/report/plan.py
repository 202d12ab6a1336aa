"""What `show` says of a plan: its settings, and a heat map of the budgets of each phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsearch.plan import PHASES, Plan
from kvsearch.plan.schema import STATIC
from kvsearch.report.heatmap import heatmap
from kvsearch.report.screen import facts

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class PlanView:
    """A plan, phase by phase."""

    plan: Plan

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        return self.plan.model_dump(mode="json")

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        import numpy as np

        plan, allocation = self.plan, self.plan.allocation
        settings: dict[str, Any] = {
            "model": plan.model.short(), "method": plan.provenance.method, "scaling": plan.scaling,
            "length": plan.length, "floor": plan.floor,
        }  # fmt: skip
        if allocation.name != STATIC:
            meaning = "budgets say what the entries of a prompt are shared out from, not what a head keeps"
            settings["allocation"] = f"{allocation.name} {allocation.params}: {meaning}"
        for phase in PHASES["both"]:
            part = getattr(plan, phase)
            if part is None:
                continue
            specs = [layer.policy for layer in part.layers if layer is not None]
            each = [f"{spec.name} {spec.params}" for spec in specs]
            policies = sorted(set(each))
            own = {"phase": phase, "total": f"{part.total} entries", "policy": "; ".join(policies)}
            alone = [index for index, layer in enumerate(part.layers) if layer is None]
            yield from facts({**settings, **own, **({"layers left alone": alone} if alone else {})})
            budgets = np.array([part.budgets[layer] for layer in part.planned_layers])
            names = [spec.name for spec in specs]
            if len(set(names)) < len(policies):
                names = each  # of one pattern there are several settings
            title = f"{phase}: entries per layer and kv head"
            yield heatmap(title, budgets, part.planned_layers, patterns=names if len(policies) > 1 else None)
