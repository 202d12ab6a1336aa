"""What a calibration by signals measures, by content: samples of anything else do not belong to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.canonical import sha256_of
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
        # the texts, as the tokenizer and the options cut them
        tokens = [
            [one.ids[0].tolist(), [[after.answer, *after.tokens[0].tolist()] for after in one.continuations]]
            for one in prompts
        ]
        identity = {
            "model weights": loaded.fingerprint.weights_sha256,
            "model configuration": loaded.fingerprint.config_sha256,
            "dtype": str(loaded.model.dtype),
            "data": data.sha256,
            "prompts": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
            "patterns": sha256_of([[policy.name, policy.parameters()] for policy in policies]),
            **{name: json.dumps(getattr(options, name)) for name in DECISIVE},
        }
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

    def other(self, identity: Mapping[str, str]) -> str | None:
        """Name the first part in which another measurement differs; None if it is the same."""
        return next((name for name, value in self.identity.items() if identity.get(name) != value), None)
