"""Which model a plan or profile belongs to."""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from kvsearch.errors import IncompatibleError
from kvsearch.plan.fields import Heads, Layers, Record, Sha256, Text, Width

_COMPARED = {
    "model_type": "architecture", "config_sha256": "configuration", "weights_sha256": "weights", "layers": "layers",
    "kv_heads": "kv heads per layer", "head_dim": "dimensions of a head",
}  # fmt: skip
_ROUNDING = "float16"  # in which small weights, and so their hash, are others than in float32 and bfloat16
_DIGITS = 12  # of a hash


class ModelFingerprint(Record):
    """A model by content: hashes of its configuration and weights, and the shape of its KV cache.

    `name`, `revision` and `dtype`, in which it was loaded, are for the reader and never compared; a file that does not
    say the dtype is older than this field. `layers` counts all layers of the model, `kv_heads`
    the kv heads of each, `head_dim` the width of one of them.
    """

    name: Text
    model_type: Text
    config_sha256: Sha256
    weights_sha256: Sha256
    revision: Text | None = None
    layers: Layers
    kv_heads: Heads
    head_dim: Width
    dtype: Text | None = None

    @model_serializer(mode="wrap")
    def _without_unknown(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave an unknown dtype out: a file without it keeps its bytes."""
        written: dict[str, Any] = handler(self)
        if self.dtype is None:
            written.pop("dtype", None)
        return written

    def mismatch(self, other: ModelFingerprint, weights: bool = True) -> str | None:
        """Say on one line what differs between two models, or None; `weights=False` lets the weights differ."""
        found = []
        for field, words in _COMPARED.items():
            mine, yours = getattr(self, field), getattr(other, field)
            if mine != yours and (weights or field != "weights_sha256"):
                if field.endswith("sha256"):
                    mine, yours = mine[:_DIGITS], yours[:_DIGITS]
                found.append(f"other {words} ({mine}, here {yours})")
        return ", ".join(found) or None

    def short(self) -> str:
        """Render the fingerprint on one line, hashes cut."""
        shape = f"{self.layers} layers x {self.kv_heads} kv heads x {self.head_dim}"
        hashes = f"config {self.config_sha256[:_DIGITS]}, weights {self.weights_sha256[:_DIGITS]}"
        return f"{self.name!r} ({self.model_type}, {hashes}, {shape})"

    def require(self, other: ModelFingerprint, what: str, weights: bool = True) -> None:
        """Refuse `other`, the model at hand, unless it is the one that `what` (a plan, a file) was made for.

        Raises:
            IncompatibleError: they are different models, or the same one in another dtype; the message says which.
        """
        difference = self.mismatch(other, weights)
        if difference is None:
            return
        only_weights = self.mismatch(other, weights=False) is None
        if only_weights and self.name == other.name and self._rounds_otherwise(other):
            raise IncompatibleError(
                f"{what} was made in {self.dtype}, and this model is loaded in {other.dtype}: {_ROUNDING} rounds small "
                f"weights, so that it has {difference}; load it with --dtype {self.dtype}, or make {what} again"
            )
        names = f"{self.name!r}, and this is {other.name!r}"
        if self.name == other.name:
            names = f"which is called {self.name!r} as this one is"
        hint = ", or load it in the --dtype of then" if only_weights and self.dtype is None else ""
        raise IncompatibleError(
            f"{what} was made for another model, {names}: it has {difference}; use it with that one{hint}"
        )

    def _rounds_otherwise(self, other: ModelFingerprint) -> bool:
        """Tell whether one of two models is known to be in float16 and the other in another dtype."""
        dtypes = {self.dtype, other.dtype}
        return None not in dtypes and len(dtypes) == 2 and _ROUNDING in dtypes
