"""What a calibration by signals measures, by content: samples of anything else do not belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.steps import identity_of
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.signals import FULL_NLL, ROWS_ENTROPY
from kvsearch.policies import Policy

# options that decide what is measured; batches and memory change rounding only, and the rest is only recorded
DECISIVE = (
    "budgets", "phases", "signals", "entropy_rows", "answer_tokens", "protocol", "naive",
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """All that results depend on, and the arrays of a sample.

    `identity` has a digest or a value of each part, by what to call it. `shapes` are those of one sample; `summed` is
    the shape [P, L] of mean attention rows, which are added up over samples, None where they are not wanted.
    """

    identity: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    summed: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        data: CalibrationData,
        prompts: Sequence[CalibrationPrompt],
        options: PolykvOptions,
        policies: Sequence[Policy],
    ) -> Measurement:
        """Describe the measurement of `prompts`, made of `data`, under the `policies` in their order."""
        identity = identity_of(
            loaded, data, prompts,
            {"patterns": [[policy.name, policy.parameters()] for policy in policies],
             **{name: getattr(options, name) for name in DECISIVE}},
        )  # fmt: skip
        by_layer = len(options.measured_phases), len(describe(loaded.model).full_layers)
        whole = len(options.budgets), *by_layer, len(policies)
        shapes: dict[str, tuple[int, ...]] = {}
        if "cosine" in options.signals:
            shapes |= {"cosine": whole, "relative_error": whole}
        if "ppl" in options.signals:
            shapes |= {"nll": whole, FULL_NLL: ()}
        if "entropy" in options.signals:
            shapes[ROWS_ENTROPY] = by_layer
        return cls(identity, shapes, by_layer if "entropy" in options.signals else None)
