"""Where a file came from: versions, seed, data and settings; never a time, so that equal inputs give equal files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from kvsearch.plan.contexts import ContextRecord, joined
from kvsearch.plan.fields import Index, Record, SettingField, Sha256, Text, few
from kvsearch.plan.limits import MOST_SETTINGS
from kvsearch.resources import version

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvsearch.plan.profile import Profile

CHANGES = "changes"
POLICIES = "policies."


class Provenance(Record):
    """How a file came about, without a time stamp: equal inputs give equal bytes.

    `kvsearch`, `torch` and `transformers` are version numbers; `settings` are those of the calibration or search,
    scalars or lists of scalars. `contexts` is what it was fitted, chosen and reported on; None: that is not known, as
    of what was written by hand or by an older version.
    """

    method: Text
    seed: Index
    kvsearch: Text
    torch: Text
    transformers: Text
    data_sha256: Sha256 | None = None
    settings: Annotated[dict[Text, SettingField], few(MOST_SETTINGS)] = Field(default_factory=dict)
    contexts: ContextRecord | None = None

    @model_serializer(mode="wrap")
    def _without_unknown(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave unknown contexts out: a file without them keeps its bytes."""
        written: dict[str, Any] = handler(self)
        if self.contexts is None:
            written.pop("contexts", None)
        return written


def provenance(
    method: str, seed: int, data_sha256: str | None, settings: Mapping[str, Any], contexts: ContextRecord | None
) -> Provenance:
    """Return the provenance of something made now, by this installation."""
    return Provenance(
        method=method,
        seed=seed,
        kvsearch=version("kvsearch"),
        torch=version("torch"),
        transformers=version("transformers"),
        data_sha256=data_sha256,
        settings=dict(settings),
        contexts=contexts,
    )


def extended(profile: Profile, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Profile:
    """Return a profile with more arrays, and more settings in its provenance."""
    metadata, origin = profile.metadata, profile.metadata.provenance
    origin = _with_settings(origin, {**origin.settings, **settings})
    return replace(
        profile, metadata=metadata.model_copy(update={"provenance": origin}), arrays={**profile.arrays, **arrays}
    )


def changed(provenance: Provenance, change: str) -> Provenance:
    """Add a line on what was done to `settings["changes"]`, the oldest first."""
    before = provenance.settings.get(CHANGES, ())
    changes = (*before, change) if isinstance(before, tuple) else (before, change)
    return _with_settings(provenance, {**provenance.settings, CHANGES: changes})


def with_policies_of(policies: Provenance, budgets: Provenance) -> Provenance:
    """Take the provenance `budgets` and add `policies` as settings named "policies.method", "policies.settings.data".

    Such settings of `budgets` are dropped: they are about policies that are no longer in the plan. Contexts are those
    of both.
    """
    own = {key: value for key, value in budgets.settings.items() if not key.startswith(POLICIES)}
    origin = {"method": policies.method, "seed": policies.seed, "data_sha256": policies.data_sha256}
    origin |= {f"settings.{key}": value for key, value in policies.settings.items()}
    both = budgets.model_copy(update={"contexts": joined([policies.contexts, budgets.contexts])})
    return _with_settings(both, own | {f"{POLICIES}{key}": value for key, value in origin.items()})


def _with_settings(provenance: Provenance, settings: Mapping[str, Any]) -> Provenance:
    return Provenance(**{**dict(provenance), "settings": dict(settings)})
