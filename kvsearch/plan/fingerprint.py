"""Which model a plan or profile belongs to."""

from __future__ import annotations

from kvsearch.errors import IncompatibleError
from kvsearch.plan.fields import Count, Record, Sha256, Text

_COMPARED = ("model_type", "config_sha256", "weights_sha256", "layers", "kv_heads", "head_dim")


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
    layers: Count
    kv_heads: Count
    head_dim: Count

    def mismatch(self, other: ModelFingerprint, weights: bool = True) -> str | None:
        """Say on one line what differs between two models, or None; `weights=False` lets the weights differ."""
        compared = [field for field in _COMPARED if weights or field != "weights_sha256"]
        differing = [field for field in compared if getattr(self, field) != getattr(other, field)]
        if not differing:
            return None
        verb = "differs" if len(differing) == 1 else "differ"
        return f"{', '.join(differing)} {verb}: expected {self.short()}, got {other.short()}"

    def short(self) -> str:
        """Render the fingerprint on one line, hashes cut to twelve digits."""
        shape = f"{self.layers} layers x {self.kv_heads} kv heads x {self.head_dim}"
        hashes = f"config {self.config_sha256[:12]}, weights {self.weights_sha256[:12]}"
        return f"{self.name!r} ({self.model_type}, {hashes}, {shape})"

    def require(self, other: ModelFingerprint, what: str, weights: bool = True) -> None:
        """Refuse `other`, the model at hand, unless it is the one that `what` (a plan, a file) was made for.

        Raises:
            IncompatibleError: they are different models; the message holds both fingerprints.
        """
        difference = self.mismatch(other, weights)
        if difference is not None:
            raise IncompatibleError(f"{what} was made for another model, use it with that one: {difference}")
