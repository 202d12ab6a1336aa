"""What views of profiles read beyond the schema: settings and measurements that only some methods have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from kvsearch.plan import Profile
from kvsearch.plan.fields import Index
from kvsearch.plan.parsing import shown
from kvsearch.policies.registry import FITTED
from kvsearch.report.files.stored import Stored, damaged, stored
from kvsearch.runs.estimates import Number

Names = Annotated[tuple[str, ...], Field(min_length=1)]


class _Ranking(Stored):
    """The settings of a fitted ranking: what it was compared with, at which shares of a context.

    Views read the settings themselves, so that a number in quotes is none here.
    """

    rankings: Annotated[tuple[str, ...], Field(min_length=2)]  # the fit first
    at: Annotated[tuple[Number, ...], Field(min_length=1)]
    targets: Names
    contexts: tuple[Index, Index, Index]  # to fit on, to choose on, to report on
    features: Names | None = None
    bank: Index | None = None
    chosen_by: str | None = None
    left_out: str | None = None
    left_out_questions: Index | None = None
    kinds: Index | None = None
    without_questions: Index = 0
    unseen_heads: tuple[str, ...] = ()


class _Cake(Stored):
    """The settings of CAKE's table."""

    tau1: Number
    tau2: Number
    exponents: str = "fixed"
    tuned_for: Index | None = None
    fit_ratio: Number | None = None

    @model_validator(mode="after")
    def _says_for_what(self) -> _Cake:
        if self.exponents == "auto" and self.tuned_for is None:
            raise ValueError("tuned_for: is missing")
        return self


def require_shown(profile: Profile, path: Path) -> None:
    """Make sure that a profile has all that `show` and the report say of one; UsageError if the file is damaged."""
    settings, method = profile.metadata.provenance.settings, profile.metadata.method
    if method in FITTED:
        found = stored(_Ranking, settings, path)
        for problem in _unfit(profile, _ranking_shapes(profile, found)):
            raise damaged(path, problem)
        if "kind_loss" in profile.arrays and (found.left_out is None or found.left_out_questions is None):
            raise damaged(path, "provenance.settings: say nothing of the kind that was left out")
        if found.bank is not None and found.chosen_by is None:
            raise damaged(path, "provenance.settings: chosen_by is missing")
    if method == "cake":
        cake = stored(_Cake, settings, path)
        if "fit_loss" in profile.arrays and cake.fit_ratio is None:
            raise damaged(path, "provenance.settings: fit_ratio is missing")
    if "choice_recall" in profile.arrays:
        stated = settings.get("choices")
        names = stated if isinstance(stated, tuple) else (stated,)
        if len(names) != len(profile.arrays["choice_recall"]) or not all(isinstance(name, str) for name in names):
            raise damaged(path, f"provenance.settings: choices {shown(stated)} are not those of choice_recall")


def _ranking_shapes(profile: Profile, found: _Ranking) -> dict[str, tuple[int, ...]]:
    """Return what the arrays that rankings are compared by should be."""
    rankings, budgets, heads = len(found.rankings), len(found.at), profile.metadata.shape
    shapes: dict[str, tuple[int, ...]] = {"recall": (rankings, budgets, *heads)}
    if "loss" in profile.arrays:
        shapes["loss"] = (rankings, budgets)
    if "kind_loss" in profile.arrays:
        shapes |= {"kind_loss": (rankings + 1, budgets), "kind_recall": (rankings + 1, budgets, *heads)}
    return shapes


def _unfit(profile: Profile, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in shapes.items():
        found = profile.arrays[name].shape if name in profile.arrays else None
        if found != shape:
            yield f"arrays.{name}: {'is missing' if found is None else f'has shape {list(found)}'}, not {list(shape)}"
