"""Which model a plan or profile belongs to."""

from __future__ import annotations

from kvsearch.errors import IncompatibleError
from kvsearch.plan.fields import Heads, Layers, Record, Sha256, Text, Width

_COMPARED = {
    "model_type": "architecture", "config_sha256": "configuration", "weights_sha256": "weights", "layers": "layers",
    "kv_heads": "kv heads per layer", "head_dim": "dimensions of a head",
}  # fmt: skip
_DIGITS = 12  # of a hash


class ModelFingerprint(Record):
    """A model by content: hashes of its configuration and weights, and the shape of its KV cache.

    `name` and `revision` are for the reader and never compared. `layers` counts all layers of the model, `kv_heads`
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
            IncompatibleError: they are different models; the message names both, and in what they differ.
        """
        difference = self.mismatch(other, weights)
        if difference is None:
            return
        names = f"{self.name!r}, and this is {other.name!r}"
        if self.name == other.name:
            names = f"which is called {self.name!r} as this one is"
        only_weights = self.mismatch(other, weights=False) is None  # small ones change where they are loaded in float16
        hint = ", or load it in the --dtype of then" if only_weights else ""
        raise IncompatibleError(
            f"{what} was made for another model, {names}: it has {difference}; use it with that one{hint}"
        )
